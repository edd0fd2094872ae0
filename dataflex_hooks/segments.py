"""Segment reductions: 1-D values and the segment each belongs to, to one value per segment.

Sums run in float64 and in the order of the values, so a segment's result depends on that segment alone. Where segments
are the rows of a batch, one behind the other, tokens are read in blocks that fit into a processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK = 1 << 16
"""Tokens read at a time: 512 KiB as float64."""


def segment_sum(values: Tensor, segment: Tensor, size: int) -> Tensor:
    """Sum ``values`` (N,) by ``segment`` (N,) int64 in [0, size); returns (size,) float64, 0 for an empty segment."""
    total = torch.zeros(size, dtype=torch.float64, device=values.device)
    return total.index_add_(0, segment, values.to(torch.float64))


def segment_count(segment: Tensor, size: int) -> Tensor:
    """Count the members of each segment; returns (size,) int64."""
    return torch.bincount(segment, minlength=size)


def segment_mean(values: Tensor, segment: Tensor, size: int) -> Tensor:
    """Mean of each segment, (size,) float64; 0 for an empty segment."""
    return segment_sum(values, segment, size) / segment_count(segment, size).clamp(min=1)


def segment_max(values: Tensor, segment: Tensor, size: int) -> Tensor:
    """Largest value of each segment, (size,) in the dtype of ``values``; 0 for an empty segment."""
    largest = torch.zeros(size, dtype=values.dtype, device=values.device)
    return largest.scatter_reduce_(0, segment, values, reduce="amax", include_self=False)


def row_blocks(offsets: NDArray[np.int64]) -> Iterator[tuple[slice, slice, NDArray[np.int64]]]:
    """Cut rows into blocks of about as many tokens as fit into a cache.

    Args:
        offsets: (bs + 1,) where each row starts.

    Yields:
        The block's rows, its tokens, and where each of its rows starts within them; rows without tokens are left out
        of the latter, as ``ufunc.reduceat`` needs.
    """
    first, rows = 0, len(offsets) - 1
    while first < rows:
        last = int(np.searchsorted(offsets, offsets[first] + _BLOCK, side="right")) - 1
        last = min(max(last, first + 1), rows)
        starts = offsets[first:last] - offsets[first]
        has_tokens = offsets[first + 1 : last + 1] > offsets[first:last]
        yield slice(first, last), slice(int(offsets[first]), int(offsets[last])), starts[has_tokens]
        first = last


def row_sum(values: Tensor, offsets: Tensor, valid: Tensor | None = None) -> Tensor:
    """Sum each row's (T,) values, only those at ``valid`` (T,) bool if given; (bs,) float64, 0 for an empty row."""
    return _by_row(np.add, values, offsets, valid, 0.0)


def row_max(values: Tensor, offsets: Tensor, valid: Tensor | None = None) -> Tensor:
    """Largest of each row's (T,) values, only of those at ``valid`` if given; (bs,) float64, -inf without any."""
    return _by_row(np.maximum, values, offsets, valid, -np.inf)


def _by_row(ufunc: Any, values: Tensor, offsets: Tensor, valid: Tensor | None, neutral: float) -> Tensor:
    # numpy has no bfloat16, in which an engine may store what it computed.
    readable = values.to(torch.float32) if values.dtype == torch.bfloat16 else values
    array, starts = readable.detach().cpu().numpy(), offsets.cpu().numpy()
    counted = None if valid is None else valid.cpu().numpy()
    lengths = np.diff(starts)
    result = np.full(len(lengths), neutral)
    for rows, tokens, block in row_blocks(starts):
        if not len(block):
            continue
        part = array[tokens].astype(np.float64)
        if counted is not None:
            part[~counted[tokens]] = neutral
        result[rows][lengths[rows] > 0] = ufunc.reduceat(part, block)
    return torch.from_numpy(result).to(values.device)
