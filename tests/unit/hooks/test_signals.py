"""Scorers look at the raw reward, or at another number that the reward function returned."""

from __future__ import annotations

import numpy as np
import pytest

from dataflex_hooks import ConfigError, FieldError
from dataflex_hooks.plugins.select import SelectPlugin
from dataflex_hooks.scorers.group_solve_rate import GroupSolveRate
from dataflex_hooks.scorers.reward_difficulty import RewardDifficulty
from dataflex_hooks.scorers.vcrl import Vcrl


@pytest.fixture
def batch(batches):
    def make(*values, rewards=(1, 1, 1, 1)):
        infos = [{"turn_scores": [], "reward_extra_info": {"acc": value, "score": 1.0}} for value in values]
        return batches.build(batches.rows([rewards]), columns={"extra_fields": infos})

    return make


def test_a_signal_stands_in_for_the_reward(batch):
    given = batch(0.0, True, np.float32(1), 0)
    assert RewardDifficulty(signal="acc").score(given, 0).tolist() == [0.0, 1.0, 1.0, 0.0]
    assert RewardDifficulty().score(given, 0).tolist() == [1.0] * 4
    assert GroupSolveRate(signal="acc").score(given, 0).tolist() == [0.5] * 4
    assert GroupSolveRate().score(given, 0).tolist() == [1.0] * 4
    assert Vcrl(signal="acc").score(given, 0).tolist() == [1.0] * 4
    assert Vcrl().score(given, 0).tolist() == [0.0] * 4


def test_the_final_output_of_a_session_counts(batches):
    row = batches.Row
    rows = [row("a", 0, 0), row("a", 0, 1), row("a", 1, 0)]
    infos = [{"reward_extra_info": {"acc": value}} for value in (5.0, 1.0, 0.0)]
    given = batches.build(rows, columns={"extra_fields": infos})
    assert RewardDifficulty(signal="acc").score(given, 0).tolist() == [1.0, 1.0, 0.0]


def test_only_the_fields_of_the_signal_are_asked_for():
    assert RewardDifficulty().requires == ("rm_scores",)
    assert RewardDifficulty(signal="acc").requires == ("extra_fields",)
    plugin = SelectPlugin({"name": "group_solve_rate", "params": {"signal": "acc"}}, "threshold_band")
    assert plugin.requires["post_advantage"] == ("extra_fields", "response_mask")


def test_a_missing_key_names_those_that_are_there(batch):
    with pytest.raises(
        FieldError, match="no signal 'format' in the reward_extra_info of 4 of 4 rollouts; there is: acc"
    ):
        RewardDifficulty(signal="format").score(batch(0, 1, 1, 0), 0)


def test_a_key_that_some_rollouts_lack_is_missing(batches):
    infos = [{"reward_extra_info": {"acc": 1.0}}, {"reward_extra_info": {}}, {}, None]
    given = batches.build(batches.rows([[0] * 4]), columns={"extra_fields": infos})
    with pytest.raises(FieldError, match="of 3 of 4 rollouts; there is: acc"):
        RewardDifficulty(signal="acc").score(given, 0)


def test_a_reward_function_without_keys_is_named(batches):
    given = batches.build(batches.rows([[0] * 2]), columns={"extra_fields": [{}, {}]})
    with pytest.raises(FieldError, match="the reward function returned nothing beside the reward"):
        RewardDifficulty(signal="acc").score(given, 0)


@pytest.mark.parametrize("value", ["yes", None, [1.0]])
def test_a_signal_that_is_no_number_is_refused(batch, value):
    with pytest.raises(TypeError, match="signal 'acc' has to be a number in every rollout, got"):
        RewardDifficulty(signal="acc").score(batch(1.0, value, 1.0, value), 0)


@pytest.mark.parametrize("signal", ["", 3, None])
def test_a_signal_has_to_be_a_name(signal):
    with pytest.raises(ConfigError, match="signal: got .*accepted: 'reward', or a key"):
        RewardDifficulty(signal=signal)
