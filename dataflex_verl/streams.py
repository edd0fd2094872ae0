"""Shuffled streams of dataset rows, one a domain, each wrapping on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def shuffled(size: int, seed: int, domain: int, epoch: int) -> NDArray[Any]:
    """Return a permutation of range(size) that depends on the arguments only, not on numpy's version.

    Sorting by splitmix64 hashes of the places; numpy does not promise that its own generators stay as they are.

    Returns:
        (size,) int32, int64 for 2**31 rows and more.
    """
    key = _splitmix(np.array([seed % 2**64], dtype=np.uint64))
    for word in (domain, epoch):
        key = _splitmix(key ^ np.uint64(word))
    place = np.arange(size, dtype=np.uint64)
    bits = np.uint64(max(1, (size - 1).bit_length()))
    # The place stands in the low bits of its hash: sorting values is several times faster than sorting places by them.
    keys = (_splitmix(place ^ key) >> bits << bits) | place
    keys.sort()
    return (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(_index_type(size))


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = x + np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2)
    return x ^ (x >> np.uint64(31))


def _index_type(size: int) -> type:
    return np.int32 if size < 2**31 else np.int64


class Stream:
    """The rows of one domain, again and again, in a new order each epoch.

    Args:
        rows: (n,) dataset rows of the domain, n >= 1.
        seed, domain: what the orders derive from.
        shuffle: False gives every epoch in the order of ``rows``.

    Attributes:
        epoch: how often the stream has wrapped.
        refused: rows passed over so far.
    """

    def __init__(self, rows: NDArray[Any], seed: int, domain: int, shuffle: bool = True) -> None:
        self.rows = rows
        self.epoch = 0
        self.refused = 0
        self._seed, self._domain, self._shuffle = seed, domain, shuffle
        self._position = 0
        self._head: list[int] = []
        self._order: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def passes(self) -> float:
        """How often the domain's rows have been drawn, on average."""
        return self.epoch + (self._position - len(self._head)) / len(self.rows)

    @property
    def before_wrap(self) -> int:
        """How many rows can be taken before the stream wraps."""
        return len(self._head) + len(self.rows) - self._position

    def take_one(self) -> int:
        """Take the next row."""
        if self._head:
            return self._head.pop(0)
        if self._position == len(self.rows):
            self._wrap()
        place = self._position
        self._position += 1
        return int(self.rows[place if not self._shuffle else self._ordered()[place]])

    def take(self, count: int) -> list[int]:
        """Take the next ``count`` rows, across as many wraps as that needs."""
        taken = self._head[:count]
        del self._head[: len(taken)]
        while len(taken) < count:
            if self._position == len(self.rows):
                self._wrap()
            end = min(len(self.rows), self._position + count - len(taken))
            places = slice(self._position, end)
            taken += self.rows[places if not self._shuffle else self._ordered()[places]].tolist()
            self._position = end
        return taken

    def peek(self, count: int) -> list[int]:
        """Return the next rows without taking them, at most ``count``, none beyond the wrap."""
        places = slice(self._position, self._position + max(0, count - len(self._head)))
        later = self.rows[places if not self._shuffle else self._ordered()[places]].tolist()
        return [*self._head[:count], *later]

    def give_back(self, rows: Sequence[int]) -> None:
        """Put rows at the head: they come next, in this order."""
        self._head[:0] = rows

    def _wrap(self) -> None:
        self.epoch += 1
        self._position = 0
        self._order = None

    def _ordered(self) -> NDArray[Any]:
        if self._order is None:
            self._order = shuffled(len(self.rows), self._seed, self._domain, self.epoch)
        return self._order

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position, rows at the head, and the number refused; orders follow from seed and epoch."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "refused": self.refused,
            "head": np.array(self._head, dtype=np.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any], seed: int, shuffle: bool) -> None:
        """Take up a saved state under the seed that it was saved with."""
        self._seed, self._shuffle = seed, shuffle
        self.epoch, self._position = int(state["epoch"]), int(state["position"])
        self.refused = int(state["refused"])
        self._head = [int(row) for row in state["head"]]
        self._order = None
