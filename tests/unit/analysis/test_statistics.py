"""The statistics hold what they say: simulated with known effects, seeds fixed."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dataflex_verl.analysis.statistics import (
    bootstrap_coverage,
    holm,
    paired_difference,
    paired_t,
    smallest_detectable,
)

SIMULATIONS = 4000
EFFECT, NOISE = 0.07, 0.2


@pytest.mark.parametrize("n", [3, 5, 12])
def test_t_interval_covers_the_true_difference_as_often_as_it_says(n: int) -> None:
    low, high, _ = paired_t(np.random.default_rng(n).normal(EFFECT, NOISE, (SIMULATIONS, n)))
    assert abs(((low <= EFFECT) & (high >= EFFECT)).mean() - 0.95) <= 0.015
    # The opposite: it does not cover something else that often.
    other = EFFECT + NOISE
    assert ((low <= other) & (high >= other)).mean() < 0.9


@pytest.mark.parametrize("n", [3, 5, 12])
def test_p_values_are_uniform_without_an_effect_and_small_with_one(n: int) -> None:
    noise = np.random.default_rng(n + 100).normal(0.0, NOISE, (SIMULATIONS, n))
    _, _, p = paired_t(noise)
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert abs((p < 0.05).mean() - 0.05) < 0.012
    _, _, with_effect = paired_t(noise + NOISE)
    assert stats.kstest(with_effect, "uniform").pvalue < 1e-6


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_the_detectable_difference_is_found_four_times_in_five(n: int) -> None:
    detectable = smallest_detectable(NOISE, n)
    for effect, low, high in ((detectable, 0.785, 0.815), (detectable / 2, 0.0, 0.6)):
        samples = np.random.default_rng(n).normal(effect, NOISE, (20_000, n))
        assert low <= (stats.ttest_1samp(samples, 0.0, axis=1).pvalue < 0.05).mean() <= high


def test_t_interval_and_p_value_are_scipys() -> None:
    values = [0.02, -0.01, 0.05, 0.03]
    found, expected = paired_difference(values), stats.ttest_1samp(values, 0.0)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, expected.pvalue))
    many = paired_t(np.array([values, [0.5, 0.6, 0.1, 0.0]]))
    assert (found.low, found.high, found.p) == tuple(part[0] for part in many)
    assert found.mean == pytest.approx(0.0225) and found.se == pytest.approx(np.std(values, ddof=1) / 2)


def test_holm_is_the_worked_example() -> None:
    # Sorted .01, .02, .03, .04: 4*.01, then 3*.02, then max(.06, 2*.03), then max(.06, .04).
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_errs_once_in_twenty_over_all_arms_where_single_tests_err_often() -> None:
    noise = np.random.default_rng(1).normal(0.0, NOISE, (2000, 12, 5))
    p = stats.ttest_1samp(noise, 0.0, axis=-1).pvalue
    adjusted = np.array([holm(row) for row in p])
    assert abs((adjusted.min(axis=1) < 0.05).mean() - 0.05) < 0.015
    assert (p.min(axis=1) < 0.05).mean() > 0.4


def test_one_pair_has_no_interval_and_equal_pairs_no_p_value() -> None:
    one = paired_difference([0.1])
    assert (one.mean, one.low, one.p, one.detectable) == (0.1, None, None, None)
    constant = paired_difference([0.1, 0.1, 0.1])
    assert constant.constant and (constant.low, constant.p) == (None, None)
    exact = paired_difference([0.0, 0.0])
    assert exact.exact and (exact.mean, exact.low, exact.high, exact.p) == (0.0, 0.0, 0.0, None)


@pytest.mark.parametrize("wrong", [[], [float("nan")], [[0.1]]])
def test_what_are_no_differences_is_refused(wrong: list) -> None:
    with pytest.raises(ValueError, match="differences"):
        paired_difference(wrong)


def test_bootstrap_is_shown_from_ten_pairs_on_beside_its_simulated_coverage() -> None:
    values = np.random.default_rng(0).normal(0.1, 0.1, 12)
    coverage = bootstrap_coverage(12)
    found = paired_difference(values, coverage)
    assert found.bootstrap is not None and found.bootstrap.coverage == coverage
    assert found.bootstrap.simulations >= 2000 and 0.88 < coverage < 0.95
    assert found.bootstrap.low < found.mean < found.bootstrap.high
    assert paired_difference(values[:9], coverage).bootstrap is None


def test_bootstrap_is_scipys_and_the_same_every_time() -> None:
    values = np.random.default_rng(3).normal(0.1, 0.1, 12)
    one, again = (paired_difference(values, 0.9).bootstrap for _ in range(2))
    expected = stats.bootstrap((values,), np.mean, n_resamples=9999, method="BCa", rng=np.random.default_rng(8))
    assert one == again
    assert (one.low, one.high) == pytest.approx(expected.confidence_interval, abs=0.004)
