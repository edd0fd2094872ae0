"""What a reader of a report should look at, in words: found in the metrics by rules that are written down here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dataflex_verl.analysis.domains import domain_parts, shown_domain
from dataflex_verl.analysis.outcomes import GRADIENT, reward_series, validation_by_domain
from dataflex_verl.analysis.records import RunLog

STARVED_STEPS = 20
"""A domain is starved that trained nothing in so many steps in a row, though its target share was above 0."""

SMALL_SHARE = 0.01
"""A target share below this at the end is small."""

NEAR_EMPTY = 0.1
"""A selection is near-empty that keeps less than this share of a step's rollouts."""

CONCENTRATED = 0.5
"""Weights are concentrated where the effective sample size is below this share of what was kept."""

_OFTEN = 0.1
Level = Literal["warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One finding: ``warning`` for what may spoil a run, ``note`` for what a reader has to know."""

    level: Level
    text: str


def findings(log: RunLog) -> list[Finding]:
    """Everything found in a run, warnings first."""
    rules = (_file, _selection, _weights, _without_effect, _updates, _domains, _gaps)
    found = [finding for rule in rules for finding in rule(log)]
    return sorted(found, key=lambda finding: finding.level != "warning")


def _file(log: RunLog) -> Iterator[Finding]:
    for note in log.notes:
        yield Finding("note", f"metrics file: {note}")


def _selection(log: RunLog) -> Iterator[Finding]:
    kept = log.series.get("dataflex/kept_frac")
    if kept is not None and (low := kept.values < NEAR_EMPTY).mean() >= _OFTEN:
        least = int(np.argmin(kept.values))
        yield Finding(
            "warning",
            f"near-empty selection: less than {NEAR_EMPTY:.0%} of the rollouts were kept in {_of(low)}; the least was "
            f"{kept.values[least]:.1%} (step {kept.steps[least]}). Few rollouts make noisy updates",
        )
    fallback = log.values("dataflex/fallback")
    if (fallback > 0).any():
        yield Finding(
            "warning",
            f"too little was kept in {_of(fallback > 0)}, and the fallback (dataflex.min_keep) stood in for the "
            "selection",
        )


def _weights(log: RunLog) -> Iterator[Finding]:
    size, kept = log.series.get("dataflex/ess_frac"), log.series.get("dataflex/kept_frac")
    if size is None or kept is None or not np.array_equal(size.steps, kept.steps):
        return
    share = np.divide(size.values, kept.values, out=np.ones_like(size.values), where=kept.values > 0)
    if (low := share < CONCENTRATED).mean() >= _OFTEN:
        least = int(np.argmin(share))
        yield Finding(
            "warning",
            f"weights concentrated: in {_of(low)} the weights left less than {CONCENTRATED:.0%} of the kept rollouts "
            f"as effective sample size; the least was {share[least]:.0%} (step {size.steps[least]})",
        )


def _without_effect(log: RunLog) -> Iterator[Finding]:
    applied = log.values("dataflex/applied")
    if len(applied) and not applied.any():
        yield Finding("note", "shadow mode: everything was decided and logged, nothing was changed")
    for label, what, unchanged in _labels(log):
        decided = log.values(f"dataflex/{label}/decided_total")
        if len(decided) and not decided.any():
            yield Finding("warning", f"decision without effect: {label} returned no decision in any step")
        elif unchanged:
            yield Finding("warning", f"decision without effect: {label} {what} in all {len(log.steps)} steps")
    for name in sorted(log.series):
        if name.startswith("dataflex/") and name.endswith("/disabled") and (off := log.values(name)).any():
            first = log.series[name].steps[int(np.argmax(log.series[name].values > 0))]
            yield Finding(
                "warning", f"{name.split('/')[1]} failed and was disabled from step {first} on, {_of(off > 0)}"
            )


def _labels(log: RunLog) -> Iterator[tuple[str, str, bool]]:
    """Labels with a mask or weights, what having no effect means for them, and whether that is so."""
    for name in sorted(log.series):
        parts = name.split("/")
        if len(parts) != 3 or parts[0] != "dataflex":
            continue
        if parts[2] == "kept_frac":
            yield parts[1], "kept every rollout", bool((log.values(name) == 1.0).all())
        elif parts[2] == "weight_std":
            yield parts[1], "gave all rollouts the same weight", bool((log.values(name) <= 1e-9).all())


def _updates(log: RunLog) -> Iterator[Finding]:
    skipped = log.values("dataflex/skip_update") > 0
    if skipped.any():
        yield Finding("note", f"no optimizer step was made in {_of(skipped)}, as a plugin asked")
    still = (log.values(GRADIENT) == 0.0) & (~skipped if len(skipped) == len(log.values(GRADIENT)) else True)
    if still.any():
        yield Finding("warning", f"the gradient was exactly 0 in {_of(still)}: nothing was learned there")


def _domains(log: RunLog) -> Iterator[Finding]:
    for part in domain_parts(log):
        name = shown_domain(part)
        target, trained = log.series[f"dataflex/prop_{part}"], log.series.get(f"dataflex/trained_{part}")
        if trained is not None and np.array_equal(target.steps, trained.steps):
            start, length = _longest((target.values > 0) & (trained.values == 0))
            if length >= STARVED_STEPS:
                share = target.values[start : start + length].mean()
                yield Finding(
                    "warning",
                    f"starved domain: {name} trained nothing from step {target.steps[start]} to "
                    f"{target.steps[start + length - 1]}, though its target share was {share:.1%}",
                )
                continue
        last = target.values[-min(STARVED_STEPS, len(target.values)) :].mean()
        if last < SMALL_SHARE:
            yield Finding("warning", f"starved domain: {name} ends with a target share of {last:.2%}")


def _gaps(log: RunLog) -> Iterator[Finding]:
    if not log.plan and not any(name.startswith("dataflex/") for name in log.series):
        yield Finding("note", "a run without DataFlex: what verl logs itself is shown")
    if not validation_by_domain(log):
        yield Finding("note", "no validation was logged")
    if reward_series(log) is None:
        yield Finding("note", "the reward is not there for every step, or not at all")


def _longest(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and length of the longest stretch of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    best = int(np.argmax(lengths))
    return int(starts[best]), int(lengths[best])


def _of(flags: NDArray[np.bool_]) -> str:
    return f"{int(flags.sum())} of {len(flags)} steps"
