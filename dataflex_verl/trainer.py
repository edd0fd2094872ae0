"""The one generic trainer class: verl's trainer with the hooks called at four places of its step.

``DataFlexTrainer`` is a class body without a base of its own; :func:`register_trainers` lays it over verl's trainer
classes. It knows no strategy: it calls the hook manager and applies the merged decision.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict

from dataflex_hooks import HookManager, LossCoefficients, StepContext
from dataflex_verl import bridge, drop
from dataflex_verl.apply import StepState, apply_reward, apply_update
from dataflex_verl.compat import require
from dataflex_verl.plan import plan_lines, store_plan
from dataflex_verl.probe import check_loss
from dataflex_verl.startup import MODES, prepare_with

if TYPE_CHECKING:
    from transfer_queue import KVBatchMeta


class DataFlexTrainer:
    """Calls ``post_reward`` before verl balances a batch and ``post_advantage`` after it computed advantages.

    Without plugins every method falls through to verl's.

    Raises:
        ConfigError: everything wrong with the ``dataflex`` block, before any worker is created.
    """

    def __init__(self, config: DictConfig) -> None:
        base_mode = MODES[config.trainer.v1.trainer_mode]
        self.hooks, self.coefficients = prepare(config)
        lines = plan_lines(self.hooks, self.coefficients, config)
        print("\n".join(lines))
        store_plan(config, lines)
        # verl switches on this name (buffer class, fetch size, checkpoint contents); it must see its own mode.
        with open_dict(config):
            config.trainer.v1.trainer_mode = base_mode
        self._last_metrics: dict[str, Any] = {}
        self._state = StepState()
        super().__init__(config)

    # ---------------------------------------------------------------- verl's step

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        # The same dict collects the rest of this step's metrics until the next step begins.
        self._last_metrics = metrics
        return batch

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        self._state = StepState()
        if self.hooks.active("post_reward", self.global_steps):
            batch = self._post_reward(batch, metrics)
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        return drop.spread(batch, self._shape()) if self._state.dropped else batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        extra_info = dict(batch.extra_info or {})
        batch = super()._compute_advantage(batch, metrics)
        if self._state.advantages is not None:
            batch = self._state.advantages.restore(batch)
        if self.hooks.active("post_advantage", self.global_steps) or self._state.dropped:
            batch.extra_info = extra_info | (batch.extra_info or {})
            batch = self._post_advantage(batch, metrics)
        metrics.update(self.hooks.calls.take())
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._state.skip_update:
            return batch
        if not self._state.dropped:
            return super()._update_critic(batch, metrics)
        shape = self._shape()
        super()._update_critic(drop.with_real_rows(batch, shape, shape.critic_mini), metrics)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._state.skip_update:
            return batch
        if not self._state.dropped:
            return super()._update_actor(batch, metrics)
        shape = self._shape()
        super()._update_actor(drop.with_real_rows(batch, shape, shape.actor_mini), metrics)
        return batch

    def _shape(self) -> drop.Shape:
        """What the updates of this step ask of a batch, from the settings that verl pads by."""
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        n = self.config.actor_rollout_ref.rollout.n
        updates_actor = self.config.trainer.critic_warmup <= self.global_steps
        return drop.Shape(
            ranks=ranks,
            multiple=self._get_required_batch_multiple(ranks),
            actor_mini=self.config.actor_rollout_ref.actor.ppo_mini_batch_size * n if updates_actor else None,
            critic_mini=self.config.critic.ppo_mini_batch_size * n if self.use_critic else None,
        )

    # ---------------------------------------------------------------- hooks

    def _context(self) -> StepContext:
        return StepContext(
            step=self.global_steps,
            local_update=self.local_trigger_step,
            mode=self.trainer_mode,
            estimator=str(self.config.algorithm.adv_estimator),
            last_metrics=self._last_metrics,
            seed=self.config.data.get("seed") or 0,
        )

    def _fetch(self, batch: KVBatchMeta, hook: str, **kwargs: Any) -> bridge.FetchedRows:
        rows = bridge.fetch(batch, self.hooks.required_fields(hook, self.global_steps), **kwargs)
        if rows.missing:
            self.hooks.refuse_missing(hook, self.global_steps, rows.missing, bridge.stored_fields(batch))
        return rows

    def _post_reward(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        started = time.perf_counter()
        rows = self._fetch(batch, "post_reward")
        merged = self.hooks.post_reward(rows.view, self._context())
        metrics.update(merged.metrics)
        if self.hooks.config.apply:
            self._state.generated = merged.generated
            batch, more = apply_reward(batch, rows, merged, self._state, self.config)
            metrics.update(more)
        metrics["dataflex/applied"] = float(self.hooks.config.apply)
        metrics["dataflex/skip_update"] = float(merged.skip_update or self._state.skip_update)
        metrics["timing_s/dataflex"] = time.perf_counter() - started
        return batch

    def _post_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        started = time.perf_counter()
        hooks, state = self.hooks, self._state
        rows = self._fetch(batch, "post_advantage", with_weights=True)
        merged = hooks.post_advantage(rows.view, self._context(), self.coefficients, state.generated)
        metrics.update(merged.metrics)
        skips = state.skip_update or merged.skip_update
        if hooks.config.apply:
            batch, more = apply_update(
                batch, rows, merged, state, hooks.config, self.coefficients, self._shape, self.config
            )
            metrics.update(more)
            state.skip_update = skips
        metrics["dataflex/applied"] = float(hooks.config.apply)
        metrics["dataflex/skip_update"] = float(skips)
        metrics["timing_s/dataflex"] = metrics.get("timing_s/dataflex", 0.0) + time.perf_counter() - started
        return batch


def prepare(config: DictConfig) -> tuple[HookManager, LossCoefficients]:
    """Build the plugins of a run and ask the configured loss whether decisions reach it.

    Raises:
        UnsupportedVerl: verl lacks a name that the trainer relies on.
        ConfigError: with every problem of the block and of the loss.
    """
    require()
    return prepare_with(config, check_loss)


def register_trainers() -> None:
    """Register the modes of :data:`MODES` in verl's trainer registry.

    Raises:
        UnsupportedVerl: there is no such registry.
    """
    require({"verl.trainer.ppo.v1.trainer_base": ("TRAINER_REGISTRY", "register_trainer")})
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer

    classes: dict[str, type] = {}
    for name, base_mode in MODES.items():
        if name in TRAINER_REGISTRY:
            continue
        if base_mode not in classes:
            base = TRAINER_REGISTRY[base_mode]
            title = "DataFlex" + base_mode.title().replace("_", "")
            classes[base_mode] = type(title, (DataFlexTrainer, base), {"__module__": __name__, "__doc__": base.__doc__})
        register_trainer(name)(classes[base_mode])
