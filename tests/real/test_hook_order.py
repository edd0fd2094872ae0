"""The order of hook calls in a real run, fixed; and what a run says of a plugin that fails or takes long."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import pytest
import torch

from dataflex_hooks import DomainDecision, PluginError, RewardDecision, RolloutDecision, UpdateDecision, hookimpl
from tests.real.harness import compose_config
from tests.real.prompts import CHEAP, overrides
from tests.real.runs import train

pytestmark = pytest.mark.real

STEPS = 2
CALLS: list[tuple[int, str, str]] = []
"""(step, hook, label) of every call; pre_rollout once however many candidates were drawn. Emptied by the fixture."""
SEEN: dict[tuple[int, str], float] = {}
"""Mean reward that a plugin saw at post_reward, by step and label."""


def note(step: int, hook: str, label: str) -> None:
    if hook != "pre_rollout" or not CALLS or (step, hook, label) not in CALLS[-3:]:
        CALLS.append((step, hook, label))


class Recorder:
    """Writes down every call; ``gives`` is what it decides at post_reward."""

    requires = {"post_reward": ("rm_scores",)}

    def __init__(self, name: str, gives: str = "") -> None:
        self.name, self.gives = name, gives
        own = {"owner": {"rewards"}, "adjuster": {"reward_scale", "reward_shift"}}
        self.provides = {"admit", "mask", *own.get(gives, set())}

    @hookimpl
    def pre_rollout(self, candidates: Any, ctx: Any) -> RolloutDecision:
        note(ctx.step, "pre_rollout", self.name)
        return RolloutDecision(admit=torch.ones(len(candidates), dtype=torch.bool))

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> RewardDecision | None:
        note(ctx.step, "post_reward", self.name)
        SEEN[ctx.step, self.name] = batch.mean_reward
        if self.gives == "owner":
            return RewardDecision(rewards=torch.full((batch.bs,), 10.0))
        if self.gives == "adjuster":
            return RewardDecision(scale=torch.full((batch.bs,), 2.0), shift=torch.ones(batch.bs))
        return None

    @hookimpl
    def post_advantage(self, batch: Any, ctx: Any) -> UpdateDecision:
        note(ctx.step, "post_advantage", self.name)
        return UpdateDecision(mask=torch.ones(batch.bs, dtype=torch.bool))

    @hookimpl
    def on_domain_stats(self, stats: Any, ctx: Any) -> DomainDecision | None:
        note(ctx.step, "on_domain_stats", self.name)
        return None


class Fails:
    """Raises at one step's post_reward; before, it is slow."""

    provides = {"keep"}

    def __init__(self, at: int, sleep: float = 0.0) -> None:
        self.at, self.sleep = at, sleep

    @hookimpl
    def post_reward(self, ctx: Any) -> None:
        if ctx.step == self.at:
            raise OSError("no connection")
        time.sleep(self.sleep)


GOLDEN = [
    # The first prompts are drawn before a step has a number of its own.
    *itertools.product([1], ["pre_rollout"], ["watcher", "adjuster", "owner"]),
    *itertools.product([1], ["post_reward"], ["owner", "adjuster", "watcher"]),
    *itertools.product([1], ["post_advantage"], ["watcher", "adjuster", "owner"]),
    *itertools.product([1], ["on_domain_stats"], ["watcher", "adjuster", "owner"]),
    *itertools.product([2], ["pre_rollout"], ["watcher", "adjuster", "owner"]),
    *itertools.product([2], ["post_reward"], ["owner", "adjuster", "watcher"]),
    *itertools.product([2], ["post_advantage"], ["watcher", "adjuster", "owner"]),
    *itertools.product([2], ["on_domain_stats"], ["watcher", "adjuster", "owner"]),
]
"""In configuration order (watcher, adjuster, owner), but at post_reward: owner, adjusters, the others."""


def plugins(flaky: str) -> list[str]:
    recorder = "plugin:'tests.real.test_hook_order:Recorder'"
    block = (
        f"{{watcher:{{{recorder},name:watcher}},adjuster:{{{recorder},name:adjuster,gives:adjuster}},"
        f"owner:{{{recorder},name:owner,gives:owner}},"
        f"flaky:{{plugin:'tests.real.test_hook_order:Fails',at:2,sleep:0.1,{flaky}}}}}"
    )
    return [f"+dataflex.plugins={block}", f"trainer.total_training_steps={STEPS}", *CHEAP]


once = pytest.mark.xdist_group("hook_order")  # one run serves all tests of it


@pytest.fixture(scope="module")
def run(ray_session, demo):
    CALLS.clear()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("dataflex_hooks").addHandler(handler)
    try:
        done = train(compose_config(overrides(demo, *plugins("on_error:disable,slow_plugin_seconds:0.05"))))
    finally:
        logging.getLogger("dataflex_hooks").removeHandler(handler)
    return done.metrics, list(CALLS), [record for record in records if "'flaky'" in record.getMessage()]


@once
def test_hooks_are_called_in_the_golden_order_over_two_steps(run):
    _, calls, _ = run
    assert calls == GOLDEN


@once
def test_the_owner_comes_first_then_adjusters_and_the_others_see_what_applies(run):
    metrics, _, _ = run
    for step in (1, 2):
        assert SEEN[step, "adjuster"] == 10.0
        assert SEEN[step, "watcher"] == 21.0
        assert SEEN[step, "owner"] <= 1.0
        assert metrics[step - 1]["critic/score/mean"] == 21.0


@once
def test_a_plugin_that_fails_is_disabled_and_shows_in_every_step(run):
    metrics, _, records = run
    assert [step["dataflex/flaky/disabled"] for step in metrics] == [0.0, 1.0]
    (error,) = [record for record in records if record.levelno == logging.ERROR]
    assert "plugin 'flaky'" in error.getMessage() and "in post_reward at step 2 failed" in error.getMessage()


@once
def test_calls_of_all_four_hooks_are_counted_in_the_step(run):
    metrics, _, _ = run
    for step in (1, 2):
        assert metrics[step - 1]["dataflex/watcher/abstained_total"] == 2  # post_reward and on_domain_stats
        assert metrics[step - 1]["dataflex/owner/abstained_total"] == 1
        assert metrics[step - 1]["dataflex/owner/decided_total"] >= 3
        assert metrics[step - 1]["timing_s/dataflex/owner"] > 0


@once
def test_a_slow_plugin_is_named_and_counted(run):
    metrics, _, records = run
    assert [step["dataflex/flaky/slow_total"] for step in metrics] == [1.0, 0.0]
    (warning,) = [record for record in records if record.levelno == logging.WARNING]
    assert "in post_reward at step 1" in warning.getMessage() and "slow_plugin_seconds=0.05" in warning.getMessage()


def test_without_disable_the_run_stops_and_the_error_survives_ray(live, stored):
    import ray

    with pytest.raises(PluginError) as caught:
        live.update(stored, plugins={"flaky": Fails(at=2)}, step=2)
    text = "plugin 'flaky' (no distribution) in post_reward at step 2: OSError: no connection"
    assert str(caught.value) == text
    assert live.update(stored, plugins={"flaky": Fails(at=2)}, step=1).grad_norm > 0

    @ray.remote
    def fails(error: Exception) -> None:
        raise error

    with pytest.raises(PluginError) as beyond:
        ray.get(fails.remote(caught.value))
    assert text in str(beyond.value) and beyond.value.origin == caught.value.origin
