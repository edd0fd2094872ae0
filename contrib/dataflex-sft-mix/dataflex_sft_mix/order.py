"""In which order demonstrations come: shuffled anew for every pass over them, from a seed, resumable anywhere."""

from __future__ import annotations

import numpy as np


class ShuffledOrder:
    """Endless passes over ``n`` rows; each pass is a permutation drawn from (seed, number of the pass) alone.

    Attributes:
        epoch: number of the pass, from 0.
        position: rows of this pass that have been taken.
    """

    def __init__(self, n: int) -> None:
        self.n, self.epoch, self.position = n, 0, 0
        self._drawn: tuple[int, int] | None = None
        self._order = np.arange(0)

    def take(self, count: int, seed: int) -> list[int]:
        """Return the next ``count`` rows; a pass that ends in between goes over into the next one."""
        taken: list[int] = []
        while len(taken) < count:
            if self.position == self.n:
                self.epoch, self.position = self.epoch + 1, 0
            part = self._of(seed)[self.position : self.position + count - len(taken)]
            self.position += len(part)
            taken += part.tolist()
        return taken

    def _of(self, seed: int) -> np.ndarray:
        if self._drawn != (seed, self.epoch):
            self._order = np.random.default_rng([seed, self.epoch]).permutation(self.n)
            self._drawn = (seed, self.epoch)
        return self._order
