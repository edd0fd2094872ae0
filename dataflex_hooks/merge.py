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
from dataflex_hooks.merge_metrics import neutral_metrics, update_metrics
from dataflex_hooks.merge_reward import Generated
from dataflex_hooks.resolve import ResolvedUpdate, resolve_update
from dataflex_hooks.segments import row_sum
from dataflex_hooks.token_weights import Kept, combine, exact_sum, product

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
        decisions: what was merged, one a plugin that decided, by label.

    For a batch with ``by_row``, decisions on whole responses have ``weights`` and ``token_mask`` (bs,) and no metrics.
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
    decisions: tuple[ResolvedUpdate, ...] = ()


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

    generated = generated or Generated.of(batch)
    rows = _rows(decisions, batch, rules or KeepRules(), generated)
    coefficient = coefficients.of_rows(batch)
    if rows.in_batch is not None:
        # A dropped row is in no denominator: as if it had never been there.
        coefficient = torch.where(rows.in_batch, coefficient, 0.0)
    factors = [d for d in decisions if d.factor is not None]
    update_scale = math.prod(d.update_scale for d in decisions if d.update_scale is not None)
    scale = update_scale
    counts = rows.kept.count(batch)
    if mask_scale == "kept" and bool(counts.any()):
        scale *= exact_sum(coefficient * batch.weighed) / exact_sum(coefficient * counts)
    merged = combine(
        rows.kept,
        counts,
        product([(_given(d), d.factor_per_token) for d in factors if d.normalize], batch, near_one=True),
        product([(_given(d), d.factor_per_token) for d in factors if not d.normalize], batch, near_one=False),
        coefficient,
        scale,
        batch,
    )
    if not merged.finite:
        scaling = [d.origin for d in decisions if d.factor is not None or d.update_scale is not None]
        labels = ", ".join(repr(origin.label) for origin in scaling)
        raise DecisionError(scaling[0], f"the product of weights and scales of {labels} overflows float32")
    metrics = {} if batch.by_row else update_metrics(decisions, merged, counts, coefficient, batch, generated)
    if rows.said:
        metrics["dataflex/fallback"] = float(rows.fell_back)
    return MergedUpdate(
        weights=merged.values,
        in_batch=rows.in_batch,
        excluded=rows.excluded,
        row_keep=counts > 0,
        token_mask=_token_mask(rows.kept, batch),
        per_token=bool(tokenwise),
        update_scale=update_scale,
        skip_update=rows.skip_update or any(decision.skip_update for decision in decisions),
        changed=any(d.mask is not None or d.factor is not None or d.update_scale is not None for d in decisions),
        metrics=metrics,
        decisions=tuple(decisions),
    )


def _token_mask(kept: Kept, batch: RolloutBatch) -> Tensor:
    if kept.tokens is not None:
        return kept.tokens
    return kept.rows if batch.by_row else batch.expand_rows(kept.rows)


@dataclass(frozen=True)
class _Rows:
    """Which rows stay, and which tokens of them count."""

    kept: Kept
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
    kept, excluded = in_batch, ~everything
    tokens: Tensor | None = None
    for decision, rows in masks:
        assert decision.mask is not None
        kept = kept & (rows | short.lifted)
        if decision.mask_per_token:
            lifted = decision.mask | batch.expand_rows(short.lifted) if bool(short.lifted.any()) else decision.mask
            tokens = lifted if tokens is None else tokens & lifted
        if decision.include:
            excluded = excluded | ~(rows | short.lifted)
    if tokens is not None:
        tokens = tokens & batch.expand_rows(kept)
    return _Rows(
        kept=Kept(kept, tokens),
        in_batch=None if bool(in_batch.all()) else in_batch,
        excluded=excluded if bool(excluded.any()) else None,
        skip_update=short.skip_update,
        said=bool(dropping) or rules.min_keep is not None,
        fell_back=short.skip_update or bool(short.lifted.any()),
    )


def _kept_rows(mask: Tensor, per_token: bool, batch: RolloutBatch) -> Tensor:
    """(bs,) bool: rows of which a mask keeps anything."""
    return row_sum(mask, batch.offsets, batch.response_mask) > 0 if per_token else mask


def _given(decision: ResolvedUpdate) -> Tensor:
    assert decision.factor is not None
    return decision.factor


def _neutral(batch: RolloutBatch, generated: Generated) -> MergedUpdate:
    """Nobody decided anything: no work on tokens beyond what the batch remembers."""
    row_keep = batch.weighed > 0
    everything = torch.ones((), dtype=torch.bool, device=batch.offsets.device)
    return MergedUpdate(
        weights=row_keep.to(torch.float32) if batch.by_row else batch.valid_weights,
        in_batch=None,
        excluded=None,
        row_keep=row_keep,
        token_mask=everything.expand(batch.bs if batch.by_row else batch.n_tokens),
        per_token=False,
        update_scale=1.0,
        skip_update=False,
        changed=False,
        metrics={} if batch.by_row else neutral_metrics(batch, generated),
    )
