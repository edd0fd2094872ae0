"""On above the one threshold, off below the other; one decision a step; a metric that is not there is an error."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from dataflex_kl_guard import Hysteresis, KLGuard

from dataflex_hooks import ConfigError, HookManager
from dataflex_hooks.testing import HookRunner, assert_plugin_contract, make_context, make_groups

KL = "actor/ppo_kl"
TRACE = [0.02, 0.08, 0.11, 0.08, 0.06, 0.04, 0.08, 0.2]
ENGAGED = [0, 0, 1, 1, 1, 0, 0, 1]


def decisions(guard, values, first=2, name=KL):
    """What the guard decides at each step, when these are the metrics of the steps before; None: none was measured."""
    seen = [{"actor/grad_norm": 1.0} if value is None else {name: value} for value in values]
    return [guard.post_advantage(make_context(first + step, metrics=last)) for step, last in enumerate(seen)]


def test_it_goes_on_above_high_and_off_below_low():
    made = decisions(KLGuard(), TRACE)
    assert [decision.metrics["engaged"] for decision in made] == ENGAGED
    assert [decision.update_scale for decision in made] == [0.1 if on else None for on in ENGAGED]
    assert not any(decision.skip_update for decision in made)


def test_one_threshold_would_switch_at_every_step():
    trace = [0.11, 0.09] * 3
    assert [Hysteresis(0.1, 0.1).see(value) for value in trace[:2]] == [True, False]
    guard = Hysteresis(0.1, 0.05)
    assert [guard.see(value) for value in trace] == [True] * 6


def test_the_first_step_and_nan():
    guard = KLGuard()
    assert guard.post_advantage(make_context(1)).update_scale is None
    (decision,) = decisions(guard, [math.nan])
    assert decision.update_scale == 0.1 and decision.metrics == {"engaged": 1.0}


def test_off_it_changes_no_bit_and_on_it_scales_the_weights():
    runner = HookRunner(KLGuard(scale=0.25))
    batch = make_groups([1, 0], [0, 1])
    off = runner.step(batch, ctx=make_context(2, metrics={KL: 0.01}))
    on = runner.step(batch, ctx=make_context(3, metrics={KL: 0.5}))
    assert torch.equal(off.weights, torch.ones_like(off.weights)) and off.update_scale == 1.0
    assert torch.equal(on.weights, torch.full_like(on.weights, 0.25))


def test_skipping_makes_an_update_now_and_then_since_only_updates_are_measured():
    guard = KLGuard(action="skip", longest_skip=2)
    skipped, last = [], {KL: 0.5}
    for step in range(2, 10):
        decision = guard.post_advantage(make_context(step, metrics=last))
        skipped.append(decision.skip_update)
        last = {"dataflex/skip_update": 1.0} if decision.skip_update else {KL: 0.5, "dataflex/skip_update": 0.0}
    assert skipped == [True, True, False, True, True, False, True, True]
    assert not guard.post_advantage(make_context(10, metrics={KL: 0.01})).skip_update


def test_all_updates_of_a_step_are_decided_alike():
    guard = KLGuard(action="skip")
    ctx = make_context(2, metrics={KL: 0.5})
    assert [guard.post_advantage(ctx).skip_update for _ in range(3)] == [True] * 3
    assert not guard.post_advantage(make_context(3, metrics={"dataflex/skip_update": 1.0})).skip_update


@pytest.mark.parametrize("action", ["scale", "skip"])
@pytest.mark.parametrize("at", range(1, len(TRACE)))
def test_a_resumed_run_decides_as_one_that_went_on(action, at):
    one = KLGuard(action=action)
    expected = decisions(one, TRACE)
    before = KLGuard(action=action)
    decisions(before, TRACE[:at])
    after = KLGuard(action=action)
    HookManager({"g": after}).load_state_dict(HookManager({"g": before}).state_dict(at), at)
    assert decisions(after, TRACE[at:], first=2 + at) == expected[at:]


def test_without_the_state_a_resumed_run_would_decide_otherwise():
    assert decisions(KLGuard(), TRACE[3:]) != decisions(KLGuard(), TRACE)[3:]


def test_a_metric_that_is_never_there_is_named_with_those_that_are(caplog):
    guard = KLGuard(metric="actor/kl_los")
    last = {"actor/kl_loss": 0.1, "rollout_corr/kl": 0.2, "actor/grad_norm": 1.0, "actor/pkl_x": 0.0}
    with caplog.at_level(logging.WARNING):
        for step in (2, 3):
            assert guard.post_advantage(make_context(step, metrics=last)).update_scale is None
    (record,) = caplog.records
    there = "with kl in their name there are: actor/kl_loss, rollout_corr/kl"
    assert record.getMessage() == f"metric 'actor/kl_los' is not among those of the last step; {there}"
    with pytest.raises(LookupError, match=f"{there}. It was in none of 3 steps: set `metric` to one that is there"):
        guard.post_advantage(make_context(4, metrics=last))


def test_a_metric_that_stays_away_later_is_warned_of_and_the_state_stays(caplog):
    guard = KLGuard()
    decisions(guard, [0.5])
    made = decisions(guard, [None] * 5, first=3)
    assert [decision.update_scale for decision in made] == [0.1] * 5
    assert len(caplog.records) == 1


def test_steps_without_an_update_of_the_policy_are_no_reason_to_stop(caplog):
    guard = KLGuard()
    warming_up = {"actor/entropy": 1.0, "critic/vf_loss": 0.5, "training/global_step": 1.0}
    for step in range(2, 12):
        assert guard.post_advantage(make_context(step, metrics=warming_up)).update_scale is None
    assert not caplog.records
    updated = {**warming_up, "actor/grad_norm": 1.0}
    for step in (12, 13):
        guard.post_advantage(make_context(step, metrics=updated))
    with pytest.raises(LookupError, match="in none of 3 steps"):
        guard.post_advantage(make_context(14, metrics=updated))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"low": 0.2}, r"low: got 0\.2; accepted: a number that is at most high=0\.1"),
        ({"high": "much"}, "high: got 'much'; accepted: a finite number"),
        ({"action": "scael"}, "action: got 'scael'; accepted: one of scale, skip; did you mean 'scale'"),
        ({"scale": 2}, "scale: got 2; accepted: a finite number >= 0 and <= 1"),
        ({"longest_skip": 0}, "longest_skip: got 0; accepted: an integer >= 1"),
        ({"metric": ""}, "metric: got ''; accepted: the name of one of verl's metrics"),
    ],
)
def test_every_wrong_setting_is_named_in_full(settings, expected):
    block = {"plugins": {"g": {"plugin": "kl_guard", **settings}}}
    with pytest.raises(ConfigError, match=rf"dataflex\.plugins\.g\.{expected}"):
        HookManager.from_config(block, estimator="grpo", has_groups=True)


def test_it_keeps_the_contract():
    assert_plugin_contract(KLGuard)
    assert_plugin_contract(lambda: KLGuard(action="skip"))
