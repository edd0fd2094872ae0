"""A real trainer that stays alive: scenarios swap plugins and compare on one stored batch with restored weights.

The trainer is verl's own, with its Ray workers, TransferQueue and FSDP2 engines. A case calls verl's ``_step_once``:
the only thing replaced is where rows come from, a buffer that hands out the stored batch again. Parameters and
optimizer are loaded back from a checkpoint before every case. Loss modes change through verl's ``set_loss_fn``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from dataflex_hooks import HookManager, LossCoefficients
from dataflex_verl.local.forkserver import py_executable
from dataflex_verl.local.settings import local_overrides
from dataflex_verl.losses import ApplyTo
from dataflex_verl.probe import check_loss
from dataflex_verl.startup import run_facts


def compose_config(overrides: list[str]) -> DictConfig:
    """verl's configuration with the local settings and ``overrides``, resolved as its task runner does."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*local_overrides(overrides), *overrides])
    OmegaConf.set_struct(config, False)
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


def start_ray(config: DictConfig) -> None:
    """Start Ray as verl's ``run_ppo`` does, once for the whole test session."""
    if ray.is_initialized():
        return
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    runtime_env = {**get_ppo_ray_runtime_env(config), "py_executable": py_executable()}
    runtime_env["env_vars"]["TRANSFER_QUEUE_ENABLE"] = "1"
    ray.init(num_cpus=64, num_gpus=8, include_dashboard=False, log_to_driver=False, runtime_env=runtime_env)


@dataclass(frozen=True)
class StoredBatch:
    """Rows of one rollout: everything needed to put them into TransferQueue again."""

    keys: list[str]
    tags: list[dict]
    fields: TensorDict

    def select(self, positions: list[int]) -> StoredBatch:
        """Some of the rows, through TransferQueue itself: jagged tensors cannot be indexed by a list."""
        keys = [self.keys[i] for i in positions]
        self.put("scratch")
        fields = tq.kv_batch_get(keys=keys, partition_id="scratch")
        tq.kv_clear(keys=self.keys, partition_id="scratch")
        return StoredBatch(keys, [self.tags[i] for i in positions], fields)

    def put(self, partition_id: str = "train") -> KVBatchMeta:
        fields = TensorDict(dict(self.fields.items()), batch_size=self.fields.batch_size)
        tq.kv_batch_put(keys=self.keys, partition_id=partition_id, fields=fields, tags=copy.deepcopy(self.tags))
        return KVBatchMeta(partition_id=partition_id, keys=list(self.keys), tags=copy.deepcopy(self.tags))


class StoredBuffer:
    """Stands in the place of verl's replay buffer and hands out one stored batch."""

    def __init__(self, stored: StoredBatch) -> None:
        self.stored = stored

    def sample(self, **kwargs: Any) -> tuple[KVBatchMeta, dict]:
        return self.stored.put(), {}


@dataclass(frozen=True)
class Outcome:
    """What one update did.

    Attributes:
        metrics: verl's and ours, as the step collected them.
        keys: row keys after balancing, padding included.
        padding: positions of padding rows.
        fields: stored fields by name, a list of one tensor a row.
        timing: seconds of each phase, as verl measures them.
    """

    metrics: dict[str, Any]
    keys: list[str]
    padding: list[int]
    fields: dict[str, list[torch.Tensor]]
    timing: dict[str, float]

    @property
    def grad_norm(self) -> float:
        return float(self.metrics["actor/grad_norm"])

    def of(self, name: str) -> dict[str, torch.Tensor]:
        """A field by row key, padding excluded."""
        real = [i for i in range(len(self.keys)) if i not in set(self.padding)]
        return {self.keys[i]: self.fields[name][i] for i in real}


