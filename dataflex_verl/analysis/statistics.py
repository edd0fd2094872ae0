"""Statistics of paired differences: one number a seed, an arm's value less the baseline's under the same seed.

Student's paired t interval and test; a bootstrap interval (BCa: Efron 1987, doi 10.1080/01621459.1987.10478410) from
ten pairs on, where it begins to hold what it promises; Holm's adjustment (1979) over the arms; and the smallest true
difference that a design would find four times in five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataflex_verl.analysis.extra import library
from dataflex_verl.analysis.records import Floats

LEVEL = 0.95
ALPHA = 0.05
POWER = 0.8
BOOTSTRAP_FROM = 10
SIMULATIONS = 2000
RESAMPLES = 999
_SEED = 20250301
_ROUNDING = 1e-12
_CHUNK = 2_000_000
_POINTS = 4000


@dataclass(frozen=True)
class Bootstrap:
    """A bootstrap interval (BCa) of the mean, and how often such intervals cover the true mean.

    Attributes:
        low, high: its ends.
        coverage: share of simulated samples (normal, of the same size) whose interval covers the true mean.
        simulations: number of simulated samples.
    """

    low: float
    high: float
    coverage: float
    simulations: int


@dataclass(frozen=True)
class Difference:
    """A mean paired difference; None where the number of pairs, or their spread, allows no such statement.

    Attributes:
        n: number of pairs.
        mean: mean difference.
        sd: standard deviation of the differences, n - 1 in the denominator.
        se: standard error of the mean.
        low, high: the paired t interval, 95 %.
        p: two-sided p-value of the paired t test, not adjusted.
        detectable: smallest true difference found with 80 % probability at 5 %, if the spread is what was observed; by
            a comparison of several arms, at 5 % over their number, which is what Holm's adjustment asks of the first.
        bootstrap: from ten pairs on.
        exact: every difference is exactly 0.
        constant: the differences are equal and not 0, so that their spread says nothing.
    """

    n: int
    mean: float
    sd: float | None = None
    se: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None
    bootstrap: Bootstrap | None = None
    exact: bool = False
    constant: bool = False


def paired_difference(differences: Sequence[float], coverage: float | None = None) -> Difference:
    """Describe paired differences.

    Args:
        differences: one a pair, at least one.
        coverage: of the bootstrap at this number of pairs, from :func:`bootstrap_coverage`; without it no bootstrap
            interval is given.

    Raises:
        ValueError: no difference, or one that is no finite number.
        MissingLibrary: scipy is not installed.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(f"differences: got {differences!r}; accepted: one finite number a pair, at least one")
    n, mean = len(values), float(values.mean())
    if not values.any():
        if n == 1:
            return Difference(n, 0.0, exact=True)
        return Difference(n, 0.0, sd=0.0, se=0.0, low=0.0, high=0.0, exact=True)
    if n == 1:
        return Difference(n, mean)
    if float(np.ptp(values)) <= _ROUNDING * max(1.0, abs(mean)):
        return Difference(n, mean, sd=0.0, se=0.0, constant=True)
    sd = float(values.std(ddof=1))
    (t_low,), (t_high,), (p,) = paired_t(values[None, :])
    resampled = None
    if n >= BOOTSTRAP_FROM and coverage is not None:
        low, high = _bca(values[None, :], 10 * RESAMPLES + 9)
        resampled = Bootstrap(float(low[0]), float(high[0]), coverage, SIMULATIONS)
    detectable = smallest_detectable(sd, n)
    return Difference(n, mean, sd, sd / float(np.sqrt(n)), float(t_low), float(t_high), float(p), detectable, resampled)


def paired_t(samples: Floats) -> tuple[Floats, Floats, Floats]:
    """Student's interval and two-sided p-value for the mean of paired differences.

    Args:
        samples: (S, n) differences, n at least two and not all equal.

    Returns:
        (S,) lower ends, upper ends, p-values.
    """
    stats = library("scipy.stats")
    n = samples.shape[1]
    mean, se = samples.mean(axis=1), samples.std(axis=1, ddof=1) / np.sqrt(n)
    half = stats.t.ppf((1 + LEVEL) / 2, n - 1) * se
    return mean - half, mean + half, 2 * stats.t.sf(np.abs(mean) / se, n - 1)


def smallest_detectable(sd: float, n: int, power: float = POWER, alpha: float = ALPHA) -> float:
    """The smallest true mean difference that a paired t test finds with the given probability.

    Args:
        sd: standard deviation of the differences.
        n: number of pairs, at least two.
    """
    stats, optimize = library("scipy.stats"), library("scipy.optimize")
    df = n - 1
    critical = float(stats.t.ppf(1 - alpha / 2, df))
    # Over the distribution of the estimated spread; scipy's noncentral t gives NaN in its far tail.
    spread = np.sqrt(stats.chi2.ppf((np.arange(_POINTS) + 0.5) / _POINTS, df) / df)

    def short_of(shift: float) -> float:
        cdf = stats.norm.cdf
        return float((cdf(shift - critical * spread) + cdf(-shift - critical * spread)).mean()) - power

    upper = 4.0
    while short_of(upper) < 0:
        upper *= 2
    return float(optimize.brentq(short_of, 0.0, upper)) * sd / float(np.sqrt(n))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that all of them together err with the probability of one (Holm 1979)."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p)))))
    return [float(value) for value in adjusted]


def bootstrap_coverage(n: int, simulations: int = SIMULATIONS) -> float:
    """How often the bootstrap interval of ``n`` normal numbers covers their true mean; the same at every call."""
    covered = 0
    generator = np.random.default_rng(_SEED)
    rows = max(1, _CHUNK // (n * RESAMPLES))
    for start in range(0, simulations, rows):
        samples = generator.standard_normal((min(rows, simulations - start), n))
        low, high = _bca(samples, RESAMPLES)
        covered += int(((low <= 0) & (high >= 0)).sum())
    return covered / simulations


def _bca(samples: Floats, resamples: int) -> tuple[Floats, Floats]:
    """BCa intervals of the means of samples (S, n): (S,) lower and upper ends."""
    found = library("scipy.stats").bootstrap(
        (samples,),
        np.mean,
        n_resamples=resamples,
        axis=-1,
        confidence_level=LEVEL,
        method="BCa",
        vectorized=True,
        rng=np.random.default_rng(_SEED),
    )
    return found.confidence_interval.low, found.confidence_interval.high
