"""A comparison in plain values, for JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from dataflex_verl.analysis.comparison import Comparison
from dataflex_verl.analysis.verdicts import verdict


def as_data(comparison: Comparison) -> dict[str, Any]:
    """The comparison in plain values, for JSON; without what the runs logged step by step."""
    runs = [
        {key: value for key, value in asdict(replace(run, log=None)).items() if key != "log"} for run in comparison.runs
    ]
    arms = []
    for arm in comparison.arms:
        differs = [asdict(one) for one in comparison.conditions.differs.get(arm.name, ())]
        arms.append({**asdict(arm), "differs": differs, "verdict": verdict(comparison, arm)})
    return {
        "baseline": comparison.baseline,
        "seeds": list(comparison.seeds),
        "steps": comparison.steps,
        "rollouts": comparison.rollouts,
        "main_outcome": comparison.main,
        "outcomes": list(comparison.outcomes),
        "arms": arms,
        "runs": runs,
        "notes": list(comparison.notes),
        "warnings": list(comparison.conditions.warnings),
        "unchecked": list(comparison.conditions.unchecked),
    }
