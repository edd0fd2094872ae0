"""A run as verl's own ``file`` logger wrote it down: one JSON object a line, ``step`` and ``data``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

METRICS_FILE = "metrics.jsonl"
Floats = NDArray[np.float64]
_NUMBER_SHOWN = 3


class UnreadableRun(Exception):
    """There is no run to read at a path; the text says what is there instead."""


@dataclass(frozen=True)
class Series:
    """The values of one metric.

    Attributes:
        steps: (T,) steps at which it was logged, ascending.
        values: (T,) finite numbers.
    """

    steps: NDArray[np.int64]
    values: Floats


@dataclass(frozen=True)
class RunLog:
    """What a run logged.

    Attributes:
        name: what to call it.
        path: the metrics file.
        steps: training steps logged, ascending; validation before training (step 0) is none.
        series: by metric name.
        plan: the lines of the plan file beside the metrics; empty where there is none.
        notes: what was wrong with the file, in words; what is affected is left out of the rest.
    """

    name: str
    path: Path
    steps: tuple[int, ...]
    series: Mapping[str, Series]
    plan: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        return self.steps[-1] if self.steps else 0

    def values(self, name: str) -> Floats:
        """Values of ``name`` at training steps, in order; empty where it was never logged."""
        found = self.series.get(name)
        return np.empty(0) if found is None else found.values[found.steps > 0]

    def at(self, name: str, step: int) -> float | None:
        """The value of ``name`` at ``step``, or None."""
        found = self.series.get(name)
        if found is None:
            return None
        index = int(np.searchsorted(found.steps, step))
        return float(found.values[index]) if index < len(found.steps) and found.steps[index] == step else None


def metrics_path(path: Path) -> Path:
    """The metrics file of a run: ``path`` itself, or the only one in the directory ``path``.

    Raises:
        UnreadableRun: there is none, or no telling which.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise UnreadableRun(f"{path}: there is nothing here; give verl's JSONL file (trainer.logger=[console,file])")
    if (path / METRICS_FILE).is_file():
        return path / METRICS_FILE
    found = sorted(path.glob("*.jsonl"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnreadableRun(f"{path}: no {METRICS_FILE} in it; verl writes one with trainer.logger=[console,file]")
    raise UnreadableRun(f"{path}: several files, name one: {', '.join(file.name for file in found)}")


def read_run(path: Path, name: str | None = None) -> RunLog:
    """Read a run.

    A line that is cut off (the end of a run that was killed) and lines that are no JSON are left out and noted. Values
    that are no finite numbers are gaps. Where a step was logged twice, the later value counts.

    Args:
        path: the metrics file, or a directory with it.
        name: what to call the run; without it its directory's name.

    Raises:
        UnreadableRun: no such file, or nothing in it that verl's ``file`` logger writes.
    """
    file = metrics_path(path)
    text = file.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise UnreadableRun(f"{file}: the file is empty")
    notes: list[str] = []
    by_step: dict[int, dict[str, float]] = {}
    repeated: set[int] = set()
    for step, data in _records(text, notes):
        known = by_step.setdefault(step, {})
        if not known.keys().isdisjoint(data):
            repeated.add(step)
        known.update(data)
    if not by_step:
        raise UnreadableRun(f"{file}: no line that verl's file logger writes: {{'step': ..., 'data': ...}}")
    if repeated:
        notes.append(f"logged more than once, the last counts: step {_shown(sorted(repeated))}")
    ordered = dict(sorted(by_step.items()))
    steps = tuple(step for step, data in ordered.items() if step > 0 and data)
    if steps and len(steps) != steps[-1] - steps[0] + 1:
        missing = sorted(set(range(steps[0], steps[-1] + 1)) - set(steps))
        notes.append(f"not logged: step {_shown(missing)}")
    return RunLog(name or _name(file), file, steps, _series(ordered), _plan(file), tuple(notes))


def _records(text: str, notes: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
    # Not splitlines: JSON may hold characters that it takes for line ends, such as U+2028.
    lines = text.removesuffix("\n").split("\n")
    bad = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            step, data = _record(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            bad.append(number)
            continue
        yield step, data
    if bad and bad[-1] == len(lines) and not text.endswith("\n"):
        bad.pop()
        notes.append("the last line is cut off and left out")
    if bad:
        notes.append(f"not a record of verl's file logger, left out: line {_shown(bad)}")


def _record(record: Any) -> tuple[int, dict[str, float]]:
    step, data = record["step"], record["data"]
    if isinstance(step, bool) or int(step) != step:
        raise ValueError(step)
    return int(step), {str(name): float(value) for name, value in data.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value))


def _series(by_step: Mapping[int, Mapping[str, float]]) -> dict[str, Series]:
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for step, data in by_step.items():
        for name, value in data.items():
            steps, values = columns.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    return {
        name: Series(np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64))
        for name, (steps, values) in columns.items()
    }


def _plan(file: Path) -> tuple[str, ...]:
    """The plan that our trainer stores beside the metrics, without the prefix of its lines."""
    path = file.with_suffix(".plan.json")
    try:
        lines = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    if not isinstance(lines, list):
        return ()
    return tuple(str(line).removeprefix("DataFlex plan: ") for line in lines)


def _name(file: Path) -> str:
    return file.resolve().parent.name if file.name == METRICS_FILE else file.stem


def _shown(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_NUMBER_SHOWN]))
    left = len(numbers) - _NUMBER_SHOWN
    return shown if left <= 0 else f"{shown} and {left} more"
