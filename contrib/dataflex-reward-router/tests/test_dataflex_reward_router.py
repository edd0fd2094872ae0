"""Each prompt takes its route; the rest take the default; nothing is asked twice."""

from __future__ import annotations

import logging
import sys
import types

import numpy as np
import pytest
import torch
from dataflex_reward_router import RewardRouter
from dataflex_reward_router.classify import CachedClassifier

from dataflex_hooks import ConfigError, HookManager, RewardDecision, hookimpl
from dataflex_hooks.testing import assert_plugin_contract, make_groups, run_hooks

ROUTES = {"math": {"scale": 2.0, "shift": 0.5}, "code": {"length_penalty": 0.25, "free_length": 2}}


@pytest.fixture
def functions(monkeypatch):
    """A module with classifiers, as a user has one."""
    module = types.ModuleType("my_routes")
    module.calls = []

    def by_number(columns):
        module.calls.append(columns["number"].tolist())
        return ["math" if number % 2 else "code" for number in columns["number"]]

    module.by_number = by_number
    module.too_few = lambda columns: ["math"]
    module.no_text = lambda columns: np.arange(len(columns["number"]))
    module.constant = 3
    monkeypatch.setitem(sys.modules, "my_routes", module)
    return module


def test_each_domain_gets_its_own_adjustment_and_others_none():
    batch = make_groups([1, 0], [1, 0], [1, 0], domains=["math", "code", "poetry"], lengths=[4, [2, 5], 4])
    outcome = run_hooks(RewardRouter(ROUTES), batch)
    assert outcome.rewards.tolist() == [2.5, 0.5, 1.0, -0.75, 1.0, 0.0]
    assert run_hooks(RewardRouter({"other": {"scale": 3.0}}), batch).rewards.tolist() == batch.rewards.tolist()


def test_what_has_no_route_takes_the_default_is_counted_and_named_once(caplog):
    router = RewardRouter(ROUTES, default={"shift": -1.0})
    batch = make_groups([1, 0], [1], [0], domains=["math", "poetry", "prose"])
    with caplog.at_level(logging.WARNING):
        outcome = run_hooks(router, batch)
        run_hooks(router, batch)
    assert outcome.rewards.tolist() == [2.5, 0.5, 0.0, -1.0]
    metrics = router.post_reward(batch).metrics
    assert metrics["default_prompts_total"] == 2.0
    assert metrics["share/math"] == pytest.approx(1 / 3) and metrics["share/default"] == pytest.approx(2 / 3)
    assert [record.getMessage() for record in caplog.records] == [
        "no route for 'poetry', 'prose': those prompts take the default; routes are 'math', 'code'"
    ]


def test_clip_bounds_the_result_and_leaves_what_is_inside():
    batch = make_groups([2.0, 0.25, -3.0])
    outcome = run_hooks(RewardRouter({"math": {"scale": 2.0, "clip": [-1.0, 1.0]}}), batch)
    assert outcome.rewards.tolist() == [1.0, 0.5, -1.0]


def test_it_stacks_with_an_owner_and_another_adjuster_in_any_order():
    class Owner:
        provides = frozenset({"rewards"})

        @hookimpl
        def post_reward(self, batch):
            return RewardDecision(rewards=torch.arange(batch.bs).float())

    plugins = {"a": RewardRouter(ROUTES), "b": RewardRouter({"math": {"scale": 10.0}}), "owner": Owner()}
    batch = make_groups([0, 0, 0])
    expected = [0.5, 20.5, 40.5]
    assert run_hooks(plugins, batch).rewards.tolist() == expected
    assert run_hooks(dict(reversed(plugins.items())), batch).rewards.tolist() == expected


