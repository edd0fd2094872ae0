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
    # Exact: a double holds whole numbers up to 2**53.
    total = np.bincount(batch.session.cpu().numpy(), batch.n_valid.cpu().numpy(), minlength=batch.n_sessions)
    return total.astype(np.int64)


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
    order = _by_group(np.argsort(-values, kind="stable"), group)
    ranked, of_group = values[order], group[order]
    if bool(((ranked[1:] == ranked[:-1]) & (of_group[1:] == of_group[:-1])).any()):
        final = batch.is_final.cpu().numpy()
        by_content = batch.session.cpu().numpy()[final][np.argsort(batch.tie_rank.cpu().numpy()[final])]
        order = _by_group(by_content[np.argsort(-values[by_content], kind="stable")], group)
    return order


def _by_group(order: NDArray[np.int64], group: NDArray[np.int64]) -> NDArray[np.int64]:
    of_group = group[order]
    # A stable sort of 16-bit numbers is a radix sort, several times as fast.
    small = of_group.astype(np.uint16) if len(group) and group[-1] < 1 << 16 else of_group
    ordered: NDArray[np.int64] = order[np.argsort(small, kind="stable")]
    return ordered


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
