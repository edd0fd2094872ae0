"""What a demo run came to, computed from verl's metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dataflex_verl.commands.demo_run import Record, RunResult

WINDOW = 10
REWARD_METRICS = ("dataflex/reward_all", "critic/score/mean")
"""Mean reward of all responses of a step: ours where it is logged, else verl's. A mask changes neither."""
_VALIDATION = re.compile(r"val-core/(?P<domain>.+)/(?:acc|reward)/mean@\d+")


@dataclass(frozen=True)
class Change:
    """A mean reward before and after."""

    before: float
    after: float

    @property
    def rise(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Summary:
    """Figures of a run; None where the run logged nothing of the kind.

    Attributes:
        steps: training steps logged.
        window: how many steps at either end ``train_reward`` averages over.
        train_reward: mean reward of all responses, over the first and the last ``window`` steps.
        validation: mean over domains, before the first and after the last step.
        domains: validation by domain.
        kept_frac: share of responses that entered the update, mean over steps.
        weight_mean: mean weight of a token in the loss, mean over steps.
        weight_std: standard deviation of the weights within a step, mean over steps.
        step_seconds: median duration of a training step, validation excluded.
        start_seconds: from the start of the process to the first training step, first validation included.
        total_seconds: from the start to the end of the process.
    """

    steps: int
    window: int
    train_reward: Change | None
    validation: Change | None
    domains: dict[str, Change]
    kept_frac: float | None
    weight_mean: float | None
    weight_std: float | None
    step_seconds: float | None
    start_seconds: float | None
    total_seconds: float


def summarize(result: RunResult) -> Summary:
    """Compute the summary of a run."""
    trained = [record for record in result.records if record["step"] > 0]
    rewards = [reward for record in trained if (reward := train_reward(record)) is not None]
    window = max(1, min(WINDOW, len(rewards) // 2))
    domains = _validation_by_domain(result.records)
    return Summary(
        steps=len(trained),
        window=window,
        train_reward=Change(fmean(rewards[:window]), fmean(rewards[-window:])) if rewards else None,
        validation=_mean_change(list(domains.values())),
        domains=domains,
        kept_frac=_mean_of(trained, "dataflex/kept_frac"),
        weight_mean=_mean_of(trained, "dataflex/weight_mean"),
        weight_std=_mean_of(trained, "dataflex/weight_std"),
        step_seconds=_median_of(trained, "timing_s/step"),
        start_seconds=_start_seconds(result),
        total_seconds=result.total_seconds,
    )


def train_reward(record: Record) -> float | None:
    """Mean reward of all responses of a step."""
    return next((float(record["data"][name]) for name in REWARD_METRICS if name in record["data"]), None)


def step_status(record: Record, steps: int) -> str:
    """What a progress bar says of a run: the step of ``steps`` that ``record`` is of, and its mean reward."""
    reward = train_reward(record)
    return f"step {int(record['step'])}/{steps}" + ("" if reward is None else f"  reward {reward:.2f}")


def _validation_by_domain(records: Sequence[Record]) -> dict[str, Change]:
    found: dict[str, list[float]] = {}
    for record in records:
        for name, value in record["data"].items():
            if match := _VALIDATION.fullmatch(name):
                found.setdefault(match["domain"], []).append(float(value))
    return {domain: Change(values[0], values[-1]) for domain, values in sorted(found.items()) if len(values) > 1}


def _mean_change(changes: Sequence[Change]) -> Change | None:
    if not changes:
        return None
    return Change(fmean(change.before for change in changes), fmean(change.after for change in changes))


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [float(record["data"][name]) for record in records if name in record["data"]]


def _mean_of(records: Sequence[Record], name: str) -> float | None:
    values = _values(records, name)
    return fmean(values) if values else None


def _median_of(records: Sequence[Record], name: str) -> float | None:
    values = _values(records, name)
    return median(values) if values else None


def _start_seconds(result: RunResult) -> float | None:
    """verl logs a step when it is over, so its duration is taken off."""
    for record, arrival in zip(result.records, result.arrival, strict=True):
        if record["step"] > 0:
            return max(0.0, arrival - float(record["data"].get("timing_s/step", 0.0)))
    return None
