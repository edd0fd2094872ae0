"""Checks of what plugins returned, and the one form that merging works with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.decisions import AddedRow, RewardDecision, UpdateDecision
from dataflex_hooks.errors import DecisionError, Origin, did_you_mean, one_of
from dataflex_hooks.keep import RowKeep

_INCLUDED = frozenset({"kl", "entropy"})


@dataclass(frozen=True)
class ResolvedUpdate:
    """A checked UpdateDecision: ``mask`` bool and ``factor`` float, each (T,) if ``*_per_token``, else (bs,).

    ``keep`` (bs,) bool is what the plugin drops, ``scores`` (bs,) float64 what it judged by, each None without.
    """

    origin: Origin
    mask: Tensor | None
    mask_per_token: bool
    keep: Tensor | None
    include: bool
    factor: Tensor | None
    factor_per_token: bool
    normalize: bool
    reason: str
    update_scale: float | None
    skip_update: bool
    scores: Tensor | None

    @property
    def label(self) -> str:
        """Label of the plugin that decided."""
        return self.origin.label


@dataclass(frozen=True)
class ResolvedReward:
    """A checked RewardDecision: ``rewards`` (T,) float32, ``keep`` (bs,) bool, ``scores``, ``scale`` and ``shift``
    (bs,) float64, each None without.
    """

    origin: Origin
    rewards: Tensor | None
    per_token: bool
    keep: Tensor | None
    reason: str
    advantages: Literal["kept", "group"] | None
    add: tuple[AddedRow, ...]
    scores: Tensor | None
    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def label(self) -> str:
        """Label of the plugin that decided."""
        return self.origin.label

    def row_keep(self) -> RowKeep | None:
        """What it says on whole rows."""
        return None if self.keep is None else RowKeep(self.label, self.keep, self.scores)


def resolve_update(decision: UpdateDecision, batch: RolloutBatch, origin: Origin) -> ResolvedUpdate:
    """Check a decision and bring its tensors into one form.

    Raises:
        DecisionError: wrong type, shape, dtype or value; names the plugin, hook and step of ``origin``.
    """
    _check_choice("normalize", decision.normalize, ("mean", "none"), origin)
    if not isinstance(decision.skip_update, bool):
        raise DecisionError(origin, f"skip_update is {decision.skip_update!r}; accepted: True or False")
    mask, mask_per_token = _resolve_mask("mask", decision.mask, batch, origin)
    factor, factor_per_token = _resolve_values("weights", decision.weights, batch, origin, least=0.0)
    include = _resolve_include(decision.include, origin)
    if include and (mask_per_token or factor_per_token):
        text = "include extends masks of whole responses to KL and entropy; this decision distinguishes tokens"
        raise DecisionError(origin, text)
    return ResolvedUpdate(
        origin=origin,
        mask=mask,
        mask_per_token=mask_per_token,
        keep=_resolve_keep(decision.keep, batch, origin),
        include=include,
        factor=factor,
        factor_per_token=factor_per_token,
        normalize=decision.normalize == "mean",
        reason=str(decision.reason),
        update_scale=_resolve_scale(decision.update_scale, origin),
        skip_update=decision.skip_update,
        scores=_resolve_scores(decision.scores, batch, origin),
    )


def resolve_rewards(decision: RewardDecision, batch: RolloutBatch, origin: Origin) -> ResolvedReward:
    """Check a decision and bring its tensors into one form; rewards become one for every token.

    Raises:
        DecisionError: wrong type, shape, dtype or value; names the plugin, hook and step of ``origin``.
    """
    if decision.advantages is not None:
        _check_choice("advantages", decision.advantages, ("kept", "group"), origin)
    if isinstance(decision.add, AddedRow) or not isinstance(decision.add, Sequence):
        raise DecisionError(origin, f"add is {type(decision.add).__name__}; accepted: a list of AddedRow")
    for row in decision.add:
        if not isinstance(row, AddedRow):
            raise DecisionError(origin, f"add holds a {type(row).__name__}; accepted: AddedRow")
    rewards, per_token = _resolve_values("rewards", decision.rewards, batch, origin, least=-math.inf)
    return ResolvedReward(
        origin=origin,
        rewards=None if rewards is None else _token_rewards(rewards, per_token, batch),
        per_token=per_token,
        keep=_resolve_keep(decision.keep, batch, origin),
        reason=str(decision.reason),
        advantages=decision.advantages,
        add=tuple(decision.add),
        scores=_resolve_scores(decision.scores, batch, origin),
        scale=_resolve_adjustment("scale", decision.scale, batch, origin),
        shift=_resolve_adjustment("shift", decision.shift, batch, origin),
    )


def _token_rewards(rewards: Tensor, per_token: bool, batch: RolloutBatch) -> Tensor:
    if per_token:
        return rewards.to(torch.float32)
    has_tokens = batch.lengths > 0
    values = torch.zeros(batch.n_tokens, dtype=torch.float32, device=batch.offsets.device)
    values[batch.offsets[1:][has_tokens] - 1] = rewards[has_tokens].to(torch.float32)
    return values


def _check_choice(name: str, given: object, choices: tuple[str, ...], origin: Origin) -> None:
    if given not in choices:
        hint = did_you_mean(given, choices)
        text = f"{name} is {given!r}; accepted: {one_of(choices)}"
        raise DecisionError(origin, f"{text}; {hint}" if hint else text)


def _resolve_include(given: object, origin: Origin) -> bool:
    names = set(given) if isinstance(given, (list, tuple, set, frozenset)) else {given}
    if names and names != _INCLUDED:
        text = f"include is {given!r}; accepted: () or ('kl', 'entropy'), both since verl takes both from one mask"
        raise DecisionError(origin, text)
    return bool(names)


def _resolve_keep(keep: object, batch: RolloutBatch, origin: Origin) -> Tensor | None:
    values, per_token = _resolve_mask("keep", keep, batch, origin)
    if per_token:
        raise DecisionError(origin, f"keep must be one per response ({batch.bs},): only whole rows can leave the batch")
    return values


def _resolve_scores(scores: object, batch: RolloutBatch, origin: Origin) -> Tensor | None:
    values, per_token = _resolve_values("scores", scores, batch, origin, least=-math.inf)
    if per_token:
        raise DecisionError(origin, f"scores must be one per response ({batch.bs},)")
    return values


def _resolve_adjustment(name: str, given: object, batch: RolloutBatch, origin: Origin) -> Tensor | None:
    values, per_token = _resolve_values(name, given, batch, origin, least=-math.inf)
    if per_token:
        raise DecisionError(origin, f"{name} must be one per response ({batch.bs},): it acts on a response's reward")
    return None if values is None else values.to(torch.float64)


def _resolve_mask(name: str, mask: object, batch: RolloutBatch, origin: Origin) -> tuple[Tensor | None, bool]:
    if mask is None:
        return None, False
    values, per_token = _aligned(name, mask, batch, origin)
    keep = values == 1
    if not bool((keep | (values == 0)).all()):
        raise DecisionError(
            origin, f"{name} holds values other than 0 and 1 (or False and True); graded values are weights"
        )
    return keep, per_token


def _resolve_values(
    name: str, given: object, batch: RolloutBatch, origin: Origin, least: float
) -> tuple[Tensor | None, bool]:
    if given is None:
        return None, False
    values, per_token = _aligned(name, given, batch, origin)
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float64)
    # What stands at tool tokens was never meant for the loss and may be anything.
    looked_at = batch.response_mask if per_token and name == "weights" else None
    checks = [(torch.isfinite(values), "NaN or infinite"), (values >= least, "negative")]
    if name == "rewards" and values.dtype == torch.float64:
        checks.append((torch.isfinite(values.to(torch.float32)), "beyond float32"))
    for right, what in checks:
        wrong = ~right if looked_at is None else ~right & looked_at
        count = int(wrong.sum())
        if count:
            first = int(wrong.nonzero()[0])
            row = int(batch.row_of_token[first]) if per_token else first
            unit = "tokens" if per_token else "responses"
            text = f"{name} are {what} at {count} of {len(values)} {unit}, first in row {row} (uid {batch.uid[row]!r})"
            raise DecisionError(origin, text)
    return values, per_token


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
