"""Checks of what plugins returned, and the one form that merging works with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.decisions import RewardDecision, UpdateDecision
from dataflex_hooks.errors import DecisionError, Origin, did_you_mean, one_of


@dataclass(frozen=True)
class ResolvedUpdate:
    """A checked UpdateDecision: ``keep`` bool and ``factor`` float64, each (T,) if ``*_per_token``, else (bs,)."""

    origin: Origin
    keep: Tensor | None
    keep_per_token: bool
    factor: Tensor | None
    factor_per_token: bool
    normalize: bool
    reason: str
    update_scale: float | None
    skip_update: bool

    @property
    def label(self) -> str:
        """Label of the plugin that decided."""
        return self.origin.label


def resolve_update(decision: UpdateDecision, batch: RolloutBatch, origin: Origin) -> ResolvedUpdate:
    """Check a decision and bring its tensors into one form.

    Raises:
        DecisionError: wrong type, shape, dtype or value; names the plugin, hook and step of ``origin``.
    """
    if decision.normalize not in ("mean", "none"):
        hint = did_you_mean(decision.normalize, ("mean", "none"))
        text = f"normalize is {decision.normalize!r}; accepted: {one_of(('mean', 'none'))}"
        raise DecisionError(origin, f"{text}; {hint}" if hint else text)
    if not isinstance(decision.skip_update, bool):
        raise DecisionError(origin, f"skip_update is {decision.skip_update!r}; accepted: True or False")
    keep, keep_per_token = _resolve_mask(decision.mask, batch, origin)
    factor, factor_per_token = _resolve_values("weights", decision.weights, batch, origin, least=0.0)
    return ResolvedUpdate(
        origin=origin,
        keep=keep,
        keep_per_token=keep_per_token,
        factor=factor,
        factor_per_token=factor_per_token,
        normalize=decision.normalize == "mean",
        reason=str(decision.reason),
        update_scale=_resolve_scale(decision.update_scale, origin),
        skip_update=decision.skip_update,
    )


def resolve_rewards(decision: RewardDecision, batch: RolloutBatch, origin: Origin) -> tuple[Tensor, bool] | None:
    """Check replaced rewards; returns (T,) float32 token rewards and whether they were given per token.

    Raises:
        DecisionError: wrong type, shape, dtype or value; names the plugin, hook and step of ``origin``.
    """
    rewards, per_token = _resolve_values("rewards", decision.rewards, batch, origin, least=-math.inf)
    if rewards is None:
        return None
    if per_token:
        return rewards.to(torch.float32), True
    has_tokens = batch.lengths > 0
    values = torch.zeros(batch.n_tokens, dtype=torch.float32, device=batch.offsets.device)
    values[batch.offsets[1:][has_tokens] - 1] = rewards[has_tokens].to(torch.float32)
    return values, False


def _resolve_mask(mask: object, batch: RolloutBatch, origin: Origin) -> tuple[Tensor | None, bool]:
    if mask is None:
        return None, False
    values, per_token = _aligned("mask", mask, batch, origin)
    keep = values == 1
    if not bool((keep | (values == 0)).all()):
        raise DecisionError(
            origin, "mask holds values other than 0 and 1 (or False and True); graded values are weights"
        )
    return keep, per_token


def _resolve_values(
    name: str, given: object, batch: RolloutBatch, origin: Origin, least: float
) -> tuple[Tensor | None, bool]:
    if given is None:
        return None, False
    values, per_token = _aligned(name, given, batch, origin)
    values = values.to(torch.float64)
    # What stands at tool tokens was never meant for the loss and may be anything.
    looked_at = torch.where(batch.response_mask, values, 0.0) if per_token and name == "weights" else values
    for wrong, what in ((~torch.isfinite(looked_at), "NaN or infinite"), (looked_at < least, "negative")):
        count = int(wrong.sum())
        if count:
            first = int(wrong.nonzero()[0])
            row = int(batch.row_of_token[first]) if per_token else first
            unit = "tokens" if per_token else "responses"
            text = f"{name} are {what} at {count} of {len(values)} {unit}, first in row {row} (uid {batch.uid[row]!r})"
            raise DecisionError(origin, text)
    return looked_at, per_token


def _aligned(name: str, given: object, batch: RolloutBatch, origin: Origin) -> tuple[Tensor, bool]:
    if not isinstance(given, Tensor):
        raise DecisionError(origin, f"{name} must be a torch.Tensor, got {type(given).__name__}")
    if given.is_complex():
        raise DecisionError(origin, f"{name} must be real or bool, got dtype {given.dtype}")
    try:
        return batch.align(given.detach().to(batch.offsets.device))
    except ValueError as error:
        raise DecisionError(origin, f"{name}: {error}") from error


def _resolve_scale(scale: object, origin: Origin) -> float | None:
    if scale is None:
        return None
    if isinstance(scale, (int, float)) and not isinstance(scale, bool) and math.isfinite(scale) and scale >= 0:
        return float(scale)
    raise DecisionError(origin, f"update_scale is {scale!r}; accepted: a finite number >= 0")
