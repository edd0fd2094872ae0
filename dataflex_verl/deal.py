"""Where real rows and padding lie in a batch, so that every mini-batch gets its share after a drop.

verl puts padding behind the real rows of each rank. When many rows have been dropped, one mini-batch would then hold
two real rows and get a whole optimizer step for them. Here real rows are spread evenly instead.

A batch is laid out rank after rank; a mini-batch takes the next rows of every rank. Positions are first numbered in
the order in which rows are trained on (block, rank, place), where a block is the largest unit of which the mini-batches
of actor and critic are multiples. Marking every position where ``floor((p + 1) r / size)`` steps up as real gives any
two runs of positions of one length counts that differ by at most one, and so any two mini-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Layout:
    """A batch of ``size`` rows on ``ranks`` data-parallel ranks; every mini-batch consists of whole ``block`` rows."""

    size: int
    ranks: int
    block: int

    def batch_index(self) -> NDArray[np.int64]:
        """(size,): for each position in training order, its index in the batch."""
        position = np.arange(self.size)
        block, within = np.divmod(position, self.block)
        rank, place = np.divmod(within, self.block // self.ranks)
        return rank * (self.size // self.ranks) + block * (self.block // self.ranks) + place

    def mini_batch(self, rows: int) -> NDArray[np.int64]:
        """(size,): for each index in the batch, the number of its mini-batch of ``rows`` rows."""
        return (np.arange(self.size) % (self.size // self.ranks)) // (rows // self.ranks)


def deal(lengths: Sequence[int], layout: Layout) -> NDArray[np.int64]:
    """Spread real rows over a batch.

    Args:
        lengths: tokens of each of r real rows, r <= ``layout.size``.
        layout: of the batch.

    Returns:
        (size,) for each index in the batch the number of the row that goes there: 0 to r - 1 real, from r padding.
    """
    real, size = len(lengths), layout.size
    steps = (np.arange(size + 1) * real) // size
    is_real = np.diff(steps) > 0
    position = np.flatnonzero(is_real)
    cell = position // (layout.block // layout.ranks)
    round_ = np.arange(real) - np.searchsorted(cell, cell)
    # Longest rows first, forth and back over the cells, so that ranks and mini-batches get similar numbers of tokens.
    forth = np.lexsort((np.where(round_ % 2 == 0, cell, -cell), round_))
    by_length = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    source = np.empty(size, dtype=np.int64)
    source[position[forth]] = by_length
    source[~is_real] = np.arange(real, size)
    dealt = np.empty(size, dtype=np.int64)
    dealt[layout.batch_index()] = source
    return dealt


def fill(is_real: NDArray[np.bool_], layout: Layout, rows: int, most: float) -> tuple[NDArray[np.float64], int]:
    """Factor that makes up for the padding in each row's mini-batch of ``rows`` rows, at most ``most``.

    Returns:
        (size,) factors by index in the batch, and the number of mini-batches whose factor had to be cut.
    """
    number = layout.mini_batch(rows)
    real = np.bincount(number, weights=is_real)
    wanted = rows / np.maximum(real, 1)
    return np.minimum(wanted, most)[number], int(((wanted > most) & (real > 0)).sum())


def occupied(is_real: NDArray[np.bool_], layout: Layout, rows: int) -> NDArray[np.int64]:
    """Indices of the batch, in order, whose mini-batch of ``rows`` rows has a real row.

    A mini-batch of padding alone has no tokens to average over: its loss would be 0/0 and its optimizer step noise.
    """
    number = layout.mini_batch(rows)
    real = np.bincount(number, weights=is_real)
    return np.flatnonzero(real[number] > 0)
