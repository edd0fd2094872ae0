"""Hooks that run when a verl module is imported and fit it to a CPU. Installed only under ``VERL_PLATFORM=cpu``.

Each entry names the verl module, what it does there and why verl's own code cannot be used as it is. None of them
touches a loss, an estimator or a trainer step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import wrapt

from dataflex_verl.compat import LOCAL, checked, require
from dataflex_verl.local import families, forkserver
from dataflex_verl.local.agent_loop import ask_balancer_once, instantiate_plainly
from dataflex_verl.local.determinism import count_prompt_ids, sort_rows
from dataflex_verl.local.settings import ROLLOUT_NAME, WORKER_ENVIRONMENT


class _OncePerMessage(logging.Filter):
    """Lets each distinct text through once: verl repeats one note for every single rollout."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text in self._seen:
            return False
        self._seen.add(text)
        return True


def install_local_backend() -> None:
    """Register the CPU platform and the rollout, and the post-import hooks below."""
    platform = "verl.plugin.platform"
    require({platform: LOCAL[platform]})
    from verl.plugin.platform import PlatformRegistry

    from dataflex_verl.local.platform import CPUPlatform

    PlatformRegistry.register(platform="cpu")(CPUPlatform)
    # Before Ray starts, so that every worker inherits them.
    for name, value in WORKER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if forkserver.is_wanted(sys.orig_argv):
        with contextlib.suppress(OSError):
            forkserver.start_server()
    for module_name, hook in _HOOKS:
        wrapt.register_post_import_hook(checked(hook), module_name)


def _use_gloo(module: ModuleType) -> None:
    # verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice here and torch refuses that.
    module.initialize_global_process_group_ray = functools.partial(
        module.initialize_global_process_group_ray, backend="gloo"
    )


def _register_replica(module: ModuleType) -> None:
    def load() -> type:
        from dataflex_verl.local.rollout import TransformersReplica

        return TransformersReplica

    module.RolloutReplicaRegistry.register(ROLLOUT_NAME, load)


def _register_adapter(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "dataflex_verl.local.rollout.TransformersAdapter"


def _offload_without_pinning(module: ModuleType) -> None:
    # The reference policy uses CPUOffloadPolicy(pin_memory=True); pinning needs an accelerator.
    policy = module.CPUOffloadPolicy

    def unpinned(*args: Any, **kwargs: Any) -> Any:
        return policy(pin_memory=False)

    module.CPUOffloadPolicy = unpinned


def _merged_lora_in_full_precision(module: ModuleType) -> None:
    # verl rounds merged LoRA weights to bfloat16 on their way to the rollout, which computes in float32 here.
    def merged(self: Any) -> Iterator[tuple[str, Any]]:
        try:
            with module.merged_lora_context(self.module, backup_adapters=True):
                state = module.normalize_peft_param_name(self.module.state_dict())
                for name, value in module.convert_weight_keys(state, self.module).items():
                    # Copies: the context takes the adapters out of the live weights again.
                    yield name, value.full_tensor() if isinstance(value, module.DTensor) else value.detach().clone()
        finally:
            if self._is_offload_param:
                module.offload_fsdp_model_to_cpu(self.module)

    module.FSDPEngine._merged_lora_per_tensor_param = merged


def _poll_often(module: ModuleType) -> None:
    # The buffer looks for finished rollouts every two seconds: on a tiny model that is most of a step.
    original = module.ReplayBuffer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("poll_interval", 0.05)
        original(self, *args, **kwargs)

    module.ReplayBuffer.__init__ = init


def _note_once(module: ModuleType) -> None:
    module.logger.addFilter(_OncePerMessage())


_HOOKS = (
    ("verl.utils.tokenizer.tokenizer", families.add_plain_chat_template),
    ("verl.utils.tokenizer.continuous_token_wiring", _note_once),
    ("verl.utils.distributed", _use_gloo),
    ("verl.workers.rollout.replica", _register_replica),
    ("verl.workers.rollout.base", _register_adapter),
    ("verl.models.transformers.monkey_patch", families.accept_ungrouped_heads),
    ("verl.workers.engine.fsdp.transformer_impl", _offload_without_pinning),
    ("verl.workers.engine.fsdp.transformer_impl", _merged_lora_in_full_precision),
    ("verl.utils.model", families.load_value_head_without_flash_attention),
    ("verl.utils.model", families.find_language_model_heads),
    ("verl.trainer.ppo.v1.replay_buffer", _poll_often),
    ("verl.trainer.ppo.v1.replay_buffer", sort_rows),
    ("verl.trainer.ppo.v1.trainer_base", count_prompt_ids),
    ("verl.experimental.agent_loop.agent_loop", instantiate_plainly),
    ("verl.workers.rollout.llm_server", ask_balancer_once),
)
