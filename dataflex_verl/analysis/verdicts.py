"""What a comparison says about an arm, in a sentence or two."""

from __future__ import annotations

from dataflex_verl.analysis.comparison import Against, ArmResult, Comparison
from dataflex_verl.analysis.statistics import ALPHA, Difference

NOTHING = 1e-12
"""A mean difference below this is 0 but for rounding."""
_SMALL = 0.0005


def verdict(comparison: Comparison, arm: ArmResult) -> str:
    """Say what the comparison shows of ``arm``, and what it cannot show."""
    if arm.name == comparison.baseline:
        value = arm.means.get(comparison.main)
        if value is None:
            return f"{arm.name} is the baseline; no run of it has {comparison.main}, so nothing can be compared."
        return f"{arm.name} is the baseline: {figure(value)} in {comparison.main}, mean of {_seeds(arm.runs)}."
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
    size = f"{name} ends {figure(abs(found.mean))} {direction} than {baseline} in {main}"
    if abs(found.mean) < NOTHING:
        size = f"{name} ends as high as {baseline} in {main}, on average"
    if found.n == 1:
        return f"{size}, under one seed: how much of that is chance cannot be said."
    if found.constant:
        return f"{size}, by the same amount under all {found.n} seeds: their spread gives no interval."
    assert found.low is not None and found.high is not None and found.detectable is not None
    interval = f"95 % interval {figure(found.low, '+')} to {figure(found.high, '+')}, {found.n} seeds"
    p = against.adjusted if against.adjusted is not None else found.p
    assert p is not None
    if p < ALPHA:
        return f"{size} ({interval}): more than chance explains (adjusted p = {_p(p)})."
    count = sum(other.against[main].adjusted is not None for other in comparison.arms[1:])
    among = f" among {count} arms" if count > 1 else ""
    alone = (
        f" The interval leaves 0 out, but of {count} such intervals one may well do so by chance."
        if found.p is not None and found.p < ALPHA
        else ""
    )
    return (
        f"{size} ({interval}): no effect shown (adjusted p = {_p(p)}).{alone} With this spread, {found.n} seeds find a "
        f"true difference of {figure(found.detectable)}{among} four times in five; smaller ones are mostly missed."
    )


def figure(value: float, sign: str = "") -> str:
    """A number with three decimals, or more where these would all be 0; ``sign`` is ``+`` to have one in any case."""
    if abs(value) < NOTHING:
        return "0.000"
    return f"{value:{sign}.3f}" if abs(value) >= _SMALL else f"{value:{sign}.2g}"


def _missing(comparison: Comparison, against: Against) -> str:
    missing = [seed for seed in comparison.seeds if seed not in against.seeds]
    if not missing:
        return ""
    return f" Without seed{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}, where one of the two is missing."


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _p(p: float) -> str:
    return "below 0.001" if p < 0.001 else f"{p:.3f}"
