"""Shares of domains: softmax, and lower and upper bounds that hold exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks.errors import Problem, did_you_mean, one_of

Shares = NDArray[np.float64]
Bound = float | Mapping[str, float]

_SLACK = 1e-9


def softmax(values: Any, temperature: float) -> Shares:
    """Return exp(values / temperature), normalised: (K,) float64; ``temperature`` > 0 in the units of ``values``."""
    exponent = np.asarray(values, dtype=np.float64) / temperature
    weights = np.exp(exponent - exponent.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def bounded(shares: Shares, floor: Shares, cap: Shares) -> Shares:
    """Bring shares between bounds: ``min(cap, floor + level * shares)``, the level such that the result sums to 1.

    Where no cap binds this is ``floor + (1 - sum(floor)) * shares``. A share that would exceed its cap gets the cap,
    and what is left goes to the others in proportion to their shares; to domains whose share is 0 only when no other
    has room left, in proportion to that room.

    Args:
        shares, floor, cap: (K,) float64; shares are not negative and sum to 1, ``0 <= floor <= cap <= 1``,
            ``sum(floor) <= 1 <= sum(cap)``.

    Returns:
        (K,) float64 that sums to 1, each within its bounds.
    """
    floor = floor / max(1.0, floor.sum())  # a sum of 1 up to rounding, such as 3 * 0.33333333333333337
    capped = np.zeros(len(shares), dtype=bool)
    result = floor.copy()
    # Every pass caps at least one more domain or ends.
    for _ in range(len(shares) + 1):
        free = np.where(capped, 0.0, shares)
        left = 1.0 - cap[capped].sum() - floor[~capped].sum()
        weights = free / free.sum() if free.sum() > 0 else np.zeros_like(free)
        result = np.where(capped, cap, floor + max(0.0, left) * weights)
        above = ~capped & (result > cap)
        if not above.any():
            break
        capped |= above
    missing = 1.0 - result.sum()
    room = cap - result
    if missing > _SLACK and room.sum() > 0:
        result = result + missing * room / room.sum()
    return np.asarray(np.clip(result, floor, cap), dtype=np.float64)


def bound_of(bound: Bound, domains: Sequence[str], default: float) -> Shares:
    """Return one bound a domain, (K,) float64; ``default`` for domains that a mapping does not name."""
    if isinstance(bound, Mapping):
        return np.array([bound.get(domain, default) for domain in domains], dtype=np.float64)
    return np.full(len(domains), bound, dtype=np.float64)


def bound_problems(floor: Bound, cap: Bound, domains: Sequence[str]) -> list[Problem]:
    """Say what keeps K shares from having these bounds; settings are ``floor`` and ``cap``."""
    problems = []
    for name, bound in (("floor", floor), ("cap", cap)):
        for domain, value in bound.items() if isinstance(bound, Mapping) else ():
            if domain not in domains:
                problems.append(Problem(f"{name}.{domain}", value, one_of(domains), did_you_mean(domain, domains)))
    low, high, k = bound_of(floor, domains, 0.0), bound_of(cap, domains, 1.0), len(domains)
    if low.sum() > 1 + _SLACK:
        problems.append(
            Problem("floor", floor, f"floors of {k} domains that sum to at most 1 (they sum to {low.sum():g})")
        )
    if high.sum() < 1 - _SLACK:
        problems.append(Problem("cap", cap, f"caps of {k} domains that sum to at least 1 (they sum to {high.sum():g})"))
    for index in np.flatnonzero(low > high).tolist():
        given = f"{low[index]:g} above the cap {high[index]:g} of domain {domains[index]!r}"
        problems.append(Problem("floor", given, "a floor that is not above the cap"))
    return problems


def share_problems(setting: str, given: Any, domains: Sequence[str] | None) -> list[Problem]:
    """Say what keeps ``given`` (a list, or a mapping by domain) from being shares: negative, NaN, all zero, length."""
    if isinstance(given, Mapping):
        unknown = [name for name in given if domains is not None and name not in domains]
        missing = [name for name in domains or () if name not in given]
        if unknown or missing:
            return [Problem(setting, dict(given), f"one share for each of {', '.join(domains or ())}")]
        given = list(given.values())
    numbers = isinstance(given, (list, tuple)) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in given
    )
    if not numbers:
        return [Problem(setting, given, "a list of numbers, one a domain, or a mapping of domains to numbers")]
    if domains is not None and len(given) != len(domains):
        return [Problem(setting, given, f"{len(domains)} shares, one for each of {', '.join(domains)}")]
    values = np.array(given, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or not values.sum() > 0:
        return [Problem(setting, given, "finite numbers >= 0 that are not all 0")]
    return []


def shares_of(given: Any, domains: Sequence[str]) -> Shares:
    """Return checked shares in the order of ``domains``, normalised: (K,) float64."""
    values = [given[domain] for domain in domains] if isinstance(given, Mapping) else given
    shares = np.array(values, dtype=np.float64)
    return np.asarray(shares / shares.sum(), dtype=np.float64)
