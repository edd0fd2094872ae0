"""What merged decisions say of each row, for logging and for replaying alike."""

from __future__ import annotations

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.merge import MergedUpdate
from dataflex_hooks.resolve import ResolvedReward, ResolvedUpdate
from dataflex_hooks.segments import row_max, row_sum


def row_weights(batch: RolloutBatch, decided: MergedUpdate) -> Tensor:
    """(bs,) float32: the weight of each row's valid tokens, their mean where they differ; 0 without any."""
    weights = decided.weights
    if decided.per_token:
        return batch.mean_over_tokens(weights)
    if batch.by_row:
        return torch.where(batch.weighed > 0, weights, 0.0)
    valid = batch.n_valid > 0
    if int(batch.n_valid.sum()) < batch.n_tokens:
        return torch.where(valid, row_max(weights, batch.offsets, batch.response_mask), 0.0).to(torch.float32)
    rows = torch.zeros(batch.bs, dtype=torch.float32)
    rows[valid] = weights[batch.offsets[:-1][valid]]
    return rows


def own_keep(decision: ResolvedUpdate | ResolvedReward, batch: RolloutBatch) -> Tensor | None:
    """(bs,) bool: rows that one plugin alone keeps in full or in part; None where it masks and drops nothing."""
    kept = decision.keep
    if isinstance(decision, ResolvedUpdate) and decision.mask is not None:
        per_token = decision.mask_per_token
        rows = row_sum(decision.mask, batch.offsets, batch.response_mask) > 0 if per_token else decision.mask
        kept = rows if kept is None else kept & rows
    return kept
