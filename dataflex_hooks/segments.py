"""Segment reductions: 1-D values and the segment each belongs to, to one value per segment.

Sums run in float64 and in the order of the values, so a segment's result depends on that segment alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
