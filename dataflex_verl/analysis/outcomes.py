"""What each run of a comparison came to, or why it does not count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from dataflex_verl.analysis.records import METRICS_FILE, RunLog, UnreadableRun, metrics_path, read_run

VALIDATION = re.compile(r"val-core/(?P<domain>.+)/(?:acc|reward)/mean@\d+")
REWARDS = ("dataflex/reward_all", "critic/score/mean")
"""Mean reward of a step: of all generated rollouts where ours is logged, else verl's."""

GRADIENT = "actor/grad_norm"
OVERALL = "validation, all domains"
REWARD = "training reward, last steps"
WINDOW = 10
State = Literal["finished", "failed", "missing", "left out"]


@dataclass(frozen=True)
class RunOutcome:
    """One run of a comparison.

    Attributes:
        arm, seed: which.
        state: only a finished run counts anywhere. ``left out``: something is there, but not what was planned.
        reason: why it does not count; for a finished run, what is missing of it.
        values: by outcome: validation over all domains (the mean of the domains' means) and by domain, or the metric
            asked for; the mean training reward of the last steps. What was not logged is not in it.
        measured: names of the metrics behind the validation values.
        seconds: wall time of the whole process, where known.
        step_seconds: sum of the steps' own times.
        tokens: prompt and response tokens in the updates.
        log: what it logged, where that can be read.
    """

    arm: str
    seed: int
    state: State
    reason: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    seconds: float | None = None
    step_seconds: float | None = None
    tokens: float | None = None
    log: RunLog | None = None


def read_outcome(
    arm: str, seed: int, folder: Path, steps: int, metric: str | None = None, seconds: float | None = None
) -> RunOutcome:
    """Read a run that is said to be finished.

    Args:
        arm, seed: which run.
        folder: directory with verl's JSONL file.
        steps: how many training steps it was to make.
        metric: a metric to compare, by its value at the last step, instead of validation.
        seconds: wall time of the process, where known.
    """
    try:
        metrics_path(folder)
    except UnreadableRun as error:
        state: State = "left out" if _any_file(folder) else "missing"
        return RunOutcome(arm, seed, state, str(error) if state == "left out" else "no run yet")
    try:
        log = read_run(folder, f"{arm}, seed {seed}")
    except UnreadableRun as error:
        return RunOutcome(arm, seed, "left out", str(error))
    if log.last_step != steps:
        return RunOutcome(arm, seed, "left out", f"ended at step {log.last_step} of {steps}", log=log)
    if len(log.steps) != steps:
        return RunOutcome(arm, seed, "left out", f"logged {len(log.steps)} of {steps} steps", log=log)
    values, measured = _final(log, steps, metric)
    lacks = "" if values else f"nothing of {metric or 'validation'} at step {steps}"
    if (reward := reward_series(log)) is not None:
        values[REWARD] = float(log.values(reward)[-last_steps(steps) :].mean())
    return RunOutcome(
        arm,
        seed,
        "finished",
        lacks,
        values,
        measured,
        seconds,
        _total(log, "timing_s/step"),
        _total(log, "perf/total_num_tokens"),
        log,
    )


def failed_outcome(arm: str, seed: int, folder: Path, reason: str) -> RunOutcome:
    """A run that did not finish: what went wrong, and after which step."""
    try:
        place = f"after step {read_run(folder).last_step}"
    except UnreadableRun:
        place = "before the first step"
    return RunOutcome(arm, seed, "failed", f"{place}: {reason}; log: {folder / 'verl.log'}")


def last_steps(steps: int) -> int:
    """Over how many steps the training reward is averaged at the end."""
    return max(1, min(WINDOW, steps // 2))


def reward_series(log: RunLog) -> str | None:
    """The metric that holds the mean reward of every step, or None."""
    return next((name for name in REWARDS if len(log.values(name)) == len(log.steps) > 0), None)


def validation_by_domain(log: RunLog) -> dict[str, str]:
    """The validation metric of each domain that the run logged."""
    found = {}
    for name in log.series:
        if match := VALIDATION.fullmatch(name):
            found[match["domain"]] = name
    return dict(sorted(found.items()))


def first_difference(one: RunLog, other: RunLog) -> int | None:
    """The first step at which reward or gradient norm of two runs differ in any bit; None where none does.

    Raises:
        ValueError: not both logged both, over the same steps: nothing can be said.
    """
    if one.steps != other.steps or not one.steps:
        raise ValueError("the runs have different steps")
    differs = np.zeros(len(one.steps), dtype=bool)
    for name in (_shared_reward(one, other), GRADIENT):
        left, right = one.values(name), other.values(name)
        if not len(left) == len(right) == len(one.steps):
            raise ValueError(f"{name} is not there for every step")
        differs |= left != right
    return int(one.steps[int(np.argmax(differs))]) if differs.any() else None


def _shared_reward(one: RunLog, other: RunLog) -> str:
    for name in REWARDS:
        if len(one.values(name)) and len(other.values(name)):
            return name
    return REWARDS[-1]


def _final(log: RunLog, step: int, metric: str | None) -> tuple[dict[str, float], tuple[str, ...]]:
    if metric is not None:
        value = log.at(metric, step)
        return ({}, ()) if value is None else ({metric: value}, (metric,))
    by_domain = validation_by_domain(log)
    found = {domain: log.at(name, step) for domain, name in by_domain.items()}
    values = {domain: value for domain, value in found.items() if value is not None}
    # A mean over some of the domains would be another quantity.
    if not values or len(values) != len(found):
        return {}, ()
    overall = float(np.mean(list(values.values())))
    named = {f"validation, {domain}": value for domain, value in values.items()} if len(values) > 1 else {}
    return {OVERALL: overall, **named}, tuple(by_domain.values())


def _total(log: RunLog, name: str) -> float | None:
    values = log.values(name)
    return float(values.sum()) if len(values) == len(log.steps) > 0 else None


def _any_file(folder: Path) -> bool:
    return folder.is_dir() and any(path.suffix == Path(METRICS_FILE).suffix for path in folder.iterdir())
