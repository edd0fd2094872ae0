"""The part of the hook manager that concerns rollouts: ``post_reward`` and ``post_advantage``, called and merged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.context import StepContext
from dataflex_hooks.entries import Entry
from dataflex_hooks.errors import DecisionError, Origin
from dataflex_hooks.merge import MergedUpdate, merge_resolved
from dataflex_hooks.merge_reward import Generated, MergedReward, merge_reward
from dataflex_hooks.metric_names import label_metric
from dataflex_hooks.plugin_calls import PluginCalls
from dataflex_hooks.resolve import ResolvedReward, ResolvedUpdate, resolve_rewards, resolve_update

R = TypeVar("R")


class RolloutCalls(PluginCalls):
    """Laid under the hook manager."""

    def post_reward(self, batch: RolloutBatch, ctx: StepContext) -> MergedReward:
        """Call ``post_reward`` and merge; the owner of rewards first, then the others with its rewards in the batch.

        Raises:
            PluginError: a plugin failed, or returned what it must not.
        """
        resolved: list[ResolvedReward] = []
        called = self._called_at("post_reward", ctx.step)
        for entry in sorted(called, key=lambda e: "rewards" not in e.declared.provides):
            decision = self._decide(entry, "post_reward", batch, ctx, resolve_rewards)
            if decision is not None:
                resolved.append(decision)
                if decision.rewards is not None:
                    batch = batch.with_token_field("rm_scores", decision.rewards)
        merged = merge_reward(resolved, batch, self.config.keep_rules)
        merged.metrics.update(self._disabled_metrics())
        return merged

    def post_advantage(
        self,
        batch: RolloutBatch,
        ctx: StepContext,
        coefficients: LossCoefficients,
        generated: Generated | None = None,
    ) -> MergedUpdate:
        """Call ``post_advantage`` and merge the decisions; see :func:`dataflex_hooks.merge.merge_update`.

        Args:
            batch: the real rows that are still in the batch.
            ctx: of the step.
            coefficients: of the configured loss.
            generated: what the step generated, where rows have been dropped since.

        Raises:
            PluginError: a plugin failed, or returned what it must not.
        """
        resolved: list[ResolvedUpdate] = []
        for entry in self._called_at("post_advantage", ctx.step):
            decision = self._decide(entry, "post_advantage", batch, ctx, resolve_update)
            if decision is not None:
                resolved.append(decision)
        config = self.config
        merged = merge_resolved(resolved, batch, coefficients, config.mask_scale, config.keep_rules, generated)
        merged.metrics.update(self._disabled_metrics())
        return merged

    def _disabled_metrics(self) -> dict[str, float]:
        return {label_metric(label, "disabled"): 1.0 for label in sorted(self._disabled)}

    def _decide(
        self,
        entry: Entry,
        hook: str,
        batch: RolloutBatch,
        ctx: StepContext,
        resolve: Callable[[Any, RolloutBatch, Origin], R],
    ) -> R | None:
        origin = entry.origin(hook, ctx.step)
        started, decision = time.perf_counter(), None
        try:
            decision = self._call(entry, hook, batch=batch, ctx=ctx)
            entry.check(decision, origin)
            resolved = None if decision is None else resolve(decision, batch, origin)
        except Exception as error:
            self.calls.add(origin, batch, decision, time.perf_counter() - started, error)
            _refuse_mutation(batch, origin, error)
            entry.disable_or_raise(origin, error, self._disabled)
            return None
        self.calls.add(origin, batch, decision, time.perf_counter() - started)
        _refuse_mutation(batch, origin, None)
        return resolved


def _refuse_mutation(batch: RolloutBatch, origin: Origin, cause: Exception | None) -> None:
    changed = batch.mutated()
    if changed:
        text = f"changed {', '.join(changed)} in place; batches are read-only: work on a copy (tensor.clone())"
        raise DecisionError(origin, text) from cause
