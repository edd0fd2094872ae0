"""Counts and times of calls, and the lines of DATAFLEX_TRACE."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from dataflex_hooks import (
    DomainDecision,
    HookManager,
    LossCoefficients,
    PluginError,
    RewardDecision,
    RolloutDecision,
    UpdateDecision,
    hookimpl,
)
from dataflex_hooks.testing import make_prompts, make_stats
from dataflex_hooks.trace import VARIABLE, CallLog, summary


class Plugin:
    """Decides what it is given, at both hooks."""

    def __init__(self, update=None, rewards=None):
        self.update, self.rewards = update, rewards
        self.provides = {"mask", "weights", "update_scale", "skip_update"} | (
            {"rewards"} if rewards is not None else set()
        )

    @hookimpl
    def post_reward(self, batch):
        return None if self.rewards is None else RewardDecision(rewards=self.rewards)

    @hookimpl
    def post_advantage(self, batch):
        if isinstance(self.update, Exception):
            raise self.update
        return self.update


@pytest.fixture
def batch(batches):
    return batches.groups([1, 0], [0, 0])


def both(manager, batch, ctx):
    manager.post_reward(batch, ctx)
    return manager.post_advantage(batch, ctx, LossCoefficients("token"))


def test_decisions_and_abstentions_are_counted_by_plugin_over_the_hooks(batch, ctx):
    masks = Plugin(UpdateDecision(mask=torch.ones(4)))
    manager = HookManager({"masks": masks, "max_idle": Plugin()})
    both(manager, batch, ctx)
    calls = manager.calls.take()
    times = {name: calls.pop(name) for name in list(calls) if name.startswith("timing_s/")}
    assert calls == {
        "dataflex/masks/decided_total": 1,
        "dataflex/masks/abstained_total": 1,
        "dataflex/ma-x_idle/decided_total": 0,
        "dataflex/ma-x_idle/abstained_total": 2,
    }
    assert times.keys() == {"timing_s/dataflex/masks", "timing_s/dataflex/ma-x_idle"}
    assert all(seconds > 0 for seconds in times.values())


def test_taking_starts_anew(batch, ctx):
    manager = HookManager({"p": Plugin()})
    both(manager, batch, ctx)
    assert manager.calls.take() and manager.calls.take() == {}
    both(manager, batch, ctx)
    assert manager.calls.take()["dataflex/p/abstained_total"] == 2


def test_a_failed_call_counts_as_neither(batch, ctx):
    block = {"plugins": {"bad": {"plugin": "tests.unit.hooks.test_trace:Failing", "on_error": "disable"}}}
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    merged = manager.post_advantage(batch, ctx, LossCoefficients("token"))
    calls = manager.calls.take()
    assert (calls["dataflex/bad/decided_total"], calls["dataflex/bad/abstained_total"]) == (0, 0)
    assert merged.metrics["dataflex/bad/disabled"] == 1


class Failing(Plugin):
    def __init__(self):
        super().__init__(ValueError("no"))


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_a_line_a_call_with_shapes_and_summary_and_no_tensor(batch, ctx, monkeypatch, capsys, value):
    monkeypatch.setenv(VARIABLE, value)
    plugins = {
        "masks": Plugin(UpdateDecision(mask=torch.tensor([True, False, True, True]), reason="band")),
        "weighs": Plugin(UpdateDecision(weights=torch.tensor([0.5, 2.0, 3.0, 0.125]), normalize="none")),
        "scales": Plugin(UpdateDecision(update_scale=0.25, skip_update=True)),
        "idle": Plugin(rewards=torch.ones(4)),
    }
    both(HookManager(plugins), batch, ctx)
    printed = capsys.readouterr()
    lines = [re.sub(r"[\d.]+ ms$", "? ms", line) for line in printed.err.splitlines()]
    head = "dataflex trace: step 3"
    assert sorted(lines[:4]) == sorted(
        f"{head} post_reward {label}: 4 rows, 8 tokens; {did}; ? ms"
        for label, did in {
            "masks": "no decision",
            "weighs": "no decision",
            "scales": "no decision",
            "idle": "rewards (4,) mean 1, min 1, max 1",
        }.items()
    )
    moments = "weights (4,) mean 1.406, min 0.125, max 3"
    assert lines[4:] == [
        f"{head} post_advantage masks: 4 rows, 8 tokens; mask keeps 3/4, reason=band; ? ms",
        f"{head} post_advantage weighs: 4 rows, 8 tokens; {moments}, normalize=none; ? ms",
        f"{head} post_advantage scales: 4 rows, 8 tokens; update_scale=0.25, skip_update=True; ? ms",
        f"{head} post_advantage idle: 4 rows, 8 tokens; no decision; ? ms",
    ]
    assert "tensor" not in printed.err and printed.out == ""


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_without_the_variable_nothing_is_printed(batch, ctx, monkeypatch, capsys, value):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    both(HookManager({"p": Plugin(UpdateDecision(update_scale=0.5))}), batch, ctx)
    assert capsys.readouterr() == ("", "")


def test_a_failing_call_is_traced_before_the_run_stops(batch, ctx, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(PluginError):
        HookManager({"p": Plugin(RuntimeError("no"))}).post_advantage(batch, ctx, LossCoefficients("token"))
    assert "post_advantage p: 4 rows, 8 tokens; failed: RuntimeError;" in capsys.readouterr().err


class Everywhere:
    """Decides at every hook, and watches."""

    provides = frozenset({"admit", "proportions", "keep", "mask"})
    observes = "post_reward"

    @hookimpl
    def pre_rollout(self, candidates):
        return RolloutDecision(admit=torch.ones(len(candidates)), metrics={"drawn_total": len(candidates), "last": 1})

    @hookimpl
    def on_domain_stats(self, stats):
        return DomainDecision(proportions=[0.25, 0.75], metrics={"drawn_total": 100, "last": 2})

    def observe(self, batch, ctx):
        pass


def test_calls_of_all_hooks_are_traced_timed_and_counted_and_observing_is_timed_only(batch, ctx, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "1")
    manager = HookManager({"p": Everywhere()})
    manager.pre_rollout(make_prompts(3), ctx)
    manager.pre_rollout(make_prompts(2), ctx)
    manager.observe("post_reward", batch, ctx)
    step = {}
    manager.calls.take_into(step)
    assert step.pop("timing_s/dataflex/p") > 0
    assert step == {
        "dataflex/p/decided_total": 2,
        "dataflex/p/abstained_total": 0,
        "dataflex/p/drawn_total": 5,
        "dataflex/p/last": 1,
    }
    # What comes at the end of the step is added to what is there.
    step["timing_s/dataflex/p"] = 1000.0
    manager.on_domain_stats(make_stats(), ctx)
    manager.calls.take_into(step)
    assert step.pop("timing_s/dataflex/p") > 1000
    assert (step["dataflex/p/decided_total"], step["dataflex/p/drawn_total"], step["dataflex/p/last"]) == (3, 105, 2)
    lines = [re.sub(r"; [\d.]+ ms$", "", line) for line in capsys.readouterr().err.splitlines()]
    moments = "metrics of 2"
    assert lines == [
        f"dataflex trace: step 3 pre_rollout p: 3 candidates; admit keeps 3/3, {moments}",
        f"dataflex trace: step 3 pre_rollout p: 2 candidates; admit keeps 2/2, {moments}",
        "dataflex trace: step 3 observe p: 4 rows, 8 tokens; no decision",
        f"dataflex trace: step 3 on_domain_stats p: 2 domains; proportions of 2, {moments}",
    ]


def test_decisions_of_numpy_arrays_are_summed_up_too():
    assert summary(RolloutDecision(admit=np.array([True, False, True]))) == "admit of 3"
    assert summary(DomainDecision(proportions=np.array([0.25, 0.75]))) == "proportions of 2"
    assert summary(DomainDecision()) == "nothing given"


def test_what_is_no_decision_is_named_and_never_shown(batch, ctx):
    written = []
    log = CallLog(written.append)
    big = torch.rand(1000)
    for decision in (big, [big], UpdateDecision(mask=[1] * 500, reason="r" * 500), UpdateDecision(weights=big[:0])):
        assert len(summary(decision)) < 120 and "0." not in summary(decision)
    assert written == [] and log.take() == {}
