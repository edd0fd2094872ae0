"""The overrides that make verl's default configuration run on a CPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from dataflex_verl.local.forkserver import py_executable

ROLLOUT_NAME = "transformers"

# Variables that also a run needs which was started without local_environment(); a value of the user's own wins.
WORKER_ENVIRONMENT = {
    # verl registers its FSDP engines for cuda and npu; the same classes run on the CPU.
    "VERL_ENGINE_DEVICE": "cuda",
    # TransferQueue asks for 8 threads at every transfer, warns each time and resizes torch's pool back and forth.
    "TQ_NUM_THREADS": "1",
    # The number of threads decides last bits of a sum, and Ray would set it to the number of CPUs that verl asks for.
    "OMP_NUM_THREADS": "1",
}

_ENGINES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")


def local_overrides(given: Iterable[str] = ()) -> list[str]:
    """Hydra overrides for the local backend, without those whose key the user's own overrides set.

    Args:
        given: the user's overrides; they win.

    Returns:
        Overrides to put before the user's.
    """
    own = {override_key(text): text for text in _overrides()}
    for text in given:
        own.pop(override_key(text), None)
    return list(own.values())


def override_key(override: str) -> str:
    """The configuration key of a Hydra override, without its ``+``, ``++`` or ``~``."""
    return re.split(r"=", override, maxsplit=1)[0].lstrip("+~").strip()


def local_environment() -> dict[str, str]:
    """Environment variables that select the local backend; set them before Python imports verl."""
    return {
        "VERL_PLATFORM": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        **WORKER_ENVIRONMENT,
    }


def _overrides() -> list[str]:
    engines = [
        override
        for engine in _ENGINES
        for override in (
            f"{engine}.strategy=fsdp2",
            # verl's engines compute in bfloat16 unless all three are set; on a CPU that is slow and coarse.
            *(
                f"++{_engine_config(engine)}.mixed_precision.{name}=fp32"
                for name in ("param_dtype", "reduce_dtype", "buffer_dtype")
            ),
            f"{_engine_config(engine)}.use_torch_compile=False",
        )
    ]
    return [
        "trainer.device=cpu",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        *engines,
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.ref.use_torch_compile=False",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "critic.use_dynamic_bsz=True",
        # Packed sequences need flash attention, which needs an accelerator.
        "actor_rollout_ref.model.use_remove_padding=False",
        "critic.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "critic.model.enable_gradient_checkpointing=False",
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "++critic.model.override_config.attn_implementation=sdpa",
        f"actor_rollout_ref.rollout.name={ROLLOUT_NAME}",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.logger=[console]",
        # Ray counts these, the machine does not need them: verl asks for three CPUs a worker and for its "GPU".
        f"ray_kwargs.ray_init.num_cpus={max(16, os.cpu_count() or 1)}",
        "++ray_kwargs.ray_init.num_gpus=8",
        "++ray_kwargs.ray_init.include_dashboard=False",
        # Not in the configuration of verl 0.9.0.
        f"++ray_kwargs.ray_init.runtime_env.py_executable={_quoted(py_executable())}",
    ]


def _quoted(text: str) -> str:
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def _engine_config(engine: str) -> str:
    return f"{engine}.fsdp_config" if engine.startswith("actor_rollout_ref") else f"{engine}.fsdp"