def test_a_classifier_is_asked_once_for_each_prompt(functions):
    router = RewardRouter(ROUTES, classifier="my_routes:by_number", columns=["number"])
    batch = make_groups([1, 0], [1, 0], [1, 1], columns={"number": [1, 2, 1]}, lengths=1)
    assert run_hooks(router, batch).rewards.tolist() == [2.5, 0.5, 1.0, 0.0, 2.5, 2.5]
    assert functions.calls == [[1, 2]]
    more = make_groups([1], [1], columns={"number": [2, 4]}, lengths=1)
    assert run_hooks(router, more).rewards.tolist() == [1.0, 1.0]
    assert functions.calls == [[1, 2], [4]]
    assert router.post_reward(more).metrics["classified_prompts"] == 3.0


def test_messages_of_a_prompt_can_be_classified_and_the_cache_is_bounded(monkeypatch):
    asked = []
    classify = CachedClassifier(lambda columns: asked.extend(columns["raw_prompt"]) or ["x"] * len(asked), "f")
    prompts = np.empty(2, dtype=object)
    prompts[:] = [[{"role": "user", "content": "1+1"}], [{"role": "user", "content": "2+2"}]]
    assert classify({"raw_prompt": prompts}) == ["x", "x"] and len(asked) == 2
    monkeypatch.setattr("dataflex_reward_router.classify.REMEMBERED", 1)
    assert classify({"raw_prompt": prompts}) == ["x", "x"] and len(asked) == 2
    assert len(classify._known) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "my_routes:too_few returned 1 values; accepted: one name .text. for each of 2"),
        ("no_text", r"my_routes:no_text returned \[0, 1\]\.\.\.; accepted: one name .text. for each of 2"),
    ],
)
def test_a_classifier_that_gives_no_names_is_named(functions, name, message):
    router = RewardRouter(ROUTES, classifier=f"my_routes:{name}", columns=["number"])
    with pytest.raises(ValueError, match=message):
        router.post_reward(make_groups([1], [1], columns={"number": [1, 2]}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"routes": {"math": {"scal": 2}}}, "routes.math.scal: got 2; accepted: one of clip, free_length, .*'scale'"),
        ({"routes": {"math": {"scale": "big"}}}, "routes.math.scale: got 'big'; accepted: a finite number"),
        ({"routes": {"math": {"clip": [1, 0]}}}, r"routes.math.clip: got \[1, 0\]; accepted: \[low, high\]"),
        ({"routes": {"math": {"free_length": 1.5}}}, "routes.math.free_length: got 1.5; accepted: a number of tokens"),
        ({"routes": {"math": 2.0}}, "routes.math: got 2.0; accepted: a mapping with keys out of"),
        ({"routes": {}}, "routes: got {}; accepted: a mapping of names to routes, at least one"),
        ({"routes": {"default": {}}}, "routes.default: got {}; accepted: names of domains; .* under default"),
        ({"routes": ROUTES, "default": {"x": 1}}, "default.x: got 1; accepted: one of"),
        ({"routes": ROUTES, "classifier": "my_routes"}, "classifier: got 'my_routes'; accepted: module:function"),
        ({"routes": ROUTES, "classifier": "my_routes:gone"}, "classifier: got .* importing it raised .*gone"),
        ({"routes": ROUTES, "classifier": "my_routes:constant"}, "classifier: got 'my_routes:constant'; accepted: mod"),
        ({"routes": ROUTES, "columns": "raw_prompt"}, "columns: got 'raw_prompt'; accepted: a list of dataset columns"),
    ],
)
def test_every_wrong_setting_is_named_in_full(functions, settings, expected):
    block = {"plugins": {"r": {"plugin": "reward_router", **settings}}}
    with pytest.raises(ConfigError, match=rf"dataflex\.plugins\.r\.{expected}"):
        HookManager.from_config(block, estimator="grpo", has_groups=True)


def test_all_wrong_settings_come_at_once():
    with pytest.raises(ConfigError) as caught:
        RewardRouter({"a": {"scale": None}, "b": 3}, default={"y": 1}, column="")
    assert [problem.setting for problem in caught.value.problems] == [
        "routes.a.scale",
        "routes.b",
        "default.y",
        "column",
    ]


def test_it_keeps_the_contract():
    assert_plugin_contract(lambda: RewardRouter({"math": {"scale": 2.0, "length_penalty": 0.1, "clip": [-1, 1]}}))
