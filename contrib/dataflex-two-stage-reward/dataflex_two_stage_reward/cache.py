"""Scores that have been paid for, by prompt and response."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

Key = tuple[int, int, int]
"""64-bit hashes of the tokens of a prompt, of those of a response, and of what else the function is given."""


def written(value: object) -> str:
    """Return equal text for equal values, in every process."""
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except TypeError:  # keys of several types
        return repr(value)


def hashed(value: object) -> int:
    """Return a 64-bit hash of :func:`written`."""
    digest = hashlib.blake2b(written(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


class ScoreCache:
    """The last ``size`` scores that were asked for; 0 keeps none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._scores: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: Key) -> float | None:
        """Return the score under ``key``, which becomes the youngest; None without."""
        if key not in self._scores:
            return None
        self._scores.move_to_end(key)
        return self._scores[key]

    def put(self, key: Key, score: float) -> None:
        """Keep a score as the youngest, in place of the oldest where there is no room."""
        self._scores[key] = score
        self._scores.move_to_end(key)
        while len(self._scores) > self.size:
            self._scores.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """Return hashes (n, 3) int64 and scores (n,) float64, oldest first."""
        keys = np.array(list(self._scores), dtype=np.int64).reshape(-1, 3)
        return {"keys": keys, "scores": np.array(list(self._scores.values()), dtype=np.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._scores.clear()
        for (prompt, response, given), score in zip(state["keys"].tolist(), state["scores"].tolist(), strict=True):
            self.put((prompt, response, given), score)
