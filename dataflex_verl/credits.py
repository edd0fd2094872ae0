"""Which domain the next prompt comes from, so that what is sampled stays close to what was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shares = NDArray[np.float64]


class Credits:
    """A credit per domain: the sum of the proportions in force at each prompt, less the prompts it got.

    Every prompt adds the proportions to the credits and goes to the domain with the largest, out of those whose
    proportion is not 0, which pays 1. Credits therefore sum to 0, and each stays below K in size whatever the
    proportions do in between; with constant ones below 1.

    Args:
        proportions: (K,) not negative, summing to 1.
    """

    def __init__(self, proportions: Shares) -> None:
        self._credit = np.zeros(len(proportions), dtype=np.float64)
        self.counts = np.zeros(len(proportions), dtype=np.int64)
        self.set(proportions)

    def set(self, proportions: Shares) -> None:
        """Put new proportions in force for the prompts that follow.

        Raises:
            ValueError: of the wrong length, negative, NaN or all 0.
        """
        shares = np.array(proportions, dtype=np.float64)
        if shares.shape != self._credit.shape:
            raise ValueError(f"{len(self._credit)} proportions are needed, got shape {shares.shape}")
        if not np.isfinite(shares).all() or (shares < 0).any() or not shares.sum() > 0:
            raise ValueError(f"proportions must be finite, >= 0 and not all 0, got {shares.tolist()}")
        # Dividing by a sum that is 1 up to rounding would take a share below its floor.
        self.proportions = shares if abs(shares.sum() - 1) < 1e-9 else shares / shares.sum()
        self._closed = self.proportions == 0
        self._any_closed = bool(self._closed.any())

    @property
    def deficit(self) -> Shares:
        """(K,) float64: prompts asked for less prompts given, so far; sums to 0."""
        return self._credit.copy()

    def next(self, count: int) -> list[int]:
        """Return the domains of the next ``count`` prompts, as indices."""
        chosen = self._choose(self._credit, count)
        self.counts += np.bincount(np.array(chosen, dtype=np.int64), minlength=len(self._credit))
        return chosen

    def ahead(self, count: int) -> list[int]:
        """Return what :meth:`next` would, if the proportions stay, and count nothing."""
        return self._choose(self._credit.copy(), count)

    def _choose(self, credit: Shares, count: int) -> list[int]:
        shares = self.proportions
        chosen = []
        for _ in range(count):
            credit += shares
            index = int(np.where(self._closed, -np.inf, credit).argmax() if self._any_closed else credit.argmax())
            credit[index] -= 1.0
            chosen.append(index)
        return chosen

    def charge(self, index: int) -> None:
        """Count a prompt that went to domain ``index`` for a reason of its own."""
        self._credit += self.proportions
        self._credit[index] -= 1.0
        self.counts[index] += 1

    def state_dict(self) -> dict[str, Any]:
        """Proportions, credits and counts, (K,) each."""
        return {
            "proportions": self.proportions.copy(),
            "credit": self._credit.copy(),
            "counts": self.counts.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self.set(np.array(state["proportions"], dtype=np.float64))
        self._credit = np.array(state["credit"], dtype=np.float64)
        self.counts = np.array(state["counts"], dtype=np.int64)
