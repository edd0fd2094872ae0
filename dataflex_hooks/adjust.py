"""Adjustments of rewards by any number of plugins: scales multiply, shifts add up, and no order changes a bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.errors import DecisionError
from dataflex_hooks.metric_names import label_metric
from dataflex_hooks.resolve import ResolvedReward


@dataclass(frozen=True)
class AdjustedRewards:
    """What scales and shifts made of the rewards.

    Attributes:
        rewards: (T,) float32, None where they leave every reward as it is.
        metrics: under ``dataflex/``, empty when nobody adjusts.
    """

    rewards: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def adjust(decisions: Sequence[ResolvedReward], batch: RolloutBatch) -> AdjustedRewards:
    """Apply all scales and shifts: ``reward * product of scales + sum of shifts``, rounded once.

    Args:
        decisions: checked ones of a step; labels are distinct, their order does not matter.
        batch: all real rows, with the owner's rewards in place.

    Raises:
        DecisionError: together they take a reward out of the range of float32.
    """
    decisions = sorted((d for d in decisions if d.scale is not None or d.shift is not None), key=lambda d: d.label)
    if not decisions:
        return AdjustedRewards()
    rewards = batch.values("rm_scores")
    scale = torch.ones(batch.bs, dtype=torch.float64, device=rewards.device)
    shift = torch.zeros_like(scale)
    for decision in decisions:
        scale = scale if decision.scale is None else scale * decision.scale
        shift = shift if decision.shift is None else shift + decision.shift
    touched = (scale != 1) | (shift != 0)
    if not bool(touched.any()):
        return AdjustedRewards(None, _metrics(decisions, torch.zeros_like(scale), batch))
    adjusted = rewards.to(torch.float64) * batch.expand_rows(scale)
    has_tokens = batch.lengths > 0
    adjusted[batch.offsets[1:][has_tokens] - 1] += shift[has_tokens]
    # A row that nobody touches keeps its bits: adding 0 would turn -0.0 into 0.0.
    rounded = torch.where(batch.expand_rows(touched), adjusted.to(torch.float32), rewards.to(torch.float32))
    _refuse_overflow(decisions, rounded, batch)
    change = batch.with_token_field("rm_scores", rounded).rewards.to(torch.float64) - batch.rewards
    return AdjustedRewards(rounded, _metrics(decisions, change, batch))


def _refuse_overflow(decisions: Sequence[ResolvedReward], rewards: Tensor, batch: RolloutBatch) -> None:
    wrong = ~torch.isfinite(rewards)
    if not bool(wrong.any()):
        return
    row = int(batch.row_of_token[wrong][0])
    names = " and ".join(repr(decision.label) for decision in decisions)
    text = f"scales and shifts of {names} take rewards out of range, first in row {row} (uid {batch.uid[row]!r})"
    raise DecisionError(decisions[-1].origin, text)


def _metrics(decisions: Sequence[ResolvedReward], change: Tensor, batch: RolloutBatch) -> dict[str, float]:
    metrics = {"dataflex/reward_adjustment": _mean(change, batch)}
    for decision in decisions:
        for name, given in (("reward_scale", decision.scale), ("reward_shift", decision.shift)):
            if given is not None:
                metrics[label_metric(decision.label, name)] = _mean(given, batch)
    return metrics


def _mean(row_values: Tensor, batch: RolloutBatch) -> float:
    """Mean over sessions, of the output that verl takes a session's reward from; rounded once."""
    values, count = row_values[batch.is_final].tolist(), max(1, batch.n_sessions)
    try:
        return math.fsum(values) / count
    except OverflowError:
        return math.fsum(value / count for value in values)
