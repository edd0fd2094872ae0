"""What a decision log adds to a report: how the weights of the rollouts in an update were spread, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataflex_verl.analysis.extra import library
from dataflex_verl.analysis.records import Floats, RunLog, Series, UnreadableRun

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_FOLDERS = ("decisions", "checkpoints/decisions")


@dataclass(frozen=True)
class LoggedWeights:
    """Weights of the rollouts that were trained on.

    Attributes:
        quantiles: a series for each of :data:`QUANTILES`, over the rollouts of a step.
        notes: what could not be read.
    """

    quantiles: tuple[Series, ...]
    notes: tuple[str, ...] = ()


def log_folder(log: RunLog) -> Path | None:
    """The decision log beside a run's metrics, or None."""
    places = [log.path.parent / name for name in _FOLDERS]
    return next((place for place in places if place.is_dir() and any(place.glob("*.parquet"))), None)


def logged_weights(folder: Path) -> LoggedWeights:
    """Read a decision log.

    Raises:
        UnreadableRun: there is no log, or one that this version cannot read.
        MissingLibrary: pyarrow is not installed.
    """
    library("pyarrow")
    from dataflex_hooks.decision_log.files import LogError
    from dataflex_hooks.decision_log.reader import DecisionLog

    try:
        opened = DecisionLog.open(folder)
        rows = list(_by_step(opened))
    except LogError as error:
        raise UnreadableRun(str(error)) from error
    steps = np.array([step for step, _ in rows], dtype=np.int64)
    values = np.array([found for _, found in rows]).reshape(len(rows), len(QUANTILES))
    series = tuple(Series(steps, values[:, index]) for index in range(len(QUANTILES)))
    return LoggedWeights(series if len(rows) else (), tuple(f"decision log: {note}" for note in opened.damaged))


def _by_step(opened: object) -> Iterator[tuple[int, Floats]]:
    for logged in opened.steps(["state", "weight"]):  # type: ignore[attr-defined]
        weights = logged.table["weight"].to_numpy().astype(np.float64)
        trained = library("pyarrow.compute").equal(logged.table["state"], "trained").to_numpy()
        weights = weights[trained & np.isfinite(weights)]
        if len(weights):
            yield logged.step, np.quantile(weights, QUANTILES)
