"""Scores that have been paid for, by prompt and response."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

Key = tuple[int, int]
"""64-bit hashes of the tokens of a prompt and of a response."""


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
        """Return hashes (n, 2) int64 and scores (n,) float64, oldest first."""
        keys = np.array(list(self._scores), dtype=np.int64).reshape(-1, 2)
        return {"keys": keys, "scores": np.array(list(self._scores.values()), dtype=np.float64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._scores.clear()
        for (prompt, response), score in zip(state["keys"].tolist(), state["scores"].tolist(), strict=True):
            self.put((prompt, response), score)
