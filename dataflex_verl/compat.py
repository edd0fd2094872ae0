"""Which verl this package runs with, and every name of verl's that it relies on without a promise from verl.

Two checks, both cheap. :func:`unsupported` looks at verl's files only, for the commands that do not import verl. In a
run, :func:`require` looks the names up in the modules that the run has imported anyway, before a worker is created;
names of the local backend when its own hooks run. A test walks the source and holds that every name is listed.

In a table, ``Class.name`` is an attribute of the class, ``Class().name`` one that its methods set or read on ``self``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

SUPPORTED = "verl>=0.9,<0.10"
_V1 = Path("trainer", "ppo", "v1", "trainer_base.py")

TRAINER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "verl.trainer.ppo.v1.trainer_base": (
            "TRAINER_REGISTRY",
            "register_trainer",
            "PPOTrainer.__init__",
            "PPOTrainer.fit",
            "PPOTrainer.step",
            "PPOTrainer._balance_batch",
            "PPOTrainer._build_replay_buffer",
            "PPOTrainer._compute_advantage",
            "PPOTrainer._compute_metrics",
            "PPOTrainer._compute_old_log_prob",
            "PPOTrainer._get_required_batch_multiple",
            "PPOTrainer._init_dataloader",
            "PPOTrainer._load_checkpoint",
            "PPOTrainer._save_checkpoint",
            "PPOTrainer._update_actor",
            "PPOTrainer._update_critic",
            "PPOTrainer().actor_rollout_wg",
            "PPOTrainer().config",
            "PPOTrainer().global_steps",
            "PPOTrainer().local_trigger_step",
            "PPOTrainer().replay_buffer",
            "PPOTrainer().tokenizer",
            "PPOTrainer().train_dataloader",
            "PPOTrainer().train_dataset",
            "PPOTrainer().trainer_mode",
            "PPOTrainer().use_critic",
        ),
        "verl.trainer.ppo.v1.replay_buffer": (
            "ReplayBuffer.__init__",
            "ReplayBuffer._evict_terminal_groups",
            "ReplayBuffer._select_prompt_uids",
            "ReplayBuffer.sample",
            "ReplayBuffer().max_off_policy_strategy",
            "ReplayBuffer().max_off_policy_threshold",
            "ReplayBuffer().partitions",
            "ReplayBuffer().trainer_mode",
        ),
        "verl.trainer.ppo.v1.utils": ("compute_advantage_for_multi_trajectories",),
        "verl.trainer.ppo.core_algos": ("POLICY_LOSS_REGISTRY", "agg_loss"),
        "verl.trainer.ppo.padding_utils": ("build_padding_position_ids",),
        "verl.trainer.ppo.rollout_corr_helper": ("compute_rollout_correction_and_add_to_batch",),
        "verl.utils.debug.metrics": ("calculate_debug_metrics",),
        "verl.utils.config": ("omega_conf_to_dataclass",),
        "verl.utils.tensordict_utils": ("assign_non_tensor", "list_of_dict_to_tensordict"),
        "verl.workers.utils.losses": ("ppo_loss",),
        "verl.protocol": ("DataProto",),
        "transfer_queue": ("KVBatchMeta", "kv_batch_get", "kv_batch_put", "kv_clear"),
    }
)
"""Names that every run with hooks relies on, by module."""

LOCAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "verl.plugin.platform": ("PlatformRegistry.register",),
        "verl.plugin.platform.platform_base": ("PlatformBase",),
        "verl.single_controller.ray.base": ("RayWorkerGroup",),
        "verl.utils.tokenizer.tokenizer": ("set_pad_token_id",),
        "verl.utils.tokenizer.continuous_token_wiring": ("logger",),
        "verl.utils.distributed": ("initialize_global_process_group_ray",),
        "verl.utils.model": ("get_hf_auto_model_class", "load_valuehead_model"),
        "verl.models.transformers.monkey_patch": ("apply_monkey_patch",),
        "verl.workers.engine.fsdp.transformer_impl": (
            "CPUOffloadPolicy",
            "DTensor",
            "FSDPEngine._merged_lora_per_tensor_param",
            "convert_weight_keys",
            "merged_lora_context",
            "normalize_peft_param_name",
            "offload_fsdp_model_to_cpu",
        ),
        "verl.workers.rollout.base": (
            "_ROLLOUT_REGISTRY",
            "BaseRollout.release",
            "BaseRollout.resume",
            "BaseRollout.update_weights",
            "BaseRollout().model_config",
        ),
        "verl.workers.rollout.replica": (
            "RolloutReplica.init_hybrid",
            "RolloutReplica.launch_servers",
            "RolloutReplica().config",
            "RolloutReplica().is_reward_model",
            "RolloutReplica().is_teacher_model",
            "RolloutReplica().max_concurrency",
            "RolloutReplica().model_config",
            "RolloutReplica().replica_rank",
            "RolloutReplica().servers",
            "RolloutReplica()._server_address",
            "RolloutReplica()._server_handle",
            "RolloutReplica().workers",
            "RolloutReplica().world_size",
            "RolloutReplicaRegistry.register",
        ),
        "verl.workers.rollout.llm_server": (
            "FullyAsyncLLMServerClient",
            "LLMServerClient._acquire_server",
            "LLMServerClient._release_server",
        ),
        "verl.trainer.ppo.v1.replay_buffer": (
            "ReplayBuffer.__init__",
            "ReplayBuffer._materialize_batch",
            "tq.kv_batch_get",
        ),
        "verl.trainer.ppo.v1.trainer_base": (
            "PPOTrainer._fetch_one_gen_batch",
            "PPOTrainer().global_steps",
            "tu.assign_non_tensor_stack",
        ),
        "verl.experimental.agent_loop.agent_loop": ("hydra",),
    }
)
"""Names that the local backend relies on besides, by module."""


class UnsupportedVerl(ImportError):
    """The installed verl is not one that the hooks can work with; no worker was created."""


def unsupported(directory: Path) -> str | None:
    """Say why the verl in ``directory`` cannot be used, or return None; looks at its files only."""
    if (directory / _V1).is_file():
        return None
    return (
        f"verl {version_in(directory)} has no v1 trainer ({_V1.as_posix()}), which the hooks extend; nothing was "
        f"started. Install one that has it: pip install '{SUPPORTED}'"
    )


def version_in(directory: Path) -> str:
    """The version of the verl in ``directory``, by its own file, else by what is installed under its name."""
    try:
        return (directory / "version" / "version").read_text(encoding="utf-8").strip()
    except OSError:
        pass
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def require(table: Mapping[str, Iterable[str]] = TRAINER) -> None:
    """Look up every name of ``table``, importing its modules.

    Raises:
        UnsupportedVerl: naming everything that is missing, and verl's version.
    """
    missing = [f"{module}.{name}" for module, names in table.items() for name in _missing(module, names)]
    if missing:
        raise UnsupportedVerl(_refusal(missing))


def checked(hook: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Wrap a post-import hook of the local backend: the names it relies on in its module are looked up first."""

    @wraps(hook)
    def run(module: ModuleType) -> None:
        missing = [f"{module.__name__}.{name}" for name in LOCAL[module.__name__] if not has(module, name)]
        if missing:
            raise UnsupportedVerl(_refusal(missing))
        hook(module)

    return run


def has(module: ModuleType, name: str) -> bool:
    """Whether ``module`` has ``name``, in the notation of the tables."""
    on_instance = "()." in name
    owner: Any = module
    path = name.replace("()", "").split(".")
    for part in path[:-1]:
        owner = getattr(owner, part, None)
    if on_instance:
        return owner is not None and path[-1] in _on_self(owner)
    return hasattr(owner, path[-1])


def _missing(module: str, names: Iterable[str]) -> list[str]:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Something else that is not installed is a fault of its own, with its own message.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return list(names)
    return [name for name in names if not has(found, name)]


def _on_self(owner: type) -> set[str]:
    """Attribute names in the code of a class and of those it derives from, and their class attributes."""
    names: set[str] = set(dir(owner)) | set(inspect.get_annotations(owner))
    for base in owner.__mro__:
        for member in vars(base).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
            names |= set(code.co_names) if code is not None else set()
    return names


def _refusal(missing: list[str]) -> str:
    listed = "\n".join(f"  {name}" for name in missing)
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return (
        f"verl {version} lacks what dataflex-verl {metadata.version('dataflex-verl')} relies on; no worker was "
        f"created. Install {SUPPORTED}, or a newer dataflex-verl. Missing:\n{listed}"
    )
