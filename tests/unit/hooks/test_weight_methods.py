"""Reweighters against numbers worked out by hand from their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dataflex_hooks import ConfigError
from dataflex_hooks.reweighters.curve import Curve
from dataflex_hooks.reweighters.difficulty_band import DifficultyBand
from dataflex_hooks.reweighters.difficulty_length import DifficultyLength
from dataflex_hooks.reweighters.high_entropy import HighEntropy
from dataflex_hooks.reweighters.pf_ppo import PfPpo
from dataflex_hooks.scorers.group_solve_rate import GroupSolveRate
from dataflex_hooks.scorers.reward_difficulty import RewardDifficulty
from dataflex_hooks.scorers.token_entropy import TokenEntropy


def rates(batch):
    return GroupSolveRate().score(batch, 0)


def test_difficulty_band_favours_the_middle_half_of_the_groups(batches):
    # Pass rates 0, 0.25, 0.5, 0.75, 1: quartiles 0.25 and 0.75, both inside.
    batch = batches.groups([0] * 4, [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1] * 4)
    band = DifficultyBand(scorer=GroupSolveRate())
    assert band.act(rates(batch), batch).tolist() == [1.0] * 4 + [2.0] * 12 + [1.0] * 4
    narrow = DifficultyBand(low_q=0.5, high_q=0.5, focus_weight=3.0, scorer=GroupSolveRate())
    assert narrow.act(rates(batch), batch).tolist() == [1.0] * 8 + [3.0] * 4 + [1.0] * 8


def test_difficulty_band_takes_quantiles_over_what_is_scored(batches):
    # Over groups 0.5 lies in the middle; over responses five of seven are 0.5.
    batch = batches.groups([0.1], [0.5] * 5, [0.9])
    scores = batch.rewards
    over_groups = DifficultyBand(low_q=0.6, high_q=1.0, scorer=GroupSolveRate()).act(scores, batch)
    over_responses = DifficultyBand(low_q=0.6, high_q=1.0, scorer=RewardDifficulty()).act(scores, batch)
    assert over_groups.tolist() == [1.0] * 6 + [2.0]
    assert over_responses.tolist() == [1.0] + [2.0] * 6


def test_difficulty_band_on_binary_rewards_favours_an_extreme(batches):
    batch = batches.groups([0] * 7 + [1])
    assert DifficultyBand(scorer=RewardDifficulty()).act(batch.rewards, batch).tolist() == [2.0] * 7 + [1.0]


def test_difficulty_band_with_ends_the_wrong_way_round_is_refused():
    with pytest.raises(ConfigError, match="low_q: got 0.8; accepted: a number up to high_q, which is 0.2"):
        DifficultyBand(low_q=0.8, high_q=0.2)


def test_high_entropy_keeps_the_top_share_of_all_valid_tokens(batches):
    rows = [batches.Row("a", 0, length=6), batches.Row("a", 1, length=5, mask=(1, 1, 1, 1, 0))]
    entropy = torch.tensor([0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.05, 0.7, 99.0])
    batch = batches.build(rows, entropy=entropy)
    scores = TokenEntropy().score(batch, 0)
    # Ten valid tokens: the 0.8 quantile lies between 0.7 and 0.8.
    assert HighEntropy().act(scores, batch)[:10].nonzero().flatten().tolist() == [1, 7]
    assert HighEntropy(rho=0.5).act(scores, batch)[:10].nonzero().flatten().tolist() == [1, 5, 6, 7, 9]
    assert HighEntropy(rho=1.0).act(scores, batch)[:10].tolist() == [1.0] * 10
    assert HighEntropy().normalize == "none"


def test_high_entropy_keeps_all_of_a_tie(batches):
    batch = batches.build([batches.Row("a", length=4)])
    assert HighEntropy().act(torch.tensor([1.0, 2.0, 2.0, 2.0]), batch).tolist() == [0.0, 1.0, 1.0, 1.0]


def test_pf_ppo_pow_is_a_power_of_the_magnitude(batches):
    batch = batches.groups([-3.0, 0.0, 2.0])
    assert PfPpo().act(batch.rewards, batch).tolist() == pytest.approx([9.0, 1e-8, 4.0])
    assert PfPpo(k=1.0).act(batch.rewards, batch).tolist() == pytest.approx([3.0, 1e-8, 2.0])


def test_pf_ppo_extremes_of_the_batch_and_of_each_group(batches):
    batch = batches.groups([1.0, 2.0, 3.0], [2.0, 5.0, 4.0])
    scores = batch.rewards
    over_batch = PfPpo(method="max_min").act(scores, batch)
    assert over_batch.tolist() == pytest.approx([1, 0, 0, 0, 1, 0], abs=1e-7)
    over_group = PfPpo(method="max_min", over="group").act(scores, batch)
    assert over_group.tolist() == pytest.approx([1, 0, 1, 1, 1, 0], abs=1e-7)
    random = PfPpo(method="max_random", over="group").act(scores, batch)
    assert random.tolist() == pytest.approx([0.1, 0.1, 0.4, 0.1, 0.4, 0.1])


def test_difficulty_length_favours_hard_prompts_and_short_responses(batches):
    rows = [batches.Row("a", 0, length=1, reward=1), batches.Row("a", 1, length=4), batches.Row("b", 0, length=2)]
    batch = batches.build(rows)
    # d = 0.5, 0.5 and 1: 1.25 * 1.25, 1.25 * 0.5, 2 * 1.
    assert DifficultyLength(max_length=4).act(rates(batch), batch).tolist() == [1.5625, 0.625, 2.0]
    assert DifficultyLength(response_length=8).act(rates(batch), batch).tolist() == [1.71875, 1.25, 2.5]
    assert DifficultyLength().act(rates(batch), batch).tolist() == [1.5625, 0.625, 2.0]
    # Scores that grow with the difficulty, clipped to [0, 1].
    own = DifficultyLength(invert=False, max_length=2).act(torch.tensor([2.0, -1.0, 1.0]), batch)
    assert own.tolist() == [2.0, 0.25, 1.0]


def test_curve_first_compares_a_step_with_itself(batches):
    # Two prompts in bins 1 and 3 of 5: masses 0.5 and 0.5, cumulated 0.5 and 1.
    batch = batches.groups([1, 0, 0, 0], [1, 1, 1, 0], [1] * 4, [0] * 4)
    curve = Curve(rollouts=4)
    assert curve.act(rates(batch), batch, step_id=1).tolist() == [1.0] * 4 + [0.5] * 4 + [0.0] * 8
    assert curve.normalize == "none"


def test_curve_then_compares_with_the_steps_before(batches):
    half, quarter = batches.groups([1, 1, 0, 0]), batches.groups([1, 0, 0, 0])
    curve = Curve(rollouts=4)
    assert curve.act(rates(half), half, step_id=1).tolist() == [1.0] * 4
    # Nothing below 0.5 was known.
    assert curve.act(rates(quarter), quarter, step_id=2).tolist() == [0.0] * 4
    # Now one prompt at 0.25 and one at 0.5.
    assert curve.act(rates(half), half, step_id=3).tolist() == [0.5] * 4


def test_curve_forgets_steps_beyond_its_history(batches):
    half, quarter = batches.groups([1, 1, 0, 0]), batches.groups([1, 0, 0, 0])
    curve = Curve(history=1, rollouts=4)
    for step, batch in enumerate((quarter, half), start=1):
        curve.act(rates(batch), batch, step_id=step)
    assert curve.act(rates(half), half, step_id=3).tolist() == [1.0] * 4
    without = Curve(history=0, rollouts=4)
    for step, batch in enumerate((half, quarter), start=1):
        assert without.act(rates(batch), batch, step_id=step).tolist() == [1.0] * 4


def test_curve_goes_on_from_its_saved_state(batches):
    half, quarter = batches.groups([1, 1, 0, 0]), batches.groups([1, 0, 0, 0])
    curve, other = Curve(rollouts=4), Curve(rollouts=4)
    for step, batch in enumerate((half, quarter, quarter), start=1):
        curve.act(rates(batch), batch, step_id=step)
    other.load_state_dict(curve.state_dict())
    assert other.act(rates(half), half, step_id=4).tolist() == curve.act(rates(half), half, step_id=4).tolist()
    assert np.array_equal(other.state_dict()["counts"], curve.state_dict()["counts"])
    with pytest.raises(ValueError, match="saved histograms have 5 bins, this run has 9: set bins"):
        Curve(rollouts=8).load_state_dict(curve.state_dict())


@pytest.mark.parametrize("solved", range(1, 8))
def test_curve_gives_every_pass_rate_a_bin_of_its_own(batches, solved):
    batch = batches.groups([1] * solved + [0] * (8 - solved))
    curve = Curve(rollouts=8)
    curve.act(rates(batch), batch, step_id=1)
    assert curve.state_dict()["counts"].tolist() == [[int(i == solved) for i in range(9)]]


def test_token_entropy_is_what_the_trainer_stored(batches):
    batch = batches.build([batches.Row("a", length=2)], entropy=torch.tensor([0.5, math.log(4)]))
    assert TokenEntropy().score(batch, 0).tolist() == pytest.approx([0.5, math.log(4)])
