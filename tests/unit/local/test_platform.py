"""The CPU platform answers what verl asks of an accelerator, and nothing else."""

from __future__ import annotations

import inspect

import pytest
import torch

from dataflex_verl.local.platform import CPUPlatform


@pytest.fixture
def platform():
    return CPUPlatform()


def test_every_abstract_method_of_verls_interface_is_there():
    assert not inspect.isabstract(CPUPlatform)


def test_verl_uses_it_when_asked_to():
    from verl.plugin.platform import get_platform
    from verl.utils.device import get_device_id, get_device_name

    assert type(get_platform()).__name__ == "CPUPlatform"
    assert get_device_name() == "cpu"
    assert get_device_id() == torch.device("cpu")


@pytest.mark.parametrize("value", ["", "cuda", None])
def test_it_is_never_detected(platform, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("VERL_PLATFORM")
    else:
        monkeypatch.setenv("VERL_PLATFORM", value)
    assert not platform.is_platform_available()
    monkeypatch.setenv("VERL_PLATFORM", " CPU ")
    assert platform.is_platform_available()


def test_tensors_move_to_its_current_device(platform):
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"
    assert platform.device_module.current_device() == torch.device("cpu")


def test_resources_are_counted_as_verl_counts_them(platform):
    assert platform.ray_resource_name() == "GPU"
    assert platform.communication_backend_name() == "gloo"
    assert platform.is_available() and platform.device_count() == 1
    assert platform.ray_noset_envvars() == []
    assert not platform.is_ipc_supported()


def test_memory_is_that_of_the_machine(platform):
    available, total = platform.device_module.mem_get_info()
    assert 0 < available <= total
    assert platform.device_module.max_memory_allocated() == 0
    assert isinstance(platform.device_module.get_device_name(), str)


def test_random_state_of_the_device_is_torchs(platform):
    module = platform.device_module
    platform.manual_seed(3)
    state = module.get_rng_state()
    first = torch.rand(2)
    module.set_rng_state(state)
    assert torch.equal(first, torch.rand(2))
    platform.manual_seed_all(3)
    assert torch.equal(first, torch.rand(2))


def test_streams_and_profiling_do_nothing(platform):
    module = platform.device_module
    with module.stream(module.current_stream()), platform.nvtx_range("step"):
        module.Stream().synchronize()
        module.current_stream().wait_stream(module.Stream())
    for call in (
        platform.synchronize,
        platform.empty_cache,
        platform.profiler_start,
        platform.profiler_stop,
        platform.cudart,
        module.synchronize,
        module.empty_cache,
        module.reset_peak_memory_stats,
    ):
        assert call() is None
    assert platform.set_device(0) is None and platform.set_allocator_settings("") is None
    assert platform.get_device_capability() == (None, None)
    assert platform.visible_devices_envvar() == "CUDA_VISIBLE_DEVICES"


def test_a_function_of_an_accelerator_alone_fails(platform):
    with pytest.raises(AttributeError):
        platform.device_module.memory_snapshot()
