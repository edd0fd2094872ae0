"""A bounded store of responses by prompt, as columns: adding, forgetting and looking up take no loop over responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]

KEEP = ("recent", "reward")


@dataclass(frozen=True)
class Responses:
    """n responses with T tokens.

    Attributes:
        prompt: (n,) int64, key of the prompt.
        content: (n,) int64, hash of the response's tokens.
        step: (n,) int64, training step at which it was made.
        reward: (n,) float32.
        offsets: (n + 1,) int64, where each response's tokens begin.
        tokens: (T,) int32.
        log_probs: (T,) float32 of the policy that wrote them, at most 0; (0,) where nobody stored them.
    """

    prompt: Ints
    content: Ints
    step: Ints
    reward: NDArray[np.float32]
    offsets: Ints
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]

    @classmethod
    def none(cls) -> Responses:
        """Return no responses."""
        whole = np.zeros(0, dtype=np.int64)
        real = np.zeros(0, dtype=np.float32)
        return cls(whole, whole, whole, real, np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int32), real)

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(getattr(self, name).nbytes for name in self.__dataclass_fields__)

    def select(self, rows: Ints) -> Responses:
        """Return some of them, in the order of ``rows``."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
        place = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], lengths)
        log_probs = self.log_probs[place] if len(self.log_probs) else self.log_probs
        columns = (self.prompt[rows], self.content[rows], self.step[rows], self.reward[rows])
        return Responses(*columns, offsets, self.tokens[place], log_probs)

    def joined(self, others: Responses) -> Responses:
        """Return these and then ``others``."""
        names = ("prompt", "content", "step", "reward")
        columns = (np.concatenate([getattr(self, name), getattr(others, name)]) for name in names)
        offsets = np.concatenate([self.offsets, self.offsets[-1] + others.offsets[1:]])
        tokens = np.concatenate([self.tokens, others.tokens])
        return Responses(*columns, offsets, tokens, np.concatenate([self.log_probs, others.log_probs]))

    def row(self, number: int) -> tuple[list[int], list[float] | None]:
        """Return token ids and log-probs of one response."""
        part = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return self.tokens[part].tolist(), self.log_probs[part].tolist() if len(self.log_probs) else None


@dataclass(frozen=True)
class Bounds:
    """What is kept.

    Attributes:
        capacity: responses of a prompt.
        total: responses of all prompts.
        max_age: training steps after which a response is forgotten.
        keep: which stay when there are too many: ``recent``, or ``reward``, highest first and among equals the recent.
    """

    capacity: int
    total: int
    max_age: int
    keep: str


class SuccessPool:
    """The store.

    Attributes:
        held: responses, sorted by prompt and within one best first, as ``keep`` says.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.held = Responses.none()

    def forget(self, step: int) -> None:
        """Drop responses made more than ``max_age`` steps before ``step``."""
        young = step - self.held.step <= self.bounds.max_age
        if not young.all():
            self.held = self.held.select(np.flatnonzero(young))

    def add(self, new: Responses) -> None:
        """Take responses in; of equal ones of a prompt only the newest stays."""
        if not len(new):
            return
        both = self.held.joined(new)
        by_content = np.lexsort((-both.step, both.content, both.prompt))
        same = _repeats(both.prompt[by_content]) & _repeats(both.content[by_content])
        rows = by_content[~same]
        rows = rows[np.lexsort((*self._preference(both, rows), both.prompt[rows]))]
        rows = rows[_rank_in_run(both.prompt[rows]) < self.bounds.capacity]
        if len(rows) > self.bounds.total:
            best = np.lexsort((both.prompt[rows], *self._preference(both, rows)))[: self.bounds.total]
            rows = rows[np.sort(best)]
        self.held = both.select(rows)

    def find(self, prompts: Ints, per_prompt: int) -> tuple[Ints, Ints]:
        """Look up the best responses of prompts.

        Args:
            prompts: (k,) keys.
            per_prompt: at most so many of each.

        Returns:
            For every hit the index into ``prompts``, and the row of ``held``.
        """
        first = np.searchsorted(self.held.prompt, prompts, side="left")
        last = np.searchsorted(self.held.prompt, prompts, side="right")
        counts = np.minimum(last - first, per_prompt)
        asked = np.repeat(np.arange(len(prompts)), counts)
        within = np.arange(len(asked)) - np.repeat(counts.cumsum() - counts, counts)
        return asked, first[asked] + within

    def _preference(self, responses: Responses, rows: Ints) -> tuple[NDArray[Any], ...]:
        """Keys for ``np.lexsort``, least important first."""
        recent = (responses.content[rows], -responses.step[rows])
        return recent if self.bounds.keep == "recent" else (*recent, -responses.reward[rows])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the columns as tensors."""
        names = self.held.__dataclass_fields__
        return {name: torch.from_numpy(np.array(getattr(self.held, name))) for name in names}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the columns; bounds that are tighter now are applied when responses are next added or forgotten."""
        names = self.held.__dataclass_fields__
        self.held = Responses(**{name: np.array(state[name].cpu().numpy()) for name in names})


def _repeats(sorted_values: NDArray[Any]) -> NDArray[np.bool_]:
    """(n,) whether a value equals the one before it."""
    return np.concatenate([[False], sorted_values[1:] == sorted_values[:-1]]).astype(bool)[: len(sorted_values)]


def _rank_in_run(sorted_values: NDArray[Any]) -> Ints:
    """(n,) place of each value in its run of equal values, from 0."""
    place = np.arange(len(sorted_values))
    starts = np.where(_repeats(sorted_values), 0, place)
    return place - np.maximum.accumulate(starts)
