"""Numeric parameters that change with the training step."""

from __future__ import annotations

import pytest

import dataflex_hooks as dh
from dataflex_hooks import Reweighter, Scorer, StepContext, register_reweighter
from dataflex_hooks.plugins.select import SelectPlugin
from dataflex_hooks.schedules import is_schedule, read_schedule


def at(given, *steps):
    schedule = read_schedule(given)
    return [schedule.at(step) for step in steps]


def test_a_schedule_is_linear_between_knots_and_constant_outside():
    assert at({0: 1.0, 100: 0.5, 200: 0.5}, 0, 50, 100, 150, 1000) == [1.0, 0.75, 0.5, 0.5, 0.5]
    assert at({10: 2, 20: 4}, 0, 10, 15, 20, 30) == [2, 2, 3, 4, 4]


def test_other_shapes():
    knots = {0: 1.0, 100: 0.0}
    assert at({"shape": "step", "at": knots}, 0, 99, 100) == [1.0, 1.0, 0.0]
    assert at({"shape": "cosine", "at": knots}, 0, 25, 50, 100) == pytest.approx([1.0, 0.85355339, 0.5, 0.0])
    assert at({"at": knots}, 50) == [0.5]


def test_steps_may_come_as_text():
    assert at({"0": 1.0, "100": 0.5}, 50) == [0.75]


@pytest.mark.parametrize("given", [{"math": 0.5}, {}, 0.5, None, [1], {0: {"math": 1.0}}, {0: [0.5, 0.5]}])
def test_other_values_are_no_schedules(given):
    assert not is_schedule(given)


@pytest.fixture
def wrong(problems):
    def collect(params, actuator="topk_fraction"):
        scorer = "reward_difficulty"
        pair = {"plugin": "select", "scorer": scorer, "actuator": {"name": actuator, "params": params}}
        return problems({"plugins": {"own": pair}}, rollout_n=8)

    return collect


PATH = "dataflex.plugins.own.actuator.params"


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({100: 1.0, 0: 0.5}, "fraction: got step 0 after step 100; accepted: a mapping of training steps to numbers"),
        ({0: 1.0, "0": 0.5}, "fraction: got step 0 after step 0"),
        ({-1: 1.0, 10: 0.5}, "fraction: got step -1"),
        ({0: 1.0, "end": 0.5}, "fraction: got step 'end'"),
        ({0: 1.0, 10: "half"}, "fraction: got 'half' at step 10"),
        ({0: 1.0, 10: True}, "fraction: got True at step 10"),
        ({"at": {}}, "fraction.at: got {}"),
        ({"at": {0: 1.0}, "shape": "cosin"}, "fraction.shape: got 'cosin'; accepted: one of cosine, linear, step; did"),
        (
            {"at": {0: 1.0}, "shap": "step"},
            "fraction.shap: got 'step'; accepted: one of at, shape; did you mean 'shape'",
        ),
        ({0: 1.0, 100: 0.0}, "fraction: got 0.0 at step 100; accepted: a finite number > 0 and <= 1"),
    ],
)
def test_a_wrong_schedule_is_named_at_start(wrong, given, start):
    (text,) = wrong({"fraction": given})
    assert text.startswith(f"{PATH}.{start}")


def test_a_parameter_that_is_no_number_has_no_schedule(wrong):
    (text,) = wrong({"largest": {0: True, 10: False}, "fraction": 0.5})[:1]
    assert f"{PATH}.largest: got True at step 0" in text
    found = wrong({"metric": {0: 1, 10: 2}, "k": 2}, actuator="gfpo")
    assert found[0].startswith(f"{PATH}.metric: got 1 at step 0; accepted: one of efficiency, short")


def test_a_rule_between_two_parameters_is_checked_at_every_knot(wrong):
    (text,) = wrong({"low": {0: 0.1, 50: 0.9}, "high": 0.8}, actuator="threshold_band")
    assert text.startswith(f"{PATH}.low: got 0.9 at step 50; accepted: a number below high, which is 0.8")


def test_a_number_that_is_not_kept_under_its_name_has_no_schedule(registry, problems):
    @register_reweighter("hidden")
    class Hidden(Reweighter):
        def __init__(self, strength: float = 1.0, **kwargs):
            self._strength = strength

        def act(self, scores, batch, **ctx):
            return scores * self._strength

    actuator = {"name": "hidden", "params": {"strength": {0: 1.0, 10: 2.0}}}
    (text,) = problems({"plugins": {"own": {"plugin": "reweight", "scorer": "token_prob", "actuator": actuator}}})
    assert text == (
        f"{PATH}.strength: got {{0: 1.0, 10: 2.0}}; accepted: a constant; only a number that Hidden keeps under the "
        "name 'strength' can change with the step"
    )


def test_the_value_of_the_step_is_used(batches):
    plugin = SelectPlugin("reward_difficulty", {"name": "topk_fraction", "params": {"fraction": {0: 1.0, 100: 0.5}}})
    batch = batches.groups([0, 1, 2, 3])
    kept = {step: int(plugin.post_advantage(batch, StepContext(step=step)).mask.sum()) for step in (0, 50, 100, 300)}
    assert kept == {0: 4, 50: 3, 100: 2, 300: 2}
    # Nothing is carried along: an earlier step, after resuming, gets its own value.
    assert int(plugin.post_advantage(batch, StepContext(step=0)).mask.sum()) == 4


def test_scorers_have_schedules_too(batches):
    scorer = {"name": "group_solve_rate", "params": {"success_threshold": {0: 0.0, 10: 2.0}}}
    plugin = SelectPlugin(scorer, {"name": "threshold_band", "params": {"low": 0.0, "high": 2.0}})
    batch = batches.groups([1, 1])
    assert plugin.post_advantage(batch, StepContext(step=0)).mask.all()
    assert not plugin.post_advantage(batch, StepContext(step=10)).mask.any()


def test_whole_numbers_stay_whole(batches):
    plugin = SelectPlugin("reward_difficulty", {"name": "gfpo", "params": {"k": {0: 4, 10: 1}}})
    batch = batches.groups([0] * 5)
    kept = [int(plugin.post_advantage(batch, StepContext(step=step)).mask.sum()) for step in (0, 1, 5, 9, 10)]
    assert kept == [4, 4, 3, 1, 1]
    assert isinstance(plugin.actuator.k, int)


def test_floats_given_as_whole_numbers_move_smoothly():
    block = {"name": "softmax", "params": {"temperature": {0: 1, 10: 2}}}
    manager = dh.HookManager.from_config(
        {"plugins": {"own": {"plugin": "reweight", "scorer": "reward_difficulty", "actuator": block}}},
        estimator="grpo",
        has_groups=True,
    )
    assert manager.plan()[0]["actuator"] == "softmax"
    schedule = read_schedule({0: 1, 10: 2})
    assert schedule.at(5) == 1.5


def test_a_component_with_a_parameter_that_is_a_mapping_gets_it(registry):
    from dataflex_hooks import register_scorer
    from dataflex_hooks.construct import build_component

    @register_scorer("by_domain")
    class ByDomain(Scorer):
        def __init__(self, bonus=None, **kwargs):
            self.bonus = bonus

        def score(self, batch, step_id, **ctx):
            return batch.rewards

    component = build_component("scorer", {"name": "by_domain", "params": {"bonus": {"math": 2.0}}}, {})
    assert component.bonus == {"math": 2.0} and not component.schedules
