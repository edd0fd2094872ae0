"""How decisions at ``post_advantage`` become one weight per token, and the rows that stay.

``w = mask_scale * normalise(mask * product of normalised factors) * product of raw factors * update_scale``

Everything is computed in float64 and in an order that neither the configuration nor the position of rows changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.decisions import UpdateDecision
from dataflex_hooks.errors import DecisionError, Origin
from dataflex_hooks.keep import KeepRules, RowKeep, shortfall
from dataflex_hooks.merge_metrics import exact_sum, neutral_metrics, update_metrics
from dataflex_hooks.merge_reward import Generated
from dataflex_hooks.resolve import ResolvedUpdate, resolve_update

MaskScale = Literal["none", "kept"]


@dataclass(frozen=True)
class LabelledDecision:
    """A decision and the label of the plugin that made it; ``origin`` says more about it in errors."""

    label: str
    decision: UpdateDecision
    origin: Origin | None = None


@dataclass(frozen=True)
class MergedUpdate:
    """The merged decision of one update.

    Attributes:
        weights: (T,) float32, factor on each token's policy-gradient term; 0 at tokens that the loss does not count and
            in dropped rows. ``update_scale`` is in it already; the trainer's own importance weights are not.
        in_batch: (bs,) bool, rows that stay in the batch; None when nobody drops any.
        excluded: (bs,) bool, rows to take out of the KL and entropy terms too; None when there are none.
        row_keep: (bs,) bool, rows with at least one kept valid token.
        token_mask: (T,) bool, tokens no plugin masked.
        per_token: whether any decision distinguished tokens within a response.
        update_scale: product of the plugins' scales.
        skip_update: whether any plugin asked for no optimizer step.
        changed: False when no plugin gave a mask, weights or a scale: there is nothing to write.
        metrics: under ``dataflex/``; see :func:`dataflex_hooks.merge_metrics.update_metrics`.
    """

    weights: Tensor
    in_batch: Tensor | None
    excluded: Tensor | None
    row_keep: Tensor
    token_mask: Tensor
    per_token: bool
    update_scale: float
    skip_update: bool
    changed: bool
    metrics: dict[str, float]


def merge_update(
    decisions: Sequence[LabelledDecision],
    batch: RolloutBatch,
    coefficients: LossCoefficients,
    mask_scale: MaskScale = "none",
    rules: KeepRules | None = None,
    generated: Generated | None = None,
) -> MergedUpdate:
    """Check and merge the decisions of one update; labels are distinct, their order does not matter.

    Args:
        decisions: one a plugin.
        batch: the global batch, without padding rows; needs ``response_mask``, as the loss will see it.
        coefficients: what the loss gives each token; normalised weights average 1 under them over kept valid tokens.
        mask_scale: ``"kept"`` divides by the kept share of the coefficients, so that a mask does not shrink the
            gradient.
        rules: the least that has to stay.
        generated: the step before anything was dropped; None when nothing was.

    Raises:
        DecisionError: a decision is malformed, distinguishes tokens though the loss cannot, or overflows float32.
    """
    resolved = [resolve_update(d.decision, batch, d.origin or Origin(d.label, "post_advantage")) for d in decisions]
    return merge_resolved(resolved, batch, coefficients, mask_scale, rules, generated)


def merge_resolved(
    decisions: Sequence[ResolvedUpdate],
    batch: RolloutBatch,
    coefficients: LossCoefficients,
    mask_scale: MaskScale = "none",
    rules: KeepRules | None = None,
    generated: Generated | None = None,
) -> MergedUpdate:
    """Merge decisions that :func:`~dataflex_hooks.resolve.resolve_update` has checked; see :func:`merge_update`."""
    if not decisions and (rules is None or rules.min_keep is None):
        return _neutral(batch, generated or Generated.of(batch))
    decisions = sorted(decisions, key=lambda decision: decision.label)
    tokenwise = [d.origin for d in decisions if d.mask_per_token or d.factor_per_token]
    if tokenwise and not coefficients.per_token:
        source = f" ({coefficients.source})" if coefficients.source else ""
        text = f"decides per token, but the loss{source} is not linear in per-token weights: decide per response"
        raise DecisionError(tokenwise[0], text)

    rows = _rows(decisions, batch, rules or KeepRules(), generated or Generated.of(batch))
    valid = batch.response_mask
    coefficient = coefficients.values(batch, valid)
    if rows.in_batch is not None:
        # A dropped row is in no denominator: as if it had never been there.
        coefficient = torch.where(batch.expand_rows(rows.in_batch), coefficient, 0.0)
    kept = rows.token_mask & valid
    normalised, raw, update_scale = _factors(decisions, coefficient, batch)
    weights = kept.to(torch.float64)
    if normalised is not None:
        weights = _normalise(torch.where(kept, normalised, 0.0), coefficient, kept, batch)
    if mask_scale == "kept" and bool(kept.any()):
        weights *= exact_sum(coefficient, batch) / exact_sum(torch.where(kept, coefficient, 0.0), batch)
    # Zero wins over whatever a raw factor holds at a token that is masked.
    merged = torch.where(weights > 0, weights * raw * update_scale, 0.0).to(torch.float32)
    if not bool(torch.isfinite(merged).all()):
        scaling = [d.origin for d in decisions if d.factor is not None or d.update_scale is not None]
        labels = ", ".join(repr(origin.label) for origin in scaling)
        raise DecisionError(scaling[0], f"the product of weights and scales of {labels} overflows float32")
    metrics = update_metrics(decisions, merged, kept, coefficient, batch, generated or Generated.of(batch))
    if rows.said:
        metrics["dataflex/fallback"] = float(rows.fell_back)
    return MergedUpdate(
        weights=merged,
        in_batch=rows.in_batch,
        excluded=rows.excluded,
        row_keep=torch.bincount(batch.row_of_token[kept], minlength=batch.bs) > 0,
        token_mask=rows.token_mask,
        per_token=bool(tokenwise),
        update_scale=update_scale,
        skip_update=rows.skip_update or any(decision.skip_update for decision in decisions),
        changed=any(d.mask is not None or d.factor is not None or d.update_scale is not None for d in decisions),
        metrics=metrics,
    )


@dataclass(frozen=True)
class _Rows:
    """Which rows stay, and which tokens of them count."""

    token_mask: Tensor
    in_batch: Tensor | None
    excluded: Tensor | None
    skip_update: bool
    said: bool
    fell_back: bool


def _rows(decisions: Sequence[ResolvedUpdate], batch: RolloutBatch, rules: KeepRules, generated: Generated) -> _Rows:
    everything = torch.ones(batch.bs, dtype=torch.bool, device=batch.offsets.device)
    dropping = [RowKeep(d.label, d.keep, d.scores) for d in decisions if d.keep is not None]
    masks = [(d, _kept_rows(d.mask, d.mask_per_token, batch)) for d in decisions if d.mask is not None]
    in_batch = torch.stack([one.keep for one in dropping]).all(dim=0) if dropping else everything
    masked = torch.stack([rows for _, rows in masks]).all(dim=0) if masks else everything
    said = [*dropping, *(RowKeep(d.label, rows, d.scores) for d, rows in masks)]
    # Masks are counted only where the run asks for a least: by default they may mask everything.
    counted = in_batch if rules.min_keep is None else in_batch & masked
    short = shortfall(said, counted, rules.least(generated.rollouts, bool(dropping)), rules, batch)
    in_batch = in_batch | short.lifted
    lifted_tokens = batch.expand_rows(short.lifted)
    token_mask = batch.expand_rows(in_batch)
    excluded = ~everything
    for decision, rows in masks:
        assert decision.mask is not None
        keep = decision.mask if decision.mask_per_token else batch.expand_rows(decision.mask)
        token_mask = token_mask & (keep | lifted_tokens)
        if decision.include:
            excluded = excluded | ~(rows | short.lifted)
    return _Rows(
        token_mask=token_mask,
        in_batch=None if bool(in_batch.all()) else in_batch,
        excluded=excluded if bool(excluded.any()) else None,
        skip_update=short.skip_update,
        said=bool(dropping) or rules.min_keep is not None,
        fell_back=short.skip_update or bool(short.lifted.any()),
    )


def _kept_rows(mask: Tensor, per_token: bool, batch: RolloutBatch) -> Tensor:
    """(bs,) bool: rows of which a mask keeps anything."""
    if not per_token:
        return mask
    return torch.bincount(batch.row_of_token[mask & batch.response_mask], minlength=batch.bs) > 0


def _factors(
    decisions: Sequence[ResolvedUpdate], coefficient: Tensor, batch: RolloutBatch
) -> tuple[Tensor | None, Tensor, float]:
    """Product of the factors to be normalised, (T,) or None; product of the raw ones (T,); product of the scales."""
    normalised: Tensor | None = None
    raw = torch.ones_like(coefficient)
    update_scale = 1.0
    for decision in decisions:
        if decision.factor is not None:
            weights = _per_token(decision.factor, decision.factor_per_token, batch)
            if decision.normalize:
                normalised = _near_one(weights) if normalised is None else normalised * _near_one(weights)
            else:
                raw *= weights
        if decision.update_scale is not None:
            update_scale *= decision.update_scale
    return normalised, raw, update_scale


def _neutral(batch: RolloutBatch, generated: Generated) -> MergedUpdate:
    """Nobody decided anything: no work on tokens beyond what the batch remembers."""
    return MergedUpdate(
        weights=batch.valid_weights,
        in_batch=None,
        excluded=None,
        row_keep=batch.n_valid > 0,
        token_mask=torch.ones((), dtype=torch.bool, device=batch.offsets.device).expand(batch.n_tokens),
        per_token=False,
        update_scale=1.0,
        skip_update=False,
        changed=False,
        metrics=neutral_metrics(batch, generated),
    )


def _per_token(values: Tensor, per_token: bool, batch: RolloutBatch) -> Tensor:
    return values if per_token else batch.expand_rows(values)


def _near_one(factor: Tensor) -> Tensor:
    """Scale by a power of two, exact in floating point, so that products of large or tiny factors stay finite."""
    largest = float(factor.max()) if len(factor) else 0.0
    # The exponent is capped where 2**n itself would overflow, for factors that are subnormal throughout.
    return factor * math.ldexp(1.0, min(-math.frexp(largest)[1], 1023))


def _normalise(weights: Tensor, coefficient: Tensor, kept: Tensor, batch: RolloutBatch) -> Tensor:
    """Divide so that kept weights average 1 under the coefficients; all zero if that is impossible."""
    weighted = exact_sum(coefficient * weights, batch)
    if weighted == 0.0:
        return torch.zeros_like(weights)
    return weights / (weighted / exact_sum(torch.where(kept, coefficient, 0.0), batch))
