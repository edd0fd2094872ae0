"""In which order demonstrations come: shuffled anew for every pass over them, from a seed, resumable anywhere."""

from __future__ import annotations

import hashlib

import numpy as np

# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))


class ShuffledOrder:
    """Endless passes over ``n`` rows; each pass is a permutation out of (seed, number of the pass) alone.

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
            self._order = permutation(self.n, seed, self.epoch)
            self._drawn = (seed, self.epoch)
        return self._order


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return (n,) int64: the rows in the order of splitmix64 numbers that begin at a hash of seed and pass.

    numpy does not promise that its generators give the same in every version; a resumed run relies on it.
    """
    start = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    numbers = np.frombuffer(start, dtype=np.uint64) + np.arange(1, n + 1, dtype=np.uint64) * _STEP
    for shift, factor in _MIX:
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * factor
    return np.argsort(numbers ^ (numbers >> np.uint64(31)), kind="stable")
