"""What a comparison says about an arm, in a sentence or two."""

from __future__ import annotations

from dataflex_verl.analysis.comparison import Against, ArmResult, Comparison
from dataflex_verl.analysis.statistics import ALPHA, Difference


def verdict(comparison: Comparison, arm: ArmResult) -> str:
    """Say what the comparison shows of ``arm``, and what it cannot show."""
    if arm.name == comparison.baseline:
        value = arm.means.get(comparison.main)
        if value is None:
            return f"{arm.name} is the baseline; no run of it has {comparison.main}, so nothing can be compared."
        return f"{arm.name} is the baseline: {value:.3f} in {comparison.main}, mean of {_seeds(arm.runs)}."
    found = arm.against[comparison.main]
    if found.difference is None:
        return (
            f"{arm.name}: no seed under which both {arm.name} and {comparison.baseline} have {comparison.main}; "
            "nothing can be said."
        )
    return _sentence(comparison, arm, found, found.difference) + _missing(comparison, found)


def _sentence(comparison: Comparison, arm: ArmResult, against: Against, found: Difference) -> str:
    name, baseline, main = arm.name, comparison.baseline, comparison.main
    if found.exact:
        if set(arm.same) >= set(against.seeds):
            return (
                f"{name} equals {baseline}: under {_seeds(found.n)} every step's reward and gradient norm are the "
                f"same, and the difference is exactly 0."
            )
        return f"{name} and {baseline} end with the same {main} under {_seeds(found.n)}; the difference is exactly 0."
    direction = "higher" if found.mean > 0 else "lower"
    size = f"{name} ends {abs(found.mean):.3f} {direction} than {baseline} in {main}"
    if found.n == 1:
        return f"{size}, under one seed: how much of that is chance cannot be said."
    if found.constant:
        return f"{size}, by the same amount under all {found.n} seeds: their spread gives no interval."
    assert found.low is not None and found.high is not None and found.detectable is not None
    interval = f"95 % interval {found.low:+.3f} to {found.high:+.3f}, {found.n} seeds"
    p = against.adjusted if against.adjusted is not None else found.p
    assert p is not None
    if p < ALPHA:
        return f"{size} ({interval}): more than chance explains (adjusted p = {_p(p)})."
    return (
        f"{size} ({interval}): no effect shown (adjusted p = {_p(p)}). With this spread, {found.n} seeds find a true "
        f"difference of {found.detectable:.3f} four times in five; smaller ones are mostly missed."
    )


def _missing(comparison: Comparison, against: Against) -> str:
    missing = [seed for seed in comparison.seeds if seed not in against.seeds]
    if not missing:
        return ""
    return f" Without seed {', '.join(map(str, missing))}, where one of the two is missing."


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _p(p: float) -> str:
    return "below 0.001" if p < 0.001 else f"{p:.3f}"
