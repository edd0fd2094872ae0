"""Plugins on a batch, through the hook manager that a run uses: registration, checks, calls, merge."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import DomainStats, PromptBatch, RolloutBatch
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.context import StepContext
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, DomainSums
from dataflex_hooks.entries import Entry
from dataflex_hooks.errors import ConfigError, FieldError
from dataflex_hooks.keep import lone_rows
from dataflex_hooks.manager import HookManager
from dataflex_hooks.merge_reward import MergedReward
from dataflex_hooks.plugins.mechanism import LATE_FIELDS
from dataflex_hooks.testing.batches import grpo_advantages
from dataflex_hooks.testing.outcome import Outcome, nothing
from dataflex_hooks.testing.rebuild import only_fields, take_rows, token_index

Loss = Literal["token", "sequence"] | LossCoefficients
ALWAYS = frozenset({"response_mask"})
"""Batch fields that a run hands to every plugin; all others have to be declared."""
LONE = "plugin"
"""The label of a plugin that is given without one."""
_LATE = LATE_FIELDS - {"token_level_rewards"}


class RecordingManager(HookManager):
    """Remembers what each plugin returned since ``recorded`` was last emptied."""

    def __init__(self, plugins: Mapping[str, object] | None = None) -> None:
        self.recorded: dict[str, dict[str, Any]] = {}
        super().__init__(plugins)

    def _call(self, entry: Entry, hook: str, **arguments: object) -> object:
        decision = super()._call(entry, hook, **arguments)
        self.recorded.setdefault(entry.label, {})[hook] = decision
        return decision


class HookRunner:
    """Several steps with the same plugins, as a run makes them: plugins keep their state, proportions stay in force.

    Args:
        plugins: a plugin, or plugins by label, in call order.
        config: a ``dataflex`` block, for its rules (``{"mask_scale": "kept"}``) or for plugins beside the given ones;
            its ``on_error``, ``warmup_step`` and ``slow_plugin_seconds`` hold for all of them.
        loss: coefficients under which weights are normalised: ``"token"`` (token-mean) or ``"sequence"``
            (seq-mean-token-mean), or what a loss really has.
        domains: names of the run's domains; None: those of the first batch or statistics.
        rollouts, response_length: facts of the run, for plugins that take them.
        estimator: advantage estimator, for the checks at registration.
        manager: the class of the manager.

    Raises:
        ConfigError: with everything wrong with the plugins and the block.
    """

    def __init__(
        self,
        plugins: object = None,
        *,
        config: Mapping[str, Any] | None = None,
        loss: Loss = "token",
        domains: Collection[str] | None = None,
        rollouts: int | None = None,
        response_length: int | None = None,
        estimator: str = "grpo",
        manager: type[RecordingManager] = RecordingManager,
    ) -> None:
        self._lone = None if plugins is None or isinstance(plugins, Mapping) else _name_of(plugins)
        try:
            built = manager.from_config(
                config,
                estimator=estimator,
                has_groups=None,
                rollout_n=rollouts,
                response_length=response_length,
                extra_plugins=_by_label(plugins),
            )
        except ConfigError as error:
            raise self._told(error) from error.__cause__
        assert isinstance(built, RecordingManager)
        self.hooks = built
        self.loss = loss if isinstance(loss, LossCoefficients) else LossCoefficients(loss)
        self.domains: tuple[str, ...] = ()
        self.proportions: NDArray[np.float64] = np.zeros(0)
        self.last_step = 0
        if domains is not None:
            self._start(tuple(domains))

    def step(
        self,
        batch: RolloutBatch | None = None,
        *,
        prompts: PromptBatch | None = None,
        stats: DomainStats | None = None,
        ctx: StepContext | None = None,
    ) -> Outcome:
        """Call the hooks of one step, as far as there is something to call them with.

        The trainer hands over the fields that are declared, and so does this. With new rewards, or rows dropped with
        ``advantages="kept"``, advantages of GRPO are worked out again; rows dropped at ``post_reward`` are not there at
        ``post_advantage``.

        Args:
            batch: for ``post_reward`` and ``post_advantage``; statistics by domain are taken from it too.
            prompts: for ``pre_rollout``.
            stats: for ``on_domain_stats``, in place of those of the batch.
            ctx: of the step; None: the step after the last one.

        Raises:
            PluginError: a plugin failed, returned what it must not, or declares a field that is not there.
        """
        ctx = ctx or StepContext(step=self.last_step + 1)
        self.last_step = ctx.step
        self.hooks.recorded = {}
        admitted, priority = (None, None) if prompts is None else self._pre_rollout(prompts, ctx)
        outcome, sums = (nothing(), None) if batch is None else self._update(batch, ctx)
        proportions = self._domains(sums if stats is None else None, stats, ctx)
        return replace(
            outcome,
            decisions=self.hooks.recorded,
            admitted=admitted,
            priority=priority,
            proportions=proportions,
            metrics={**outcome.metrics, **self.hooks.calls.take()},
        )

    # ---------------------------------------------------------------- the hooks

    def _pre_rollout(self, prompts: PromptBatch, ctx: StepContext) -> tuple[Any, Any]:
        wanted = self.hooks.candidate_columns()
        if missing := sorted(wanted - prompts.columns.keys()):
            there = ", ".join(prompts.columns) or "none"
            raise FieldError(f"plugins read the columns {', '.join(missing)} at pre_rollout; the prompts have {there}")
        columns = {name: prompts.columns[name] for name in sorted(wanted)}
        return self.hooks.pre_rollout(PromptBatch(prompts.dataset_rows, prompts.domains, columns), ctx)

    def _update(self, batch: RolloutBatch, ctx: StepContext) -> tuple[Outcome, DomainSums | None]:
        if self.hooks.mixes and not self.domains:
            self._start(tuple(sorted({str(name) for name in batch.column(DOMAIN_COLUMN)})))
        sums = DomainSums(self.domains) if self.hooks.mixes else None
        there = frozenset(set(batch.field_names) - _LATE)
        view = self._view(batch, "post_reward", ctx, there, counts=sums is not None)
        merged = self.hooks.post_reward(view, ctx)
        rewarded = batch if merged.rewards is None else _with_rewards(batch, merged.rewards, ctx)
        if sums is not None:
            seen = view if merged.rewards is None else view.with_token_field("rm_scores", merged.rewards)
            sums.add_rewarded(seen)
            self.hooks.observe("post_reward", seen, ctx)
        return self._post_advantage(rewarded, merged, sums, ctx)

    def _post_advantage(
        self, batch: RolloutBatch, merged: MergedReward, sums: DomainSums | None, ctx: StepContext
    ) -> tuple[Outcome, DomainSums | None]:
        every = torch.ones(batch.bs, dtype=torch.bool)
        stays = every if merged.row_keep is None else merged.row_keep
        rows = stays.nonzero().flatten()
        left = batch if merged.row_keep is None else take_rows(batch, rows)
        if merged.row_keep is not None and merged.advantages == "kept" and _recomputes(left, ctx):
            left = left.with_token_field("advantages", _over_kept(batch, merged.row_keep, left))
        view = self._view(left, "post_advantage", ctx, frozenset(batch.field_names), counts=sums is not None)
        generated = merged.generated if merged.row_keep is not None else None
        update = self.hooks.post_advantage(view, ctx, self.loss, generated)
        if sums is not None:
            sums.add_advantages(view, update.row_keep)
            self.hooks.observe("post_advantage", view, ctx)
        still = every[rows] if update.in_batch is None else update.in_batch
        weights = torch.zeros(batch.n_tokens, dtype=torch.float32)
        weights[token_index(batch.offsets, rows)] = update.weights * view.expand_rows(still).float()
        has_rewards = "rm_scores" in batch.field_names
        outcome = Outcome(
            decisions={},
            in_batch=_spread(still, rows, batch.bs),
            kept=_spread(update.row_keep & still, rows, batch.bs),
            excluded=_spread(torch.zeros_like(still) if update.excluded is None else update.excluded, rows, batch.bs),
            weights=weights,
            row_weights=batch.mean_over_tokens(weights),
            rewards=batch.rewards if has_rewards else None,
            token_rewards=batch.values("rm_scores") if has_rewards else None,
            added=merged.add,
            update_scale=update.update_scale,
            skip_update=merged.skip_update or update.skip_update,
            metrics={**merged.metrics, **update.metrics},
        )
        return outcome, sums

    def _domains(self, sums: DomainSums | None, stats: DomainStats | None, ctx: StepContext) -> Any:
        if not self.hooks.mixes or (sums is None and stats is None):
            return None
        if stats is not None and not self.domains:
            self._start(stats.domains)
        decided = self.hooks.on_domain_stats(stats or sums.stats(self.proportions), ctx)  # type: ignore[union-attr]
        self.proportions = self.proportions if decided is None else decided
        return decided

    # ---------------------------------------------------------------- what a run does around them

    def _start(self, domains: tuple[str, ...]) -> None:
        self.domains = domains
        try:
            first = self.hooks.start_domains(domains)
        except ConfigError as error:
            raise self._told(error) from error.__cause__
        self.proportions = np.full(len(domains), 1 / len(domains)) if first is None else first

    def _told(self, error: ConfigError) -> ConfigError:
        return error if self._lone is None else by_author(error, self._lone)

    def _view(
        self, batch: RolloutBatch, hook: str, ctx: StepContext, there: frozenset[str], counts: bool
    ) -> RolloutBatch:
        """The fields that are declared, and with ``counts`` those that statistics by domain take."""
        # A mixer that fails leaves, and the step is counted to its end.
        if not counts and not self.hooks.active(hook, ctx.step):
            return batch
        wanted = self.hooks.required_fields(hook, ctx.step)
        if missing := wanted - there:
            self.hooks.refuse_missing(hook, ctx.step, missing, there)
        if counts:
            counted = "rm_scores" if hook == "post_reward" else "advantages"
            wanted |= self.hooks.observed_fields(hook) | {counted, DOMAIN_COLUMN}
        return only_fields(batch, wanted | ALWAYS)


def run_hooks(
    plugins: object = None,
    batch: RolloutBatch | None = None,
    *,
    prompts: PromptBatch | None = None,
    stats: DomainStats | None = None,
    ctx: StepContext | None = None,
    **run: Any,
) -> Outcome:
    """Call the hooks of one step with a run of their own: ``HookRunner(plugins, **run).step(batch, ...)``.

    Args:
        plugins: a plugin, or plugins by label.
        batch, prompts, stats, ctx: as for :meth:`HookRunner.step`.
        **run: ``config``, ``loss``, ``domains``, ... as for :class:`HookRunner`.

    Raises:
        ConfigError: the plugins fail the checks at registration.
        PluginError: a plugin failed, returned what it must not, or declares a field that is not there.
    """
    return HookRunner(plugins, **run).step(batch, prompts=prompts, stats=stats, ctx=ctx)


def _by_label(plugins: object) -> dict[str, object]:
    if plugins is None:
        return {}
    if isinstance(plugins, Mapping):
        return dict(plugins)
    return {LONE: plugins}


def by_author(error: ConfigError, name: str) -> ConfigError:
    """Return problems of a plugin without a label by what its author wrote: its keywords, and ``name`` for itself."""
    path = f"dataflex.plugins.{LONE}"
    settings = ((problem, problem.setting) for problem in error.problems)
    return ConfigError(
        [
            replace(problem, setting=name if setting in (path, f"{path}.plugin") else setting.removeprefix(f"{path}."))
            for problem, setting in settings
        ]
    )


def _name_of(plugin: object) -> str:
    return (plugin if isinstance(plugin, type) else type(plugin)).__name__


def _with_rewards(batch: RolloutBatch, rewards: Tensor, ctx: StepContext) -> RolloutBatch:
    replaced = batch.with_token_field("rm_scores", rewards)
    return replaced.with_token_field("advantages", grpo_advantages(replaced)) if _recomputes(batch, ctx) else replaced


def _recomputes(batch: RolloutBatch, ctx: StepContext) -> bool:
    return ctx.estimator == "grpo" and {"advantages", "rm_scores"} <= set(batch.field_names)


def _over_kept(batch: RolloutBatch, keep: Tensor, left: RolloutBatch) -> Tensor:
    """GRPO's advantages over the rows that stay; a row that stays alone of its group has those of the whole group."""
    alone = left.expand_rows(lone_rows(batch, keep)[keep])
    whole = grpo_advantages(batch)[token_index(batch.offsets, keep.nonzero().flatten())]
    return torch.where(alone, whole, grpo_advantages(left))


def _spread(values: Tensor, rows: Tensor, n: int) -> Tensor:
    spread = torch.zeros(n, dtype=torch.bool)
    spread[rows] = values
    return spread
