"""Which responses of a group are worth the expensive reward, and what those that are not count as."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks import RolloutBatch


class Ranking:
    """Sessions ordered by group, within a group from the highest reward to the lowest.

    Equal rewards are ordered by ``batch.tie_rank``, which follows from the tokens: wherever a response stands in the
    batch, its place is the same.

    Attributes:
        order: (n_sessions,) int64, sessions in that order.
        group: (n_sessions,) int64, group of each session.
    """

    def __init__(self, batch: RolloutBatch) -> None:
        final = batch.is_final.cpu().numpy()
        session = batch.session.cpu().numpy()[final]
        tie = np.empty(batch.n_sessions, dtype=np.int64)
        tie[session] = batch.tie_rank.cpu().numpy()[final]
        self.group: NDArray[np.int64] = batch.group_of_session.cpu().numpy()
        self.order: NDArray[np.int64] = np.lexsort((tie, -batch.session_rewards.cpu().numpy(), self.group))
        self._n_groups = batch.n_groups

    def best(self, k: int) -> NDArray[np.bool_]:
        """(n_sessions,) bool: the k first of each group; all of one that has no more."""
        sizes = np.bincount(self.group, minlength=self._n_groups)
        starts = np.cumsum(sizes) - sizes
        place = np.arange(len(self.order)) - starts[self.group[self.order]]
        chosen = np.zeros(len(self.order), dtype=bool)
        chosen[self.order[place < k]] = True
        return chosen

    def enough(self, scored: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(n_sessions,) bool: scored ones that are not the only scored one of a larger group."""
        sizes = np.bincount(self.group, minlength=self._n_groups)
        counts = np.bincount(self.group[scored], minlength=self._n_groups)
        return scored & ((counts > 1) | (sizes == 1))[self.group]

    def filled(self, rewards: NDArray[np.float64], scored: NDArray[np.bool_]) -> NDArray[np.float64]:
        """(n_sessions,) rewards in which each session that was not scored has the mean of those of its group.

        In a group without a scored one they stay what they are.
        """
        order = self.order[scored[self.order]]
        group = self.group[order]
        counts = np.bincount(group, minlength=self._n_groups)
        means = np.bincount(group, rewards[order], minlength=self._n_groups) / np.maximum(counts, 1)
        return np.where(scored | (counts == 0)[self.group], rewards, means[self.group])
