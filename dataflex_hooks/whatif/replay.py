"""Runs plugins over logged steps as the trainer would have, with one call a hook and update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.context import StepContext
from dataflex_hooks.decision_log.rows import own_keep, row_weights
from dataflex_hooks.decision_log.schema import Facts
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, DomainSums, equal_rewards
from dataflex_hooks.entries import GROUP_ESTIMATORS
from dataflex_hooks.keep import lone_rows
from dataflex_hooks.manager import HookManager
from dataflex_hooks.merge import MergedUpdate
from dataflex_hooks.merge_reward import MergedReward
from dataflex_hooks.segments import row_sum
from dataflex_hooks.whatif.logged_batch import LoggedBatch, LoggedRows
from dataflex_hooks.whatif.steps import STATE_CODE, LoggedUpdate, ReplayStep, token_fields

Flags = NDArray[np.bool_]
_TRAINED, _MASKED, _DROPPED = (STATE_CODE[name] for name in ("trained", "masked", "dropped"))


@dataclass(frozen=True)
class Decided:
    """What a strategy decided about the rollouts of one update.

    Attributes:
        state: (bs,) int8: 0 trained, 1 masked, 2 dropped.
        weight: (bs,) float32; means where tokens differ; 0 for dropped rows.
        against: for each label that masks or drops, its reason and the rows that it did not keep (bs,) bool.
        skip_update: no optimizer step would have been made.
        weights: (T,) float32 weights of tokens of the rows that are not dropped, in their order; None where they do not
            differ within a response.
    """

    state: NDArray[np.int8]
    weight: NDArray[np.float32]
    against: tuple[tuple[str, str, Flags], ...] = ()
    skip_update: bool = False
    weights: torch.Tensor | None = None


class Replay:
    """One strategy over the steps of a log, in order.

    Args:
        hooks: its plugins, new: their state is that before the first step.
        facts: of the run.
        domains: names, for a strategy that mixes.
        shares: proportions in force where the log has none, (K,).
        tokens: whether plugins get the values of tokens that were logged.

    Attributes:
        proposed: step and proportions (K,) that a mixer decided on, each time that it did.
        started: the proportions that it began with, None for those of the data.
    """

    def __init__(
        self,
        hooks: HookManager,
        facts: Facts,
        domains: Sequence[str] = (),
        shares: Sequence[float] = (),
        tokens: bool = False,
    ) -> None:
        self.hooks, self.facts, self.domains, self.tokens = hooks, facts, tuple(domains), tokens
        self.coefficients = LossCoefficients(**facts.coefficients)
        self.proposed: list[tuple[int, NDArray[np.float64]]] = []
        self._shares = np.array(shares, dtype=np.float64)
        self.started = hooks.start_domains(self.domains) if hooks.mixes else None
        weighs = any("weights" in row["provides"] for row in hooks.plan())
        self._lengths_matter = self.coefficients.kind == "token" and (weighs or hooks.config.mask_scale == "kept")

    def step(self, step: ReplayStep) -> list[Decided]:
        """Decide about one step; one result an update."""
        sums = DomainSums(self.domains) if self.hooks.mixes else None
        decided = [self._update(step, update, sums) for update in step.updates]
        if sums is not None:
            given = step.info.get("proportions")
            in_force = self._shares if given is None else np.array(given, dtype=np.float64)
            last = step.updates[-1].update if step.updates else 0
            shares = self.hooks.on_domain_stats(sums.stats(in_force), self._context(step.step, last))
            if shares is not None:
                self.proposed.append((step.step, shares))
        return decided

    def _context(self, step: int, update: int) -> StepContext:
        facts = self.facts
        return StepContext(step, update, facts.mode, facts.estimator, seed=facts.seed)

    def _batch(self, rows: LoggedRows, by_row: bool = True) -> LoggedBatch:
        return LoggedBatch(rows, by_row, self._lengths_matter)

    def _update(self, step: ReplayStep, update: LoggedUpdate, sums: DomainSums | None) -> Decided:
        ctx, applied = self._context(step.step, update.update), self.hooks.config.apply
        if sums is not None and update.evicted is not None:
            self._evicted(update.evicted, sums, ctx)
        before = self._batch(update.rows)
        reward = self.hooks.post_reward(before, ctx)
        rows = update.rows
        if reward.rewards is not None and applied:
            total = row_sum(reward.rewards, before.offsets).to(torch.float32).numpy()
            rows = replace(rows, reward=np.asarray(total, dtype=np.float32))
        if sums is not None:
            counted = self._batch(rows)
            sums.add_rewarded(counted)
            self.hooks.observe("post_reward", counted, ctx)
        keep = np.ones(len(rows), dtype=bool)
        if applied and reward.row_keep is not None:
            keep = self._kept(before, reward)
        there = np.flatnonzero(keep)
        after = self._after(update, rows, there)
        generated = reward.generated if reward.row_keep is not None and applied else None
        merged = self.hooks.post_advantage(after, ctx, self.coefficients, generated)
        if sums is not None:
            self._advantaged(update, after, there, merged, sums, ctx)
        return _decided(update, reward, merged, after, there, applied)

    def _after(self, update: LoggedUpdate, rows: LoggedRows, there: NDArray[np.int64]) -> LoggedBatch:
        """The rows that come as far as ``post_advantage``."""
        part = rows if len(there) == len(rows) else rows.take(there)
        if update.loss_tokens is not None and part.valid is not None:
            # -1 where the run had dropped the row before: then its tokens are those that the model wrote.
            loss = update.loss_tokens[there]
            part = replace(part, valid=np.where(loss < 0, part.valid, loss))
        fields = token_fields(update, there) if self.tokens else {}
        return self._batch(replace(part, tokens=fields), by_row=not fields)

    def _kept(self, batch: LoggedBatch, reward: MergedReward) -> Flags:
        """Rows that stay in the batch: the host also drops those that lose their baseline."""
        assert reward.row_keep is not None
        keep = reward.row_keep
        possible = bool(self.facts.settings.get("group_advantages", True))
        if not possible and self.facts.estimator in GROUP_ESTIMATORS:
            keep = keep & ~lone_rows(batch, keep)
        return np.asarray(keep.numpy(), dtype=bool)

    def _advantaged(
        self,
        update: LoggedUpdate,
        batch: LoggedBatch,
        there: NDArray[np.int64],
        merged: MergedUpdate,
        sums: DomainSums,
        ctx: StepContext,
    ) -> None:
        known = update.has_advantage[there]
        if not known.any():
            return
        kept = merged.row_keep
        if not known.all():
            batch, kept = self._batch(batch.rows.take(known)), kept[torch.from_numpy(known)]
        sums.add_advantages(batch, kept)
        self.hooks.observe("post_advantage", batch, ctx)

    def _evicted(self, rows: LoggedRows, sums: DomainSums, ctx: StepContext) -> None:
        """As in a run: where all rewards of a group are equal its advantages are 0, elsewhere they are not known."""
        batch = self._batch(rows)
        sums.add_evicted(batch)
        self.hooks.observe("post_reward", batch, ctx)
        wanted = self.hooks.observed_fields("post_advantage")
        flat = equal_rewards(batch)[batch.group.numpy()]
        if not flat.any() or not wanted <= {"advantages", "response_mask", DOMAIN_COLUMN, "rm_scores"} or not wanted:
            return
        zeros = np.zeros(int(flat.sum()), dtype=np.float32)
        self.hooks.observe("post_advantage", self._batch(replace(rows.take(flat), abs_advantage=zeros)), ctx)


def _decided(
    update: LoggedUpdate,
    reward: MergedReward,
    merged: MergedUpdate,
    after: LoggedBatch,
    there: NDArray[np.int64],
    applied: bool,
) -> Decided:
    n = len(update.rows)
    state, weight = np.full(n, _DROPPED, dtype=np.int8), np.zeros(n, dtype=np.float32)
    state[there] = np.where(merged.row_keep.numpy(), _TRAINED, _MASKED)
    row_weight = row_weights(after, merged).numpy()
    if merged.in_batch is not None:
        state[there[~merged.in_batch.numpy()]] = _DROPPED
    if not applied and reward.row_keep is not None:
        state[~reward.row_keep.numpy()] = _DROPPED
    weight[there] = row_weight
    weight[state == _DROPPED] = 0
    against = []
    for early in reward.decisions:
        if early.keep is not None:
            against.append((early.label, early.reason, ~np.asarray(early.keep.numpy(), dtype=bool)))
    for decision in merged.decisions:
        own = own_keep(decision, after)
        if own is not None:
            rows = np.zeros(n, dtype=bool)
            rows[there] = ~own.numpy()
            against.append((decision.label, decision.reason, rows))
    skip = merged.skip_update or (reward.skip_update and applied)
    tokens = merged.weights if merged.per_token else None
    return Decided(state, weight, tuple(against), skip, tokens)
