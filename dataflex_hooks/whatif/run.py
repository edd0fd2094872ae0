"""Goes over a log once with one or two strategies, and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks.state import SavedPlugin
from dataflex_hooks.whatif.compared import Difference, Tally
from dataflex_hooks.whatif.replay import Decided, Replay
from dataflex_hooks.whatif.steps import LoggedUpdate, ReplayStep, Source
from dataflex_hooks.whatif.strategy import CannotReplay, Strategy

LOGGED = "logged"
"""Stands for what the run itself decided, as it is in the log."""


class _Arm(Protocol):
    def step(self, step: ReplayStep) -> list[Decided]: ...


class _Logged:
    """What the run decided."""

    def step(self, step: ReplayStep) -> list[Decided]:
        decided = []
        for update in step.updates:
            assert update.state is not None and update.weight is not None
            weight = np.nan_to_num(update.weight)
            decided.append(Decided(update.state, weight, _against(update), update.skip_update))
        return decided


def _against(update: LoggedUpdate) -> tuple[tuple[str, str, NDArray[np.bool_]], ...]:
    """Who did not keep which rows, out of the logged reasons."""
    assert update.why is not None
    by_reason: dict[str, NDArray[np.bool_]] = {}
    for code, text in enumerate(update.reasons):
        for part in str(text).split("; ") if text is not None else ():
            rows = update.why == code
            if rows.any():
                by_reason[part] = by_reason.get(part, np.zeros(len(rows), dtype=bool)) | rows
    return tuple((*_halves(part), rows) for part, rows in by_reason.items())


def _halves(text: str) -> tuple[str, str]:
    label, _, reason = text.partition(": ")
    return label, reason


@dataclass
class WhatIf:
    """What came of it.

    Attributes:
        names: of the strategies, in order.
        tallies: what each decided.
        difference: between the first two, None with one.
        proposed: proportions that a strategy's mixer decided on: steps and (K,) shares.
        domains: of the mixers, in order.
        notes: what a reader has to know.
        steps, rollouts: how many were gone over.
    """

    names: tuple[str, ...]
    tallies: tuple[Tally, ...]
    difference: Difference | None
    proposed: tuple[list[tuple[int, NDArray[np.float64]]], ...]
    domains: tuple[tuple[str, ...], ...]
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    rollouts: int = 0

    def plain(self) -> dict[str, Any]:
        """Everything as plain values."""
        strategies = []
        for name, tally, proposed, domains in zip(self.names, self.tallies, self.proposed, self.domains, strict=True):
            shares = [{"step": step, **dict(zip(domains, given.tolist(), strict=True))} for step, given in proposed]
            strategies.append({"name": name, **tally.plain(), "proposed": shares})
        return {
            "steps": self.steps,
            "rollouts": self.rollouts,
            "strategies": strategies,
            "difference": None if self.difference is None else self.difference.plain(),
            "notes": self.notes,
        }


def what_if(source: Source, strategies: Sequence[Strategy], state: Mapping[str, SavedPlugin] | None = None) -> WhatIf:
    """Run strategies over a log.

    Args:
        source: the log.
        strategies: one or two; one of the name :data:`LOGGED` stands for what the run decided.
        state: of plugins before the log's first step, by label.

    Raises:
        CannotReplay: the log lacks what a strategy reads, or has no step at all.
        ConfigError: a strategy's block is wrong.
        PluginError: a plugin failed.
    """
    arms: list[_Arm] = []
    replays: list[Replay | None] = []
    notes: list[str] = []
    problems: list[str] = []
    for strategy in strategies:
        replay = None
        if strategy.name != LOGGED:
            try:
                replay, said = strategy.replay(source, state)
            except CannotReplay as error:
                problems.append(str(error))
                continue
            notes += said
        arms.append(_Logged() if replay is None else replay)
        replays.append(replay)
    if problems:
        raise CannotReplay("\n".join(problems))
    result = WhatIf(
        names=tuple(strategy.name for strategy in strategies),
        tallies=tuple(Tally() for _ in strategies),
        difference=Difference() if len(strategies) > 1 else None,
        proposed=tuple([] if replay is None else replay.proposed for replay in replays),
        domains=tuple(() if replay is None else replay.domains for replay in replays),
    )
    tokens = any(replay is not None and replay.tokens for replay in replays)
    for step in source.steps(tokens):
        _go(step, arms, result)
    if not result.steps:
        raise CannotReplay(f"{source.path}: no step in it that can be read: {'; '.join(source.notes) or 'it is empty'}")
    for name, replay in zip(result.names, replays, strict=True):
        if replay is not None and replay.hooks.disabled:
            failed = ", ".join(replay.hooks.disabled)
            notes.append(
                f"strategy {name!r}: {failed} failed in the replay and, by on_error: disable, decided nothing from "
                "there on"
            )
    result.notes = notes + [note for note in source.notes if note not in notes]
    return result


def _go(step: ReplayStep, arms: Sequence[_Arm], result: WhatIf) -> None:
    decided = [arm.step(step) for arm in arms]
    result.steps += 1
    for index, update in enumerate(step.updates):
        result.rollouts += len(update.rows)
        for tally, of_arm in zip(result.tallies, decided, strict=True):
            tally.add(step.step, update.rows, of_arm[index])
        if result.difference is not None:
            result.difference.add(step.step, update.rows, decided[0][index], decided[1][index])
