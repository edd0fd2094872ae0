"""The part of the hook manager that concerns rollouts: ``post_reward`` and ``post_advantage``, called and merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dataflex_hooks.adjust import adjust
from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import given_parts
from dataflex_hooks.entries import Entry
from dataflex_hooks.errors import Origin
from dataflex_hooks.merge import MergedUpdate, merge_resolved
from dataflex_hooks.merge_reward import Generated, MergedReward, merge_reward
from dataflex_hooks.plugin_calls import PluginCalls
from dataflex_hooks.resolve import ResolvedReward, ResolvedUpdate, resolve_rewards, resolve_update

R = TypeVar("R")


class RolloutCalls(PluginCalls):
    """Laid under the hook manager."""

    def post_reward(self, batch: RolloutBatch, ctx: StepContext) -> MergedReward:
        """Call ``post_reward`` and merge.

        The owner of rewards first; then those that give scales and shifts, each with the owner's rewards in the batch;
        then the others, with the rewards that apply.

        Raises:
            PluginError: a plugin failed, or returned what it must not.
        """
        called = self._called_at("post_reward", ctx.step)
        turns = [[entry for entry in called if entry.reward_turn == turn] for turn in range(3)]
        resolved: list[ResolvedReward] = []
        for entry in turns[0]:
            resolved += self._asked(entry, "post_reward", batch, ctx, resolve_rewards)
        owned = next((decision.rewards for decision in resolved if decision.rewards is not None), None)
        batch = batch if owned is None else batch.with_token_field("rm_scores", owned)
        for entry in turns[1]:
            resolved += self._asked(entry, "post_reward", batch, ctx, resolve_rewards)
        adjusted = adjust(resolved, batch)
        batch = batch if adjusted.rewards is None else batch.with_token_field("rm_scores", adjusted.rewards)
        for entry in turns[2]:
            resolved += self._asked(entry, "post_reward", batch, ctx, resolve_rewards)
        merged = merge_reward(resolved, batch, self.config.keep_rules, adjusted)
        merged.metrics.update(self.disabled_metrics())
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
            resolved += self._asked(entry, "post_advantage", batch, ctx, resolve_update)
        config = self.config
        merged = merge_resolved(resolved, batch, coefficients, config.mask_scale, config.keep_rules, generated)
        merged.metrics.update(self.disabled_metrics())
        return merged

    def _asked(
        self,
        entry: Entry,
        hook: str,
        batch: RolloutBatch,
        ctx: StepContext,
        resolve: Callable[[Any, RolloutBatch, Origin], R],
    ) -> list[R]:
        """Call one plugin; its checked decision, or nothing where it decided nothing."""
        origin = entry.origin(hook, ctx.step)

        def checked(decision: Any) -> R | None:
            resolved = resolve(decision, batch, origin)
            return resolved if given_parts(decision) or decision.metrics is None else None

        resolved = self._decide(entry, origin, {"batch": batch, "ctx": ctx}, batch, checked)
        return [] if resolved is None else [resolved]
