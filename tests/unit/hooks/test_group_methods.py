"""Selectors and scorers that compare the rollouts of a prompt, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from dataflex_hooks import ConfigError
from dataflex_hooks.scorers.failed import Failed
from dataflex_hooks.scorers.truncated import Truncated
from dataflex_hooks.scorers.vcrl import Vcrl
from dataflex_hooks.selectors.dapo import Dapo
from dataflex_hooks.selectors.gfpo import Gfpo
from dataflex_hooks.selectors.max_variance import MaxVariance


def kept(selector, batch, scores=None):
    return selector.act(batch.rewards if scores is None else torch.tensor(scores), batch).tolist()


# ------------------------------------------------------------------------------------------------------ max_variance


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # Of 1, 2, 3, 10 with m = 2: {1, 10} has variance 20.25, {3, 10} 12.25, {1, 2} 0.25.
        ([1, 2, 3, 10], [0, 3]),
        # m = 2: one solved, one not.
        ([0, 1, 1, 1], [0, 1]),
        # Of 5 with m = 3 (2.5 rounded up): {0, 0, 9} has variance 18, {0, 8, 9} 16.2, {7, 8, 9} 0.67.
        ([0, 0, 7, 8, 9], [0, 1, 4]),
        ([0, 9], [1]),
        ([4], [0]),
    ],
)
def test_max_variance_keeps_the_extremes(batches, rewards, expected):
    rows = [batches.Row("a", i, reward=r, tokens=(i, 9)) for i, r in enumerate(rewards)]
    found = kept(MaxVariance(), batches.build(rows))
    if rewards == [0, 1, 1, 1]:
        assert found[0] == 0 and len(found) == 2
    else:
        assert found == expected


def test_max_variance_looks_at_each_group_alone(batches):
    batch = batches.groups([0, 1, 2, 3], [100, 100, 100, 300])
    first, second = kept(MaxVariance(), batch)[:2], kept(MaxVariance(), batch)[2:]
    assert first == [0, 3] and len(second) == 2 and 7 in second


@pytest.mark.parametrize(("fraction", "size", "m"), [(0.25, 8, 2), (0.1, 8, 1), (1.0, 5, 5), (0.5, 5, 3), (0.01, 1, 1)])
def test_max_variance_rounds_half_up_and_keeps_at_least_one(batches, fraction, size, m):
    assert len(kept(MaxVariance(keep_fraction=fraction), batches.groups([float(i) for i in range(size)]))) == m


def test_max_variance_of_equal_rewards_keeps_its_share_by_content(batches):
    rows = batches.rows([[1, 1, 1, 1]])
    found = {rows[i].session for i in kept(MaxVariance(), batches.build(rows))}
    backwards = {rows[::-1][i].session for i in kept(MaxVariance(), batches.build(rows[::-1]))}
    assert found == backwards and len(found) == 2


def test_max_variance_keeps_all_rows_of_a_session(batches):
    row = batches.Row
    rows = [row("a", 0, 0), row("a", 1, 0, reward=1), row("a", 2, 0, reward=0.5), row("a", 0, 1), row("a", 2, 1)]
    batch = batches.build(rows)
    assert kept(MaxVariance(keep_fraction=0.66), batch, [0.0, 1.0, 0.5, 0.0, 0.5]) == [0, 1, 3]


# ------------------------------------------------------------------------------------------------------ gfpo


def test_gfpo_keeps_the_shortest_by_what_the_model_wrote(batches):
    row = batches.Row
    rows = [row("a", 0, length=5, mask=(1, 0, 0, 0, 1)), row("a", 1, length=3), row("a", 2, length=4)]
    assert kept(Gfpo(k=1), batches.build(rows)) == [0]
    assert kept(Gfpo(k=2), batches.build(rows)) == [0, 1]


def test_gfpo_by_efficiency_keeps_the_most_reward_per_token(batches):
    rows = [
        batches.Row("a", i, length=n, reward=r) for i, (n, r) in enumerate([(4, 2.0), (2, 0.5), (5, 3.0), (1, 0.4)])
    ]
    # 0.5, 0.25, 0.6 and 0.4 a token.
    assert kept(Gfpo(k=2, metric="efficiency"), batches.build(rows)) == [0, 2]
    assert kept(Gfpo(k=2, metric="short"), batches.build(rows)) == [1, 3]


def test_gfpo_prefers_by_its_metric(batches):
    rows = [batches.Row("a", i, length=n, reward=r) for i, (n, r) in enumerate([(4, 2.0), (2, 0.5)])]
    batch = batches.build(rows)
    assert Gfpo().preference(batch.rewards, batch).tolist() == [-4.0, -2.0]
    assert Gfpo(metric="efficiency").preference(batch.rewards, batch).tolist() == [0.5, 0.25]


def test_gfpo_adds_up_the_outputs_of_a_session(batches):
    row = batches.Row
    rows = [row("a", 0, 0, length=2), row("a", 0, 1, length=2), row("a", 1, 0, length=3), row("a", 2, 0, length=9)]
    assert kept(Gfpo(k=1), batches.build(rows)) == [2]
    assert kept(Gfpo(k=2), batches.build(rows)) == [0, 1, 2]


def test_gfpo_keeps_all_of_a_group_that_has_no_more_than_k(batches):
    assert kept(Gfpo(k=3), batches.groups([0, 1, 0], [1])) == [0, 1, 2, 3]


@pytest.mark.parametrize("k", [5, 6])
def test_gfpo_that_would_keep_everything_is_refused(k):
    with pytest.raises(ConfigError, match="k: got .*below actor_rollout_ref.rollout.n, which is 5"):
        Gfpo(k=k, rollouts=5)
    assert Gfpo(k=4, rollouts=5).k == 4
    assert Gfpo(k=k).k == k


def test_a_run_whose_gfpo_keeps_everything_does_not_start(problems):
    actuator = {"name": "gfpo", "params": {"k": 8}}
    block = {"plugins": {"short": {"plugin": "select", "scorer": "reward_difficulty", "actuator": actuator}}}
    (text,) = problems(block, rollout_n=8)
    assert text.startswith("dataflex.plugins.short.actuator.params.k: got 8; accepted: an integer below")


@pytest.mark.parametrize("actuator", ["gfpo", "max_variance", "dapo"])
def test_a_selector_within_groups_needs_groups(problems, actuator):
    block = {"plugins": {"own": {"plugin": "select", "scorer": "reward_difficulty", "actuator": actuator}}}
    (text,) = problems(block, rollout_n=1)
    assert f"actuator.name: got '{actuator}'; accepted: a selector that needs no groups" in text


def test_what_the_host_knows_is_no_parameter(problems):
    actuator = {"name": "gfpo", "params": {"k": 2, "rollouts": 99}}
    block = {"plugins": {"short": {"plugin": "select", "scorer": "reward_difficulty", "actuator": actuator}}}
    (text,) = problems(block, rollout_n=8)
    assert "params.rollouts: got 99; accepted: one of k, metric" in text


# ------------------------------------------------------------------------------------------------------ dapo, vcrl


def test_dapo_keeps_groups_with_a_spread(batches):
    batch = batches.groups([1, 1, 1], [0, 1, 0], [0.5, 0.5, 0.5 + 1e-3], [7])
    assert kept(Dapo(), batch) == [3, 4, 5, 6, 7, 8]
    # The third group's deviation is 1e-3 * sqrt(2) / 3 = 4.7e-4.
    assert kept(Dapo(tol=4.6e-4), batch) == [3, 4, 5, 6, 7, 8]
    assert kept(Dapo(tol=4.8e-4), batch) == [3, 4, 5]


def test_dapo_takes_large_equal_rewards_for_equal(batches):
    assert kept(Dapo(tol=0.0), batches.groups([1e7 + 0.1] * 7)) == []


def test_vcrl_is_the_variance_over_the_largest(batches):
    batch = batches.groups([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0], [1])
    # 1 * 3 / 4, 2 * 2 / 4, 0, 1 * 2 / 2, and none for one alone.
    assert Vcrl().score(batch, 0).tolist() == [0.75] * 4 + [1.0] * 4 + [0.0] * 4 + [1.0] * 3 + [0.0]
    assert Vcrl(success_threshold=1.0).score(batch, 0).tolist() == [0.0] * 16


# ---------------------------------------------------------------------------------------- truncated, failed


def test_truncated_marks_every_row_of_a_session_that_reached_the_limit(batches):
    row = batches.Row
    rows = [row("a", 0, 0, length=2), row("a", 0, 1, length=4, mask=(1, 0, 0, 1)), row("a", 1, length=3)]
    assert Truncated(max_length=4).score(batches.build(rows), 0).tolist() == [1.0, 1.0, 0.0]
    assert Truncated(response_length=3).score(batches.build(rows), 0).tolist() == [1.0, 1.0, 1.0]
    assert Truncated(max_length=5, response_length=3).score(batches.build(rows), 0).tolist() == [0.0, 0.0, 0.0]


def test_truncated_without_a_limit_is_refused():
    with pytest.raises(ConfigError, match="max_length: got nothing; accepted: an integer >= 1"):
        Truncated()


def test_failed_marks_sessions_that_wrote_nothing_or_have_no_reward(batches):
    row = batches.Row
    rows = [
        row("a", 0, mask=0),
        row("a", 1, reward=float("nan")),
        row("a", 2),
        row("a", 3, 0, mask=0),
        row("a", 3, 1),
        row("a", 4, reward=-5),
    ]
    assert Failed().score(batches.build(rows), 0).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_failed_believes_the_reward_function(batches):
    infos = [{"reward_extra_info": {"timeout": value}} for value in (True, False, 0, 1)]
    batch = batches.build(batches.rows([[0, 0, 0, 0]]), columns={"extra_fields": infos})
    assert Failed(signal="timeout").score(batch, 0).tolist() == [1.0, 0.0, 0.0, 1.0]
