"""The one generic trainer class: verl's trainer with the hooks called at four places of its step.

``DataFlexTrainer`` is a class body without a base of its own; :func:`register_trainers` lays it over verl's trainer
classes. It knows no strategy: it calls the hook manager and applies the merged decision.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict

from dataflex_hooks import AddedRow, HookManager, LossCoefficients, MergedReward, Origin, StepContext
from dataflex_verl import added_checks, added_passes, added_rows, bridge, checkpoint, decision_log, drop, state_files
from dataflex_verl.apply import StepState, apply_reward, apply_update, refuse_shuffle
from dataflex_verl.compat import require
from dataflex_verl.mixing import DomainMixing
from dataflex_verl.modes import MODES
from dataflex_verl.plan import plan_lines, store_plan
from dataflex_verl.probe import check_loss
from dataflex_verl.startup import prepare_with

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
        self.log = decision_log.open_log(config, self.hooks, self.coefficients, lines)
        # verl switches on this name (buffer class, fetch size, checkpoint contents); it must see its own mode.
        with open_dict(config):
            config.trainer.v1.trainer_mode = base_mode
        self._last_metrics: dict[str, Any] = {}
        self._state = StepState()
        self._checkpoints = checkpoint.Kept()
        self._just_saved: Path | None = None
        self.mixing: DomainMixing | None = None
        super().__init__(config)

    # ---------------------------------------------------------------- prompts

    def _build_replay_buffer(self) -> Any:
        from dataflex_verl.replay_buffer import build_buffer

        return build_buffer(self.config, super()._build_replay_buffer, watched=self.hooks.mixes)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if not (self.hooks.mixes or self.hooks.draws):
            return
        # verl's own collate function and workers go on serving the validation data.
        collate_fn = self.train_dataloader.collate_fn
        self.mixing = DomainMixing(self.hooks, self.config, self.train_dataset, collate_fn, self._context)
        self.train_dataloader = self.mixing.loader
        if self.log is not None:
            self.log.watch(self.mixing)
        if self.hooks.mixes:
            self.replay_buffer.watch(self.mixing.evicted, self.mixing.domains, self.mixing.sampler.trained)

    # ---------------------------------------------------------------- verl's loop and its step

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        with decision_log.written_to_the_end(self.log):
            return super().fit(*args, **kwargs)

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        if self.mixing is not None:
            metrics.update(self.mixing.end_of_step(self._context()))
            self.hooks.calls.take_into(metrics)
            metrics.update(self.hooks.disabled_metrics())
        if self.log is not None:
            self.log.end_of_step()
        # The same dict collects the rest of this step's metrics until the next step begins.
        self._last_metrics = metrics
        return batch

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        self._state = StepState()
        if self._looks or self.hooks.active("post_reward", self.global_steps):
            batch = self._post_reward(batch, metrics)
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        if self._state.resized:
            batch = drop.spread(batch, self._shape())
        return added_passes.mark(batch) if self._state.added else batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        run = super()._compute_old_log_prob
        return added_passes.old_log_prob(run, batch, metrics, self.config) if self._state.added else run(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        extra_info = dict(batch.extra_info or {})
        run = super()._compute_advantage
        batch = added_passes.advantage(run, batch, metrics, self.config) if self._state.added else run(batch, metrics)
        if self._state.advantages is not None:
            batch = self._state.advantages.restore(batch)
        asked = self._looks or self.hooks.active("post_advantage", self.global_steps)
        if asked or self._state.resized:
            batch.extra_info = extra_info | (batch.extra_info or {})
            batch = self._post_advantage(batch, metrics)
        self.hooks.calls.take_into(metrics)
        metrics.update(self.hooks.disabled_metrics())
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._state.skip_update:
            return batch
        if not self._state.resized:
            return super()._update_critic(batch, metrics)
        shape = self._shape()
        super()._update_critic(drop.with_real_rows(batch, shape, shape.critic_mini), metrics)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._state.skip_update:
            return batch
        if not self._state.resized:
            return super()._update_actor(batch, metrics)
        shape = self._shape()
        super()._update_actor(drop.with_real_rows(batch, shape, shape.actor_mini), metrics)
        return batch

    def _shape(self) -> drop.Shape:
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        multiple = self._get_required_batch_multiple(ranks)
        return drop.Shape.of(self.config, self.global_steps, ranks, multiple, self.use_critic)

    # ---------------------------------------------------------------- checkpoints

    def _save_checkpoint(self) -> None:
        # Before verl's part, which ends with the tracker file that a run resumes by.
        if self.hooks.labels:
            folder = checkpoint.step_folder(self.config, self.global_steps)
            self._just_saved = state_files.write(folder, self.hooks, self.global_steps, self._last_metrics)
        super()._save_checkpoint()
        if self._just_saved is not None:
            self._checkpoints.add(self._just_saved, self.config, self.use_critic)

    def _load_checkpoint(self) -> None:
        folder = checkpoint.resume_folder(self.config)
        super()._load_checkpoint()
        if folder is not None:
            self._last_metrics = checkpoint.restore(folder, self.hooks)
            if self.log is not None:
                self.log.resumed(self.global_steps)
        if self.mixing is not None:
            self.mixing.restored()

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        if self._just_saved is not None:
            state_files.write_metrics(self._just_saved, self.global_steps, metrics)
            self._just_saved = None

    # ---------------------------------------------------------------- hooks

    @property
    def _looks(self) -> bool:
        """Whether rows are looked at in every step, plugin or none."""
        return self.mixing is not None or self.log is not None

    def _context(self) -> StepContext:
        return StepContext(
            step=self.global_steps,
            local_update=self.local_trigger_step,
            mode=self.trainer_mode,
            estimator=str(self.config.algorithm.adv_estimator),
            last_metrics=self._last_metrics,
            seed=self.config.data.get("seed") or 0,
            explain=self.log is not None,
        )

    def _fetch(self, batch: KVBatchMeta, hook: str, **kwargs: Any) -> bridge.FetchedRows:
        wanted = self.hooks.required_fields(hook, self.global_steps)
        if self.mixing is not None:
            wanted |= self.mixing.fields(hook)
        logged = self.log.fields(hook) if self.log is not None else frozenset()
        rows = bridge.fetch(batch, wanted | logged, **kwargs)
        if rows.missing & wanted:
            self.hooks.refuse_missing(hook, self.global_steps, rows.missing & wanted, bridge.stored_fields(batch))
        return rows

    def _post_reward(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        started = time.perf_counter()
        rows = self._fetch(batch, "post_reward")
        checked: dict[str, list[added_checks.TokenRow]] = {}

        def check_added(add: Sequence[AddedRow], origin: Origin) -> None:
            limits = added_checks.Limits.of(self.config, self.tokenizer)
            groups = set(rows.view.uid.tolist())
            checked[origin.label] = added_checks.resolve(add, origin, limits, self.tokenizer, groups)

        applied = self.hooks.config.apply
        merged = self.hooks.post_reward(rows.view, self._context(), check_added if applied else None)
        metrics.update(merged.metrics)
        if self.mixing is not None:
            replaced = merged.rewards if applied else None
            self.mixing.rewarded(rows.view if replaced is None else rows.view.with_token_field("rm_scores", replaced))
        if self.log is not None:
            self.log.rewarded(rows.view, merged, self._context())
        if applied:
            # What stays whole is counted again after advantages, where rewards may be in the batch and were not here.
            self._state.generated = merged.generated if merged.row_keep is not None else None
            added = self._added_rows(merged, checked)
            batch, more = apply_reward(batch, rows, merged, self._state, self.config, added)
            metrics.update(more)
            batch = self._add(batch, added, metrics)
        metrics["dataflex/applied"] = float(applied)
        metrics["dataflex/skip_update"] = float(merged.skip_update or self._state.skip_update)
        metrics["timing_s/dataflex"] = time.perf_counter() - started
        return batch

    def _added_rows(
        self, merged: MergedReward, checked: Mapping[str, list[added_checks.TokenRow]]
    ) -> dict[str, added_checks.TokenRow]:
        if not merged.add:
            return {}
        refuse_shuffle(self.config)
        labels = dict.fromkeys(label for label, _ in merged.add)
        rows = [row for label in labels for row in checked[label]]
        return added_rows.keyed(rows, self.global_steps, self.local_trigger_step)

    def _add(self, batch: KVBatchMeta, added: dict[str, added_checks.TokenRow], metrics: dict) -> KVBatchMeta:
        if not added:
            return batch
        stay = added_rows.present(added, batch)
        metrics["dataflex/added_rows"] = float(len(stay))
        metrics["dataflex/added_rows_without_group"] = float(len(added) - len(stay))
        if not stay:
            return batch
        self._state.added = self._state.resized = True
        domain_key = str(self.hooks.config.shared.get("domain_key", "domain"))
        return added_rows.put(batch, stay, domain_key)

    def _post_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        started = time.perf_counter()
        hooks, state = self.hooks, self._state
        rows = self._fetch(batch, "post_advantage", with_weights=True)
        merged = hooks.post_advantage(rows.view, self._context(), self.coefficients, state.generated)
        metrics.update(merged.metrics)
        if self.mixing is not None:
            self.mixing.advantaged(rows.view, merged.row_keep)
        skips = state.skip_update or merged.skip_update
        if hooks.config.apply:
            batch, more = apply_update(
                batch, rows, merged, state, hooks.config, self.coefficients, self._shape, self.config
            )
            metrics.update(more)
            state.skip_update = skips
        if self.log is not None:
            self.log.advantaged(rows.view, merged, skips, state.fill)
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
