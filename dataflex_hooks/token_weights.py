"""One weight per token out of masks and factors, without copies of the batch's size.

What is decided per response stays one number a row to the end. What is decided per token is read in blocks of rows that
fit into a processor's cache. Sums are taken over each row in float64 and then over rows, rounded once, so that the
order of rows cannot change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.segments import row_blocks, row_max, row_sum

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Kept:
    """What is kept: ``rows`` (bs,) bool; and ``tokens`` (T,) bool of them, None for all valid tokens."""

    rows: Tensor
    tokens: Tensor | None

    def count(self, batch: RolloutBatch) -> Tensor:
        """(bs,) float64: kept tokens of each row."""
        if self.tokens is None:
            return torch.where(self.rows, batch.weighed, 0).to(torch.float64)
        return row_sum(self.tokens, batch.offsets, batch.response_mask)


@dataclass(frozen=True)
class Factors:
    """A product of factors: ``rows`` (bs,) float64, and (T,) tensors with a number that each is multiplied by."""

    rows: Tensor
    tokens: tuple[tuple[Tensor, float], ...]

    def block(self, rows: slice, tokens: slice, lengths: NDArray[np.int64]) -> Array:
        """The product at a block of tokens, float64."""
        product: Array = np.repeat(self.rows[rows].numpy(), lengths[rows])
        for values, scale in self.tokens:
            product = product * (values[tokens].numpy().astype(np.float64) * scale)
        return product


def product(factors: Iterable[tuple[Tensor, bool]], batch: RolloutBatch, near_one: bool) -> Factors | None:
    """Multiply factors, each (T,) if its flag is True, else (bs,); None if there are none.

    With ``near_one`` each is scaled by a power of two, exact in floating point, so that products of large or tiny
    factors stay finite.
    """
    rows: Tensor | None = None
    tokens: list[tuple[Tensor, float]] = []
    for values, per_token in factors:
        rows = torch.ones(batch.bs, dtype=torch.float64) if rows is None else rows
        scale = _power_of_two(values, per_token, batch) if near_one else 1.0
        if per_token:
            tokens.append((values.cpu(), scale))
        else:
            rows = rows * (values.cpu().to(torch.float64) * scale)
    return None if rows is None else Factors(rows, tuple(tokens))


@dataclass(frozen=True)
class TokenWeights:
    """Weights (T,) float32, their sum over each row's tokens (bs,) float64, the largest, and whether all are finite.

    With ``batch.by_row`` and decisions on whole responses only, the weights are one a row (bs,), and there are no sums
    and no largest.
    """

    values: Tensor
    row_sums: Tensor
    largest: float
    finite: bool


def combine(
    kept: Kept,
    counts: Tensor,
    normalised: Factors | None,
    raw: Factors | None,
    coefficient: Tensor,
    scale: float,
    batch: RolloutBatch,
) -> TokenWeights:
    """Compute ``scale * normalise(kept * normalised factors) * raw factors``, 0 where not kept.

    Args:
        kept: what is not masked.
        counts: (bs,) float64, kept tokens of each row, from :meth:`Kept.count`.
        normalised: factors divided so that kept weights average 1; all weights are 0 if that is impossible.
        raw: factors that act as they are.
        coefficient: (bs,) float64, what the loss gives each valid token of a row.
        scale: factor on everything.
        batch: the rows.
    """
    divisor: float | None = 1.0
    if normalised is not None:
        weighted = exact_sum(coefficient * _kept_sums(normalised, kept, batch))
        divisor = weighted / exact_sum(coefficient * counts) if weighted else None
    if divisor is None:
        zeros = torch.zeros(batch.bs, dtype=torch.float64)
        return TokenWeights(torch.zeros(batch.bs if batch.by_row else batch.n_tokens), zeros, 0.0, True)
    tokenwise = [factors for factors in (normalised, raw) if factors is not None and factors.tokens]
    if kept.tokens is None and not tokenwise:
        return _by_row(kept, normalised, raw, divisor, scale, batch)
    return _by_token(kept, normalised, raw, divisor, scale, batch)


def mean_and_std(values: Tensor, per_token: bool, coefficient: Tensor, batch: RolloutBatch) -> tuple[float, float]:
    """Mean and standard deviation of values (T,) or (bs,) over valid tokens, under the coefficients (bs,)."""
    norm = exact_sum(coefficient * batch.n_valid)
    if norm == 0.0:
        return 0.0, 0.0
    if per_token:
        mean = exact_sum(coefficient * row_sum(values, batch.offsets, batch.response_mask)) / norm
        squares = _squares(values, mean, batch)
    else:
        mean = exact_sum(coefficient * values.to(torch.float64) * batch.n_valid) / norm
        squares = (values.to(torch.float64) - mean) ** 2 * batch.n_valid
    return mean, math.sqrt(exact_sum(coefficient * squares) / norm)


def exact_sum(row_values: Tensor) -> float:
    """Sum (bs,) values, rounded once."""
    return math.fsum(row_values.tolist())


def _by_row(
    kept: Kept, normalised: Factors | None, raw: Factors | None, divisor: float, scale: float, batch: RolloutBatch
) -> TokenWeights:
    rows = kept.rows.cpu().to(torch.float64)
    weights = _weights(
        rows.numpy(), _rows_of(normalised), _rows_of(raw), divisor if normalised is not None else None, scale
    )
    row_weights = torch.from_numpy(weights)
    if batch.by_row:
        return TokenWeights(row_weights, row_weights.to(torch.float64), 0.0, bool(torch.isfinite(row_weights).all()))
    values = row_weights[batch.row_of_token]
    if int(batch.n_valid.sum()) < batch.n_tokens:
        values *= batch.response_mask
    largest = float(row_weights[batch.n_valid > 0].max()) if bool((batch.n_valid > 0).any()) else 0.0
    return TokenWeights(
        values, row_weights.to(torch.float64) * batch.n_valid, largest, bool(torch.isfinite(row_weights).all())
    )


def _by_token(
    kept: Kept, normalised: Factors | None, raw: Factors | None, divisor: float, scale: float, batch: RolloutBatch
) -> TokenWeights:
    values = torch.empty(batch.n_tokens, dtype=torch.float32)
    out, sums = values.numpy(), np.zeros(batch.bs)
    lengths = batch.lengths.cpu().numpy()
    largest, finite = 0.0, True
    for rows, tokens, starts in row_blocks(batch.offsets.cpu().numpy()):
        block = _weights(
            _kept_block(kept, rows, tokens, lengths, batch).astype(np.float64),
            None if normalised is None else normalised.block(rows, tokens, lengths),
            None if raw is None else raw.block(rows, tokens, lengths),
            divisor if normalised is not None else None,
            scale,
        )
        out[tokens] = block
        if len(starts):
            sums[rows][lengths[rows] > 0] = np.add.reduceat(block, starts, dtype=np.float64)
            largest = max(largest, float(block.max()))
            finite = finite and bool(np.isfinite(block).all())
    return TokenWeights(values, torch.from_numpy(sums), largest, finite)


def _weights(kept: Array, normalised: Array | None, raw: Array | None, divisor: float | None, scale: float) -> Any:
    weights = kept
    if normalised is not None:
        weights = np.where(kept > 0, normalised, 0.0) / divisor
    # Zero wins over whatever a raw factor holds at a token that is masked.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (weights if raw is None else weights * raw) * scale
        return np.where(weights > 0, scaled, 0.0).astype(np.float32)


def _rows_of(factors: Factors | None) -> Array | None:
    return None if factors is None else factors.rows.numpy()


def _kept_block(
    kept: Kept, rows: slice, tokens: slice, lengths: NDArray[np.int64], batch: RolloutBatch
) -> NDArray[np.bool_]:
    valid = batch.response_mask[tokens].numpy()
    own = np.repeat(kept.rows[rows].numpy(), lengths[rows]) if kept.tokens is None else kept.tokens[tokens].numpy()
    block: NDArray[np.bool_] = valid & own
    return block


def _kept_sums(factors: Factors, kept: Kept, batch: RolloutBatch) -> Tensor:
    """(bs,) float64: sum of the factors over each row's kept tokens."""
    if not factors.tokens and kept.tokens is None:
        return torch.where(kept.rows, factors.rows * batch.weighed, 0.0)
    sums, lengths = np.zeros(batch.bs), batch.lengths.cpu().numpy()
    for rows, tokens, starts in row_blocks(batch.offsets.cpu().numpy()):
        if not len(starts):
            continue
        part = np.where(_kept_block(kept, rows, tokens, lengths, batch), factors.block(rows, tokens, lengths), 0.0)
        sums[rows][lengths[rows] > 0] = np.add.reduceat(part, starts)
    return torch.from_numpy(sums)


def _squares(values: Tensor, mean: float, batch: RolloutBatch) -> Tensor:
    """(bs,) float64: sum of (value - mean)^2 over each row's valid tokens."""
    array, valid = values.cpu().numpy(), batch.response_mask.cpu().numpy()
    sums, lengths = np.zeros(batch.bs), batch.lengths.cpu().numpy()
    for rows, tokens, starts in row_blocks(batch.offsets.cpu().numpy()):
        if len(starts):
            part = np.where(valid[tokens], array[tokens].astype(np.float64) - mean, 0.0) ** 2
            sums[rows][lengths[rows] > 0] = np.add.reduceat(part, starts)
    return torch.from_numpy(sums)


def _power_of_two(values: Tensor, per_token: bool, batch: RolloutBatch) -> float:
    if per_token:
        largest = float(row_max(values, batch.offsets, batch.response_mask).max()) if batch.bs else 0.0
    else:
        largest = float(values.max()) if len(values) else 0.0
    # The exponent is capped where 2**n itself would overflow, for factors that are subnormal throughout.
    return math.ldexp(1.0, min(-math.frexp(largest)[1], 1023)) if math.isfinite(largest) else 1.0
