"""The domain sampler: chooses which dataset rows become the next prompts, before any of them is fetched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks import ConfigError, DataFlexError, Problem, PromptBatch
from dataflex_hooks.errors import Described
from dataflex_verl.credits import Credits
from dataflex_verl.domain_column import DomainRows
from dataflex_verl.state_files import DOMAIN_FORMAT as FORMAT
from dataflex_verl.streams import Stream

_log = logging.getLogger("dataflex_verl")

DRAWS_PER_PROMPT = 8

Admit = Callable[[PromptBatch], tuple[NDArray[Any] | None, NDArray[Any] | None]]
"""Candidates to (which are admitted (n,) bool, priority (n,), higher first); None is all, and the order drawn."""


@dataclass(frozen=True)
class Draw:
    """Prompts to fetch: ``rows`` of the dataset and ``domains`` as indices, both in the order of submission."""

    rows: list[int]
    domains: list[int]


class DomainSampler:
    """Draws prompts from one shuffled stream a domain, in the proportions in force.

    Args:
        dataset: rows by domain.
        seed: what all orders derive from.
        shuffle: False gives each domain's rows in the order of the dataset.
        proportions: (K,) to begin with; None gives every domain its share of the rows.
        admit: asked about candidates before they are drawn for good; None admits all.
        with_priority: whether ``admit`` gives priorities, so that more candidates are drawn than needed.
        on_starved: what happens when a domain's quota is not admitted within 8 times as many draws: ``take`` the best
            refused ones with a warning, or ``error``.

    Attributes:
        credits, trained: what is asked for less what was drawn, and less what was trained on; the replay buffer charges
            the second where it has a choice.
        drawn, admitted: (K,) int64, candidates so far.
        forced: (K,) int64, refused prompts that were taken for want of admitted ones.
    """

    def __init__(
        self,
        dataset: DomainRows,
        seed: int = 0,
        shuffle: bool = True,
        proportions: NDArray[np.float64] | None = None,
        admit: Admit | None = None,
        with_priority: bool = False,
        on_starved: Literal["take", "error"] = "take",
    ) -> None:
        self.dataset = dataset
        self.domains = dataset.domains
        self.seed, self.shuffle = seed, shuffle
        self.admit, self.with_priority, self.on_starved = admit, with_priority, on_starved
        size = np.array([len(rows) for rows in dataset.rows], dtype=np.float64)
        self.natural = size / size.sum()
        self.credits = Credits(self.natural if proportions is None else proportions)
        self.trained = Credits(self.credits.proportions)
        self.streams = [Stream(rows, seed, index, shuffle) for index, rows in enumerate(dataset.rows)]
        self.drawn, self.admitted, self.forced = (np.zeros(len(size), dtype=np.int64) for _ in range(3))

    @property
    def proportions(self) -> NDArray[np.float64]:
        """(K,) float64, in force for the next prompt."""
        return self.credits.proportions.copy()

    def set_proportions(self, proportions: NDArray[np.float64]) -> None:
        """Put new proportions in force, from the very next prompt on; raises ValueError on ones that cannot be."""
        self.credits.set(proportions)
        self.trained.set(proportions)

    @property
    def counts(self) -> NDArray[np.int64]:
        """(K,) int64: prompts of each domain drawn so far."""
        return self.credits.counts.copy()

    @property
    def passes(self) -> NDArray[np.float64]:
        """(K,) float64: how often each domain's rows were drawn, on average: its own epochs."""
        return np.array([stream.passes for stream in self.streams])

    def draw(self, count: int) -> Draw:
        """Choose the next ``count`` prompts. One draw of n gives what n draws of one give, unless ``admit`` is there.

        Raises:
            DataFlexError: a domain's quota was not admitted, under ``on_starved: error``.
        """
        domains = self.credits.next(count)
        if self.admit is None:
            return Draw(self._straight(domains), domains)
        quota = np.bincount(np.array(domains), minlength=len(self.domains))
        chosen = {int(index): iter(rows) for index, rows in self._admitted(self.admit, quota).items()}
        return Draw([next(chosen[index]) for index in domains], domains)

    def upcoming(self, count: int) -> list[int]:
        """Return rows of the next prompts if the proportions stay, at most ``count``, none beyond a stream's wrap.

        Nothing is drawn. With ``admit`` nothing is known ahead.
        """
        if self.admit is not None:
            return []
        quota = np.bincount(np.array(self.credits.ahead(count), dtype=np.int64), minlength=len(self.streams))
        return [row for index in np.flatnonzero(quota) for row in self.streams[index].peek(int(quota[index]))]

    def _straight(self, domains: list[int]) -> list[int]:
        if len(domains) == 1:
            return [self.streams[domains[0]].take_one()]
        quota = np.bincount(np.array(domains), minlength=len(self.streams))
        taken = {index: iter(self.streams[index].take(int(quota[index]))) for index in np.flatnonzero(quota).tolist()}
        return [next(taken[index]) for index in domains]

    def _admitted(self, admit: Admit, quota: NDArray[np.int64]) -> dict[int, list[int]]:
        fills = {index: _Fill(self.streams[index], int(quota[index])) for index in np.flatnonzero(quota).tolist()}
        while wanted := {index: want for index, fill in fills.items() if (want := fill.wanted(self.with_priority))}:
            drawn = {index: self.streams[index].take(want) for index, want in wanted.items()}
            keep, priority = self._ask(admit, drawn)
            start = 0
            for index, rows in drawn.items():
                part = slice(start, start + len(rows))
                fills[index].add(rows, keep[part], priority[part])
                self.drawn[index] += len(rows)
                self.admitted[index] += int(keep[part].sum())
                start += len(rows)
        return {index: self._finish(index, fill) for index, fill in fills.items()}

    def _ask(self, admit: Admit, drawn: Mapping[int, list[int]]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        rows = np.array([row for part in drawn.values() for row in part], dtype=np.int64)
        names = np.empty(len(rows), dtype=object)
        names[:] = [self.domains[index] for index, part in drawn.items() for _ in part]
        keep, priority = admit(PromptBatch(rows, names))
        keep = np.ones(len(rows), dtype=bool) if keep is None else np.asarray(keep, dtype=bool)
        priority = np.zeros(len(rows)) if priority is None else np.asarray(priority, dtype=np.float64)
        if keep.shape != rows.shape or priority.shape != rows.shape:
            raise ValueError(f"{len(rows)} candidates need as many answers, got {keep.shape} and {priority.shape}")
        return keep, priority

    def _finish(self, index: int, fill: _Fill) -> list[int]:
        rows, forced = fill.chosen()
        if forced:
            name = self.domains[index]
            text = f"domain {name!r}: {fill.quota - forced} of {fill.quota} prompts admitted in {fill.draws} draws"
            if self.on_starved == "error":
                raise DataFlexError(f"{text}; on_starved: error")
            _log.warning("%s; the best refused ones are taken", text)
            self.forced[index] += forced
        self.streams[index].refused += fill.refused - forced
        return rows

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from: plain values and small arrays; nothing that grows with the dataset."""
        return {
            "format": FORMAT,
            "fingerprint": self.dataset.fingerprint,
            "domains": list(self.domains),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "credits": self.credits.state_dict(),
            "trained": self.trained.state_dict(),
            "streams": [stream.state_dict() for stream in self.streams],
            "drawn": self.drawn.copy(),
            "admitted": self.admitted.copy(),
            "forced": self.forced.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, with its seed and proportions.

        Raises:
            ConfigError: the state is not a domain sampler's, or of another dataset, or of other domains.
        """
        if state.get("format") != FORMAT:
            given = Described("a checkpoint that another data loader wrote")
            hint = "start afresh with trainer.resume_mode=disable, or resume without the plugin that mixes domains"
            raise ConfigError([Problem("trainer.resume_mode", given, "a checkpoint of the domain sampler", hint)])
        if state["fingerprint"] != self.dataset.fingerprint:
            given = Described(f"a dataset with fingerprint {self.dataset.fingerprint}")
            accepted = f"the dataset of the checkpoint, fingerprint {state['fingerprint']}"
            hint = "the rows differ, or their filter (data.max_prompt_length, data.train_max_samples)"
            raise ConfigError([Problem("data.train_files", given, accepted, hint)])
        if tuple(state["domains"]) != self.domains:
            accepted = f"those of the checkpoint: {', '.join(state['domains'])}"
            raise ConfigError([Problem("dataflex.domains", list(self.domains), accepted)])
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self.credits.load_state_dict(state["credits"])
        self.trained.load_state_dict(state["trained"])
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.load_state_dict(saved, self.seed, self.shuffle)
        for name in ("drawn", "admitted", "forced"):
            setattr(self, name, np.array(state[name], dtype=np.int64))


class _Fill:
    """One domain's candidates in a draw."""

    def __init__(self, stream: Stream, quota: int) -> None:
        self.stream, self.quota = stream, quota
        self.draws = self.refused = 0
        self._rows: list[int] = []
        self._keep: list[bool] = []
        self._priority: list[float] = []

    def wanted(self, with_priority: bool) -> int:
        """How many candidates to draw next, 0 when there are enough or the limit is reached."""
        most = DRAWS_PER_PROMPT * self.quota
        if self.draws == 0:
            # Choosing by priority needs a choice; one epoch's rows, so that none comes twice.
            return max(self.quota, min(most, self.stream.before_wrap)) if with_priority else self.quota
        missing = self.quota - (self.draws - self.refused)
        return max(0, min(2 * missing, most - self.draws))

    def add(self, rows: list[int], keep: NDArray[np.bool_], priority: NDArray[np.float64]) -> None:
        self.draws += len(rows)
        self.refused += int((~keep).sum())
        self._rows += rows
        self._keep += keep.tolist()
        self._priority += priority.tolist()

    def chosen(self) -> tuple[list[int], int]:
        """Return the rows to submit and how many of them were refused; the other admitted ones return to the stream."""
        keep = np.array(self._keep, dtype=bool)
        # Admitted before refused, then by priority, then as drawn.
        order = np.lexsort((np.arange(len(keep)), -np.array(self._priority), ~keep))
        places = np.sort(order[: self.quota]) if keep.sum() <= self.quota else order[: self.quota]
        taken = np.zeros(len(keep), dtype=bool)
        taken[places] = True
        self.stream.give_back([self._rows[place] for place in np.flatnonzero(keep & ~taken).tolist()])
        return [self._rows[place] for place in places.tolist()], int((~keep[places]).sum())
