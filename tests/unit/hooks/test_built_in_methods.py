"""Each scorer and actuator against numbers worked out by hand from its formula."""

from __future__ import annotations

import math

import pytest
import torch

from dataflex_hooks.reweighters.advantage_reweight import AdvantageReweight
from dataflex_hooks.reweighters.per_advantage import PerAdvantage
from dataflex_hooks.reweighters.softmax import Softmax
from dataflex_hooks.scorers.advantage_magnitude import AdvantageMagnitude
from dataflex_hooks.scorers.group_solve_rate import GroupSolveRate
from dataflex_hooks.scorers.reward_difficulty import RewardDifficulty
from dataflex_hooks.scorers.token_prob import TokenProb
from dataflex_hooks.selectors.threshold_band import ThresholdBand
from dataflex_hooks.selectors.topk_fraction import TopkFraction


def test_group_solve_rate_is_the_share_of_solved_sessions(batches):
    batch = batches.groups([1, 0, 0, 1], [0.5, 0.6, 0.5, 0.5])
    assert GroupSolveRate().score(batch, 0).tolist() == [0.5] * 4 + [0.25] * 4
    assert GroupSolveRate(success_threshold=0.4).score(batch, 0).tolist() == [0.5] * 4 + [1.0] * 4


def test_group_solve_rate_counts_a_session_once_by_its_final_output(batches):
    row = batches.Row
    batch = batches.build(
        [row("a", 0, 0, reward=1), row("a", 0, 1, reward=1), row("a", 0, 2), row("a", 1, 0, reward=1)]
    )
    assert GroupSolveRate().score(batch, 0).tolist() == [0.5] * 4


@pytest.mark.parametrize(("agg", "expected"), [("mean", [2.0, 1.5]), ("sum", [4.0, 3.0]), ("max", [3.0, 2.0])])
def test_advantage_magnitude_aggregates_absolute_values_of_valid_tokens(batches, agg, expected):
    rows = [
        batches.Row("a", 0, length=3, advantage=(1.0, -50.0, -3.0), mask=(1, 0, 1)),
        batches.Row("a", 1, length=2, advantage=(-1.0, -2.0)),
    ]
    assert AdvantageMagnitude(agg=agg).score(batches.build(rows), 0).tolist() == expected


def test_reward_difficulty_is_the_summed_reward_of_the_final_output(batches):
    rows = [batches.Row("a", 0, 0, reward=-3.0), batches.Row("a", 0, 1, reward=0.5), batches.Row("a", 1, 0, reward=2.0)]
    assert RewardDifficulty().score(batches.build(rows), 0).tolist() == [0.5, 0.5, 2.0]


def test_token_prob_is_exp_of_the_old_log_prob(batches):
    batch = batches.build([batches.Row("a", length=3, log_prob=(0.0, math.log(0.5), math.log(0.125)))])
    assert TokenProb().score(batch, 0).tolist() == pytest.approx([1.0, 0.5, 0.125])


def test_threshold_band_bounds_are_strict(batches):
    batch = batches.groups([0, 0, 0, 0, 0])
    scores = torch.tensor([1, 2, 3, 4, 5]) / 5
    assert ThresholdBand(low=0.2, high=0.8).act(scores, batch).tolist() == [1, 2]
    assert ThresholdBand().act(scores, batch).tolist() == [0, 1, 2, 3]
    assert ThresholdBand(low=-math.inf, high=0.4).act(scores, batch).tolist() == [0]


@pytest.mark.parametrize(
    ("fraction", "n", "k"),
    [(0.5, 4, 2), (0.5, 5, 3), (0.3, 5, 2), (0.1, 4, 1), (0.25, 2, 1), (1.0, 3, 3), (0.01, 3, 1)],
)
def test_topk_fraction_rounds_half_up_and_keeps_at_least_one(batches, fraction, n, k):
    batch = batches.groups([0] * n)
    kept = TopkFraction(fraction=fraction).act(torch.arange(float(n)), batch)
    assert kept.tolist() == list(range(n - k, n))


def test_topk_fraction_can_keep_the_lowest(batches):
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert TopkFraction(largest=False).act(scores, batches.groups([0] * 4)).tolist() == [0, 2]


def test_topk_fraction_counts_sessions_and_keeps_all_their_rows(batches):
    row = batches.Row
    batch = batches.build([row("a", 0, 0), row("a", 1, 0), row("a", 0, 1), row("a", 0, 2)])
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert TopkFraction(fraction=0.5).act(scores, batch).tolist() == [0, 2, 3]


def test_topk_fraction_breaks_ties_by_content(batches):
    rows = batches.rows([[0, 0, 0], [0, 0, 0]])
    kept = TopkFraction(fraction=0.5).act(torch.zeros(6), batches.build(rows)).tolist()
    permutation = [3, 5, 0, 2, 4, 1]
    shuffled = TopkFraction(fraction=0.5).act(torch.zeros(6), batches.build([rows[i] for i in permutation])).tolist()
    assert sorted(permutation[i] for i in shuffled) == kept


def test_softmax_weights_are_proportional_to_exp_of_the_score(batches):
    batch = batches.groups([0, 0, 0])
    weights = Softmax(temperature=2.0).act(torch.tensor([0.0, 2.0, 4.0]), batch)
    assert (weights / weights[0]).tolist() == pytest.approx([1.0, math.e, math.e**2])


def test_softmax_of_large_scores_stays_finite(batches):
    weights = Softmax(temperature=0.01).act(torch.tensor([1e30, -1e30, 1e30]), batches.groups([0, 0, 0]))
    assert weights.tolist() == [1.0, 0.0, 1.0]


def test_per_advantage_is_a_power_of_the_shifted_magnitude(batches):
    batch = batches.groups([0, 0, 0])
    weights = PerAdvantage(alpha=0.5, epsilon=1.0).act(torch.tensor([-3.0, 0.0, 8.0]), batch)
    assert weights.tolist() == pytest.approx([2.0, 1.0, 3.0])
    default = PerAdvantage().act(torch.tensor([0.0, 4.0, 1.0]), batch)
    assert default.tolist() == pytest.approx([1e-3, 2.0, 1.0], rel=1e-6)


def test_advantage_reweight_is_linear_in_the_probability(batches):
    batch = batches.groups([0, 0])
    scores = torch.tensor([1.0, 0.5, 0.25, 0.0])
    assert AdvantageReweight(alpha=0.2).act(scores, batch).tolist() == pytest.approx([1.0, 0.9, 0.85, 0.8])
    assert AdvantageReweight().act(scores, batch).tolist() == pytest.approx([1.0, 0.75, 0.625, 0.5])
