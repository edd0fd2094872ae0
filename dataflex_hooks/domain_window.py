"""What a mixer looks back on: one value per step and domain, weighted by its count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class DomainHistory:
    """The window's steps, oldest first.

    Attributes:
        steps: (W,) int64, global training steps; steps without any session are absent.
        scores: (W, K) float64, mean score of the step's sessions of a domain; 0 where the count is 0.
        counts: (W, K) int64, how many sessions that is.
    """

    steps: IntArray
    scores: FloatArray
    counts: IntArray

    def since(self, step: int) -> DomainHistory:
        """Return the part after ``step``."""
        later = self.steps > step
        return DomainHistory(self.steps[later], self.scores[later], self.counts[later])

    def mean(self) -> FloatArray:
        """(K,) float64: mean over the window's sessions, so each step's value weighs by its count; 0 without any."""
        counted = (self.scores * self.counts).sum(axis=0)
        return np.asarray(counted / np.maximum(self.counts.sum(axis=0), 1), dtype=np.float64)

    def total(self) -> IntArray:
        """(K,) int64: sessions in the window."""
        return np.asarray(self.counts.sum(axis=0), dtype=np.int64)


class DomainWindow:
    """The last ``window`` steps: sums and counts of a score per domain, never raw rows.

    Args:
        domains: names, in the order of every array.
        window: how many steps are kept, >= 1. A step counts when it had a session of any domain.
    """

    def __init__(self, domains: Sequence[str], window: int) -> None:
        self.domains = tuple(domains)
        self.window = window
        self._steps: list[int] = []
        self._sums: list[FloatArray] = []
        self._counts: list[IntArray] = []

    def add(self, step: int, sums: FloatArray, counts: IntArray) -> None:
        """Add (K,) sums and (K,) counts to ``step``; several calls for one step add up, older steps are not reopened.

        Raises:
            ValueError: a step before the last one.
        """
        if not counts.any():
            return
        if self._steps and step < self._steps[-1]:
            raise ValueError(f"step {step} after step {self._steps[-1]}")
        if not self._steps or step > self._steps[-1]:
            self._steps.append(step)
            self._sums.append(np.zeros(len(self.domains), dtype=np.float64))
            self._counts.append(np.zeros(len(self.domains), dtype=np.int64))
            del self._steps[: -self.window], self._sums[: -self.window], self._counts[: -self.window]
        self._sums[-1] = self._sums[-1] + sums
        self._counts[-1] = self._counts[-1] + counts

    def history(self) -> DomainHistory:
        """Return what the window holds, as arrays of its own."""
        shape = (len(self._steps), len(self.domains))
        counts = np.array(self._counts, dtype=np.int64).reshape(shape)
        sums = np.array(self._sums, dtype=np.float64).reshape(shape)
        return DomainHistory(np.array(self._steps, dtype=np.int64), sums / np.maximum(counts, 1), counts)

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from: names, steps and arrays."""
        shape = (len(self._steps), len(self.domains))
        return {
            "domains": list(self.domains),
            "steps": list(self._steps),
            "sums": np.array(self._sums, dtype=np.float64).reshape(shape),
            "counts": np.array(self._counts, dtype=np.int64).reshape(shape),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; a shorter window keeps its last steps.

        Raises:
            ValueError: the state is of other domains.
        """
        if tuple(state["domains"]) != self.domains:
            saved, here = ", ".join(state["domains"]), ", ".join(self.domains)
            raise ValueError(f"the saved window is of the domains {saved}; this run has {here}")
        self._steps = [int(step) for step in state["steps"]][-self.window :]
        self._sums = [np.array(row, dtype=np.float64) for row in state["sums"]][-self.window :]
        self._counts = [np.array(row, dtype=np.int64) for row in state["counts"]][-self.window :]
