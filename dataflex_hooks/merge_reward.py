"""How decisions at ``post_reward`` become one: new rewards, rows that stay, rows to add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dataflex_hooks.adjust import AdjustedRewards
from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.decisions import AddedRow
from dataflex_hooks.errors import DecisionError, FieldError
from dataflex_hooks.keep import KeepRules, groups_of, sessions_of, shortfall
from dataflex_hooks.metric_names import label_metric
from dataflex_hooks.resolve import ResolvedReward

Advantages = Literal["kept", "group"]


@dataclass(frozen=True)
class Generated:
    """What the step generated, before anything was dropped.

    Attributes:
        rollouts, groups: how many.
        reward: mean reward over all rollouts, None where rewards are not in the batch.
    """

    rollouts: int
    groups: int
    reward: float | None

    @classmethod
    def of(cls, batch: RolloutBatch) -> Generated:
        """Count a batch of which nothing has been dropped."""
        try:
            return cls(batch.n_sessions, batch.n_groups, batch.mean_reward)
        except FieldError:
            return cls(batch.n_sessions, batch.n_groups, None)


@dataclass(frozen=True)
class MergedReward:
    """What happens to the rows before any log-prob pass.

    Attributes:
        rewards: (T,) float32 in place of the old, scales and shifts applied; None to leave them. ``owner`` gave what
            they come from (empty: verl's own), ``per_token`` if per token.
        row_keep: (bs,) bool, rows that stay in the batch; None when nobody drops any.
        advantages: over which rows a group's advantages are computed; None for the host's default.
        skip_update: the fallback asks for no optimizer step.
        add: label and row, in an order that does not depend on the order of plugins.
        generated: the batch before the drop.
        metrics: under ``dataflex/``.
        decisions: what was merged, one a plugin that decided, by label.
    """

    rewards: Tensor | None
    owner: str
    per_token: bool
    row_keep: Tensor | None
    advantages: Advantages | None
    skip_update: bool
    add: tuple[tuple[str, AddedRow], ...]
    generated: Generated
    metrics: dict[str, float] = field(default_factory=dict)
    decisions: tuple[ResolvedReward, ...] = ()

    @property
    def changed(self) -> bool:
        """False when nobody decided anything: there is nothing to write."""
        return self.rewards is not None or self.row_keep is not None or bool(self.add)


def merge_reward(
    decisions: Sequence[ResolvedReward],
    batch: RolloutBatch,
    rules: KeepRules | None = None,
    adjusted: AdjustedRewards | None = None,
) -> MergedReward:
    """Merge checked decisions of one step; labels are distinct, their order does not matter.

    Args:
        decisions: one a plugin.
        batch: all real rows, with the rewards in place that apply: the owner's, adjusted.
        rules: the least that has to stay.
        adjusted: what :func:`dataflex_hooks.adjust.adjust` made of the rewards.

    Raises:
        DecisionError: two plugins drop and want advantages over different rows.
    """
    decisions = sorted(decisions, key=lambda decision: decision.label)
    rules = rules or KeepRules()
    owner = next((decision for decision in decisions if decision.rewards is not None), None)
    said = [keep for decision in decisions if (keep := decision.row_keep()) is not None]
    kept, skip = None, False
    metrics: dict[str, float] = {}
    if said:
        kept = torch.stack([one.keep for one in said]).all(dim=0)
        short = shortfall(said, kept, rules.least(batch.n_sessions, dropping=True), rules, batch)
        kept, skip = kept | short.lifted, short.skip_update
        metrics = _metrics(decisions, kept, bool(short.lifted.any()), batch)
    adjusted = adjusted or AdjustedRewards()
    rewards = None if owner is None else owner.rewards
    return MergedReward(
        rewards=rewards if adjusted.rewards is None else adjusted.rewards,
        owner="" if owner is None else owner.label,
        per_token=owner is not None and owner.per_token,
        row_keep=None if kept is None or bool(kept.all()) else kept,
        advantages=_advantages(decisions),
        skip_update=skip,
        add=tuple((decision.label, row) for decision in decisions for row in decision.add),
        generated=Generated.of(batch),
        metrics=metrics | adjusted.metrics,
        decisions=tuple(decisions),
    )


def _advantages(decisions: Sequence[ResolvedReward]) -> Advantages | None:
    wishes = [d for d in decisions if d.keep is not None and d.advantages is not None]
    for other in wishes[1:]:
        if other.advantages != wishes[0].advantages:
            first = wishes[0]
            text = f"wants advantages over {other.advantages!r} rows, plugin {first.label!r} over {first.advantages!r}"
            raise DecisionError(other.origin, f"{text}: one batch has one baseline")
    return wishes[0].advantages if wishes else None


def _metrics(
    decisions: Sequence[ResolvedReward], kept: Tensor, fell_back: bool, batch: RolloutBatch
) -> dict[str, float]:
    merged = {
        "kept_frac": int(sessions_of(kept, batch).sum()) / max(1, batch.n_sessions),
        "kept_groups_frac": int(groups_of(kept, batch).sum()) / max(1, batch.n_groups),
        "dropped_frac": int((~sessions_of(kept, batch)).sum()) / max(1, batch.n_sessions),
        "fallback": float(fell_back),
    }
    metrics = {f"dataflex/{name}": value for name, value in merged.items()}
    for decision in decisions:
        if decision.keep is not None:
            own = sessions_of(decision.keep, batch)
            own_groups = int(groups_of(decision.keep, batch).sum()) / max(1, batch.n_groups)
            metrics[label_metric(decision.label, "kept_groups_frac")] = own_groups
            metrics[label_metric(decision.label, "kept_frac")] = int(own.sum()) / max(1, batch.n_sessions)
            if decision.reason:
                name = label_metric(decision.label, "dropped_rows_total", decision.reason)
                metrics[name] = float((~decision.keep).sum())
    return metrics
