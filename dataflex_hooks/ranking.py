"""Ranking sessions within their groups, with ties broken by content."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch


def session_values(scores: Tensor, batch: RolloutBatch) -> NDArray[np.float64]:
    """Take each session's score from its final output: (bs,) to (n_sessions,) float64."""
    final = batch.is_final.cpu().numpy()
    values = np.empty(batch.n_sessions)
    values[batch.session.cpu().numpy()[final]] = scores.cpu().numpy()[final]
    return values


def session_lengths(batch: RolloutBatch) -> NDArray[np.int64]:
    """Count the tokens that the model wrote in each session, over all its outputs: (n_sessions,) int64."""
    lengths = np.zeros(batch.n_sessions, dtype=np.int64)
    np.add.at(lengths, batch.session.cpu().numpy(), batch.n_valid.cpu().numpy())
    return lengths


def group_sizes(batch: RolloutBatch) -> NDArray[np.int64]:
    """Count each group's sessions: (n_groups,) int64."""
    return np.bincount(batch.group_of_session.cpu().numpy(), minlength=batch.n_groups).astype(np.int64)


def from_best(values: NDArray[np.float64], group: NDArray[np.int64], batch: RolloutBatch) -> NDArray[np.int64]:
    """Order sessions by group, and within a group from the highest value to the lowest.

    Equal values are ordered by ``batch.tie_rank``, which is worked out only if there are some.

    Args:
        values: (n_sessions,).
        group: (n_sessions,), what to rank within; zeros for the whole batch.
    """
    order = np.lexsort((-values, group))
    ranked, of_group = values[order], group[order]
    if bool(((ranked[1:] == ranked[:-1]) & (of_group[1:] == of_group[:-1])).any()):
        final = batch.is_final.cpu().numpy()
        rank = np.empty(batch.n_sessions, dtype=np.int64)
        rank[batch.session.cpu().numpy()[final]] = batch.tie_rank.cpu().numpy()[final]
        order = np.lexsort((rank, -values, group))
    return order


def place_in_group(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number sessions ordered by group from 0 within each group: (n_groups,) sizes to (n_sessions,)."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    return np.arange(int(sizes.sum())) - np.repeat(starts, sizes)


def rows_of(sessions: NDArray[np.int64], batch: RolloutBatch) -> Tensor:
    """Return the indices of all rows of the given sessions, rising."""
    kept = np.zeros(batch.n_sessions, dtype=bool)
    kept[sessions] = True
    rows = np.flatnonzero(kept[batch.session.cpu().numpy()])
    return torch.from_numpy(rows).to(batch.offsets.device)
