"""The part of the hook manager that concerns rollouts: ``post_reward`` and ``post_advantage``, called and merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dataflex_hooks.adjust import AdjustedRewards, adjust
from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import AddedRow, RewardDecision, given_parts
from dataflex_hooks.entries import Entry
from dataflex_hooks.errors import DecisionError, Origin
from dataflex_hooks.merge import MergedUpdate, merge_resolved
from dataflex_hooks.merge_reward import Generated, MergedReward, merge_reward
from dataflex_hooks.plugin_calls import PluginCalls
from dataflex_hooks.resolve import ResolvedReward, ResolvedUpdate, resolve_rewards, resolve_update

R = TypeVar("R")
M = TypeVar("M")
D = TypeVar("D", ResolvedReward, ResolvedUpdate)
AddedCheck = Callable[[Sequence[AddedRow], Origin], object]


class RolloutCalls(PluginCalls):
    """Laid under the hook manager."""

    def post_reward(self, batch: RolloutBatch, ctx: StepContext, check_added: AddedCheck | None = None) -> MergedReward:
        """Call ``post_reward`` and merge.

        The owner of rewards first; then those that give scales and shifts, each with the owner's rewards in the batch;
        then the others, with the rewards that apply.

        Args:
            batch: all real rows.
            ctx: of the step.
            check_added: what the host asks of the rows that one plugin adds; raises DecisionError.

        Raises:
            PluginError: a plugin failed, or returned what it must not.
        """

        def resolve(decision: RewardDecision, batch: RolloutBatch, origin: Origin) -> ResolvedReward:
            checked = resolve_rewards(decision, batch, origin)
            if checked.add and check_added is not None:
                check_added(checked.add, origin)
            return checked

        called = self._called_at("post_reward", ctx.step)
        turns = [[entry for entry in called if entry.reward_turn == turn] for turn in range(3)]
        resolved: list[ResolvedReward] = []
        for entry in turns[0]:
            resolved += self._asked(entry, "post_reward", batch, ctx, resolve)
        given = next((decision.rewards for decision in resolved if decision.rewards is not None), None)
        owned = batch if given is None else batch.with_token_field("rm_scores", given)
        for entry in turns[1]:
            resolved += self._asked(entry, "post_reward", owned, ctx, resolve)

        def adjusted_by(decisions: Sequence[ResolvedReward]) -> tuple[RolloutBatch, AdjustedRewards]:
            # Without their owner's decision the rewards are the batch's own again.
            seen = owned if any(decision.rewards is not None for decision in decisions) else batch
            return seen, adjust(decisions, seen)

        resolved, (seen, adjusted) = self._merged(resolved, adjusted_by)
        seen = seen if adjusted.rewards is None else seen.with_token_field("rm_scores", adjusted.rewards)
        for entry in turns[2]:
            resolved += self._asked(entry, "post_reward", seen, ctx, resolve)
        merged = merge_reward(resolved, seen, self.config.keep_rules, adjusted)
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
        rules = (self.config.mask_scale, self.config.keep_rules, generated)
        _, merged = self._merged(resolved, lambda decisions: merge_resolved(decisions, batch, coefficients, *rules))
        merged.metrics.update(self.disabled_metrics())
        return merged

    def _merged(self, decisions: list[D], merge: Callable[[list[D]], M]) -> tuple[list[D], M]:
        """Merge; plugins whose decision cannot be merged even alone have failed, and the rest is merged without them.

        Returns:
            The decisions that were merged, and what they come to.
        """
        try:
            return decisions, merge(decisions)
        except DecisionError:
            ordered = sorted(decisions, key=lambda decision: decision.label)
            alone = [(decision, error) for decision in ordered if (error := _error(merge, decision)) is not None]
            if not alone:
                raise
        for decision, error in alone:
            self._entries[decision.label].disable_or_raise(decision.origin, error, self._disabled)
        rest = [decision for decision in decisions if decision.label not in self._disabled]
        return rest, merge(rest)

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


def _error(merge: Callable[[list[D]], M], decision: D) -> DecisionError | None:
    """What keeps a decision from being merged on its own."""
    try:
        merge([decision])
    except DecisionError as error:
        return error
    return None
