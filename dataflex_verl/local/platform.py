"""verl's platform interface for a machine without an accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase


class _NoStream:
    """Stands where an accelerator stream would: CPU work is done when the call returns."""

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_stream(self, stream: object) -> None:
        return None

    def synchronize(self) -> None:
        return None


def _device_module() -> ModuleType:
    """The functions verl calls on ``torch.<device>``, and no others: an unknown one must fail, not answer nonsense."""
    module = ModuleType("dataflex_verl.local.cpu_device")
    no_stream = _NoStream()
    total = psutil.virtual_memory().total
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda index: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "get_device_name": lambda index=0: "cpu",
        "mem_get_info": lambda device=None: (psutil.virtual_memory().available, total),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "current_stream": lambda device=None: no_stream,
        "stream": lambda stream=None: no_stream,
        "Stream": lambda *args, **kwargs: no_stream,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


class CPUPlatform(PlatformBase):
    """The CPU, presented to Ray as the resource ``GPU`` because verl's resource checks count only GPU and NPU."""

    def __init__(self) -> None:
        self._device_module = _device_module()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Never chosen by detection, only by VERL_PLATFORM=cpu.
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

    def current_device(self) -> Any:
        # verl passes this to Tensor.to(), where an index would mean an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
