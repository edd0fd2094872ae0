"""The figures of a run that a report begins with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dataflex_verl.analysis.findings import findings
from dataflex_verl.analysis.outcomes import last_steps, reward_series, validation_by_domain
from dataflex_verl.analysis.records import Floats, RunLog


def summarize_run(log: RunLog) -> dict[str, Any]:
    """A run in plain values; None for what it did not log.

    ``reward`` and ``validation`` are pairs, at the start and at the end: the mean over the first and the last steps (a
    tenth of the window of a comparison: ten, or half of a short run), and over the domains at the first and the last
    validation; the first of the two is None where there was one only.
    """
    window = last_steps(len(log.steps))
    reward = log.values(reward_series(log) or "")
    validation = {domain: _ends(log.series[name].values) for domain, name in validation_by_domain(log).items()}
    return {
        "name": log.name,
        "file": str(log.path),
        "steps": len(log.steps),
        "last_step": log.last_step,
        "reward": [_mean(reward[:window]), _mean(reward[-window:])] if len(reward) else None,
        "validation": _mean_ends(list(validation.values())),
        "validation_by_domain": validation,
        "kept_frac": _mean(log.values("dataflex/kept_frac")),
        "ess_frac": _mean(log.values("dataflex/ess_frac")),
        "step_seconds": _median(log.values("timing_s/step")),
        "tokens": _total(log.values("perf/total_num_tokens")),
        "findings": [asdict(finding) for finding in findings(log)],
        "plan": list(log.plan),
        "versions": dict(versions_of(log)),
    }


def _ends(values: Floats) -> list[float | None]:
    """First and last; no first where there is one value only: it says nothing about a change."""
    return [float(values[0]) if len(values) > 1 else None, float(values[-1])]


def _mean_ends(pairs: Sequence[Sequence[float | None]]) -> list[float | None] | None:
    """The mean over the domains, at each end that all of them have."""
    columns = [[pair[end] for pair in pairs if pair[end] is not None] for end in (0, 1)]
    if not pairs:
        return None
    return [float(np.mean(column)) if len(column) == len(pairs) else None for column in columns]  # type: ignore[arg-type]


def versions_of(log: RunLog) -> Mapping[str, str]:
    """Versions that our trainer, or ``dataflex compare``, recorded beside the run; empty where neither made it."""
    found = _read(log.path.with_suffix(".versions.json")) or (_read(log.path.parent / "run.json") or {}).get("versions")
    return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _median(values: Floats) -> float | None:
    return float(np.median(values)) if len(values) else None


def _total(values: Floats) -> float | None:
    return float(values.sum()) if len(values) else None