class LiveTrainer:
    """A trainer in this process. ``config`` is its live configuration: cases may change it through ``settings``."""

    def __init__(self, config: DictConfig, checkpoint: Path, generate: bool = True) -> None:
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls

        self.trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
        self.trainer.init()
        self.config = self.trainer.config
        self.trainer.global_steps = 1
        self.trainer.curr_step_profile = False
        self.trainer.timing_raw = {}
        if generate:
            self.trainer.agent_loop_manager = AgentLoopManagerTQ.create(
                config=self.config,
                llm_client=self.trainer.get_llm_client(),
                teacher_client=None,
                reward_loop_worker_handles=self.trainer.get_reward_handles(),
            )
        self.buffer = self.trainer.replay_buffer
        self.checkpoint = checkpoint
        self.trainer.actor_rollout_wg.save_checkpoint(str(checkpoint / "actor"), None, 0)
        if self.trainer.use_critic:
            self.trainer.critic_wg.save_checkpoint(str(checkpoint / "critic"), None, 0)
        self.has_critic, self.has_reference = self.trainer.use_critic, self.trainer.use_reference_policy
        self.trainer.use_critic = self.trainer.use_reference_policy = False
        self._loss: dict[str, Any] = {}
        self._coefficients: dict[tuple[str, str], LossCoefficients] = {}

    def collect(self) -> StoredBatch:
        """Generate one training batch through verl's own path and keep its rows."""
        trainer = self.trainer
        trainer.prepare_step()
        batch, _ = self.buffer.sample(
            global_steps=trainer.global_steps, partition_id="train", batch_size=self.config.data.train_batch_size
        )
        fields = tq.kv_batch_get(keys=batch.keys, partition_id="train")
        tq.kv_clear(keys=batch.keys, partition_id="train")
        return StoredBatch(list(batch.keys), copy.deepcopy(batch.tags), fields)

    def restore(self) -> None:
        """Load the parameters and optimizer state that the trainer started with."""
        trainer = self.trainer
        trainer.actor_rollout_wg.load_checkpoint(str(self.checkpoint / "actor"), del_local_after_load=False)
        if self.has_critic:
            trainer.critic_wg.load_checkpoint(str(self.checkpoint / "critic"), del_local_after_load=False)

    def update(
        self,
        stored: StoredBatch,
        dataflex: Mapping[str, Any] | None = None,
        *,
        plugins: Mapping[str, object] | None = None,
        step: int = 1,
        loss: Mapping[str, Any] | None = None,
        plain: bool = False,
        keep_weights: bool = False,
        settings: Mapping[str, Any] | None = None,
        fields: tuple[str, ...] = ("rollout_is_weights", "advantages", "response_mask", "rm_scores"),
    ) -> Outcome:
        """Run verl's update once on ``stored``.

        Args:
            stored: the rows.
            dataflex: the ``dataflex`` block of this case.
            plugins: plugin objects by label, added to those of the block.
            step: ``global_steps`` during the case.
            loss: actor settings for the loss (``loss_agg_mode``, ``policy_loss.loss_mode``, ...).
            plain: use verl's own sync trainer class on the same workers instead of ours.
            keep_weights: start from the weights the last case left instead of restoring.
            settings: configuration keys changed for this case.
            fields: stored fields to read back, as far as they are there.
        """
        from verl.trainer.ppo.v1 import PPOTrainerSync

        if not keep_weights:
            self.restore()
        actor = {f"actor_rollout_ref.actor.{name}": value for name, value in (loss or {}).items()}
        with self._settings({**(settings or {}), **actor}):
            self._set_loss()
            trainer = self.trainer
            if plain:
                trainer = object.__new__(PPOTrainerSync)
                trainer.__dict__ = self.trainer.__dict__
            else:
                trainer.hooks = HookManager.from_config(
                    dataflex,
                    estimator=str(self.config.algorithm.adv_estimator),
                    has_groups=True,
                    rollout_n=int(self.config.actor_rollout_ref.rollout.n),
                    response_length=int(self.config.actor_rollout_ref.rollout.response_length),
                    facts=run_facts(self.config),
                    extra_plugins=plugins,
                )
                if trainer.hooks.labels:
                    trainer.coefficients = self._check_loss(trainer.hooks.config.apply_to)
            trainer.global_steps = step
            trainer.replay_buffer = StoredBuffer(stored)
            metrics: dict[str, Any] = {}
            timing: dict[str, float] = {}
            try:
                batch = trainer._step_once(metrics, timing, len(stored.keys))
                data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
            finally:
                everything = tq.kv_list("train").get("train", {})
                if everything:
                    tq.kv_clear(keys=list(everything), partition_id="train")
        present = {name: list(data[name].unbind()) for name in fields if name in data.keys()}
        padding = [i for i, tag in enumerate(batch.tags) if tag.get("is_padding")]
        return Outcome(metrics, list(batch.keys), padding, present, timing)

    def state(self) -> list[torch.Tensor]:
        """Parameters and optimizer state of the actor, as they are now."""
        path = self.checkpoint / "look"
        self.trainer.actor_rollout_wg.save_checkpoint(str(path), None, 0)
        files = sorted(path.rglob("model_*.pt")) + sorted(path.rglob("optim_*.pt"))
        return [tensor for file in files for tensor in _tensors(torch.load(file, weights_only=False))]

    def same_state(self, before: list[torch.Tensor]) -> bool:
        """Whether parameters and optimizer state are bit for bit those of ``before``."""
        now = self.state()
        return len(now) == len(before) and all(torch.equal(a, b) for a, b in zip(now, before, strict=True))

    def gradient_direction(self) -> torch.Tensor:
        """Direction of the gradient of the last update, the first of its optimizer: Adam's first moment, of norm 1."""
        path = self.checkpoint / "look"
        self.trainer.actor_rollout_wg.save_checkpoint(str(path), None, 0)
        (file,) = path.rglob("optim_*.pt")
        state = torch.load(file, weights_only=False)["state"]
        moment = torch.cat([_local(entry["exp_avg"]).double().flatten() for _, entry in sorted(state.items())])
        return moment / moment.norm()

    @contextmanager
    def _settings(self, settings: Mapping[str, Any]) -> Iterator[None]:
        before = {key: OmegaConf.select(self.config, key) for key in settings}
        with open_dict(self.config):
            for key, value in settings.items():
                OmegaConf.update(self.config, key, value, force_add=True)
            try:
                yield
            finally:
                for key, value in before.items():
                    OmegaConf.update(self.config, key, value, force_add=True)

    def _check_loss(self, apply_to: ApplyTo) -> LossCoefficients:
        """verl's loss is asked once for each of its settings, as a run asks it once."""
        settings = f"{self.config.actor_rollout_ref.actor} {self.config.algorithm}", apply_to
        if settings not in self._coefficients:
            self._coefficients[settings] = check_loss(self.config, apply_to)
        return self._coefficients[settings]

    def _set_loss(self) -> None:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss

        actor = OmegaConf.create(OmegaConf.to_container(self.config.actor_rollout_ref.actor, resolve=True))
        if not self.trainer.use_reference_policy:
            actor.use_kl_loss = False
        now = OmegaConf.to_container(actor)
        if now != self._loss:
            self.trainer.actor_rollout_wg.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(actor)))
            self._loss = now


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a nested state, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield _local(tree)
    elif isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from _tensors(tree[key])
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
