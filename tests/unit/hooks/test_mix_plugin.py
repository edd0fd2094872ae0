"""The plugin `mix` and the manager's part of it: observation, decisions, their checks and their state."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
import torch

import dataflex_hooks as dh
from dataflex_hooks.domain_calls import DomainCalls, resolve_proportions
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, DomainSums
from dataflex_hooks.entries import Entry
from dataflex_hooks.errors import Origin
from dataflex_hooks.loader import BuiltPlugin
from dataflex_hooks.plugins.mix import MixPlugin
from dataflex_hooks.proportions import softmax
from dataflex_hooks.registration import Declaration
from tests.unit.hooks.test_domain_stats import with_domains

NAMES = ("code", "math")


class Manager(DomainCalls):
    """The calls of the hook manager over plugins that are simply there."""

    def __init__(
        self, plugins, update_step=1, warmup_step=0, on_error="raise", domains=None, hooks=("on_domain_stats",)
    ):
        super().__init__()
        shared = {} if domains is None else {"domains": domains}
        self.config = dh.DataFlexConfig(update_step=update_step, shared=shared)
        for label, plugin in plugins.items():
            path = f"dataflex.plugins.{label}"
            settings = dh.PluginSettings(label, label, path, warmup_step=warmup_step, on_error=on_error)
            requires = getattr(plugin, "requires", {})
            declared = Declaration(hooks, getattr(plugin, "provides", frozenset({"proportions"})), requires)
            self._entries[label] = Entry(BuiltPlugin(plugin, settings), declared)

    def _call(self, entry, hook, **arguments):
        return getattr(entry.plugin, hook)(**arguments)


def ctx(step):
    return dh.StepContext(step=step)


def batch_of(batches, math, code, **common):
    rows = batches.rows([math, code], **common)
    return with_domains(batches.build(rows), ["math"] * len(math) + ["code"] * len(code))


def stats(step_batch=None, shares=(0.5, 0.5)):
    sums = DomainSums(NAMES)
    if step_batch is not None:
        sums.add_rewarded(step_batch)
    return sums.stats(np.array(shares))


def test_proportions_are_the_mixers_on_the_scores_of_the_window(batches):
    manager = Manager({"mix": MixPlugin("reward_difficulty", {"name": "reward_gap", "params": {"temperature": 0.5}})})
    assert manager.start_domains(NAMES).tolist() == [0.5, 0.5]
    for step, (math, code) in enumerate([([1, 1], [0, 0]), ([1, 0, 1, 0], [1, 0])], start=1):
        manager.observe("post_reward", batch_of(batches, math, code), ctx(step))
    decided = manager.on_domain_stats(stats(), ctx(2))
    # Means over sessions: code (0+0+1+0)/4, math (1+1+1+0+1+0)/6.
    assert decided == pytest.approx(0.05 + 0.9 * softmax([4 / 6 - 0.25, 0.0], 0.5))


def test_the_configured_scorer_is_honoured(batches):
    batch = batch_of(batches, [1, 1], [0, 0], advantage=0.25)
    shares = {}
    for scorer, hook in (("reward_difficulty", "post_reward"), ("advantage_magnitude", "post_advantage")):
        manager = Manager({"mix": MixPlugin(scorer, {"name": "dump_ucb", "params": {"c": 0.0}})})
        manager.start_domains(NAMES)
        other = {"post_reward": "post_advantage", "post_advantage": "post_reward"}[hook]
        assert manager.observed_fields(hook) >= {DOMAIN_COLUMN, "response_mask"}
        assert manager.observed_fields(other) == frozenset()
        manager.observe(other, batch, ctx(1))
        manager.observe(hook, batch, ctx(1))
        shares[scorer] = manager.on_domain_stats(stats(), ctx(1))
    assert shares["reward_difficulty"] == pytest.approx(softmax([0.0, 1.0], 1.0))
    assert shares["advantage_magnitude"] == pytest.approx([0.5, 0.5])


def test_a_pairing_unlike_the_papers_warns_once_and_the_papers_does_not(caplog):
    with caplog.at_level(logging.WARNING, logger="dataflex_hooks"):
        plugin = MixPlugin("reward_difficulty", "dump_ucb")
        plugin.start(NAMES)
    assert caplog.text.count("mixer 'dump_ucb' is published with the scorer advantage_magnitude") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dataflex_hooks"):
        MixPlugin("advantage_magnitude", "dump_ucb")
        MixPlugin("token_prob", "odm")
        MixPlugin(None, "static")
    assert caplog.text == ""


def test_a_mixer_without_scores_needs_no_scorer_and_another_does():
    assert MixPlugin(actuator="static").requires == {}
    with pytest.raises(dh.ConfigError, match="scorer: got nothing; accepted: the name of a scorer"):
        MixPlugin(actuator="reward_gap")


def test_decisions_wait_for_the_warm_up_and_the_update_step_and_observation_does_not(batches):
    plugin = MixPlugin("reward_difficulty", {"name": "reward_gap", "params": {"floor": 0.0}})
    manager = Manager({"mix": plugin}, update_step=2, warmup_step=3)
    assert manager.start_domains(NAMES) is None
    decided = {}
    for step in range(1, 7):
        manager.observe("post_reward", batch_of(batches, [1, 1], [0, 0]), ctx(step))
        decided[step] = manager.on_domain_stats(stats(), ctx(step))
    assert [step for step, shares in decided.items() if shares is not None] == [4, 6]
    assert plugin._window.history().steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert decided[4] == pytest.approx(softmax([1.0, 0.0], 1.0))


def test_a_mixer_written_to_the_published_contract_is_used_as_it_is(batches, registry):
    calls = []

    @dh.register_mixer("inverse")
    class Inverse(dh.Mixer):
        def __init__(self, domains=None, window=1, **kwargs):
            self.domains = list(domains or [])
            self.window = window

        def act(self, scores, batch, *, counts=None, **ctx):
            calls.append((scores, counts, len(batch)))
            raw = [1 / (1 + scores.get(domain, 0.0)) for domain in self.domains]
            return [value / sum(raw) for value in raw]

    manager = Manager({"mix": MixPlugin("reward_difficulty", "inverse", window=7)})
    assert manager.start_domains(NAMES) is None
    manager.observe("post_reward", batch_of(batches, [1, 1, 1], [0, 0]), ctx(1))
    assert manager.on_domain_stats(stats(), ctx(1)) == pytest.approx([2 / 3, 1 / 3])
    assert calls == [({"code": 0.0, "math": 1.0}, {"code": 2, "math": 3}, 5)]


def test_a_mixer_that_needs_names_in_its_constructor_gets_them(registry):
    @dh.register_mixer("counts_names")
    class CountsNames(dh.Mixer):
        def __init__(self, domains, **kwargs):
            self.shares = [1 / len(domains)] * len(domains)
            self.domains = domains

        def act(self, scores, batch, *, counts=None, **ctx):
            return self.shares

    manager = Manager({"mix": MixPlugin("reward_difficulty", "counts_names")})
    manager.start_domains(NAMES)
    assert manager.on_domain_stats(stats(), ctx(1)).tolist() == [0.5, 0.5]


def test_domains_listed_for_the_mixer_give_the_order_of_its_parameters():
    params = {"domains": ["math", "code"], "proportions": [0.9, 0.1]}
    plugin = MixPlugin(actuator={"name": "static", "params": params})
    manager = Manager({"mix": plugin})
    assert manager.configured_domains() == ("math", "code")
    assert manager.start_domains(NAMES).tolist() == pytest.approx([0.1, 0.9])
    assert manager.on_domain_stats(stats(), ctx(1)).tolist() == pytest.approx([0.1, 0.9])
    with pytest.raises(dh.ConfigError, match="dataflex.plugins.mix.actuator.params.domains: got"):
        Manager({"mix": plugin}).start_domains(("code", "math", "prose"))


def test_a_scheduled_parameter_of_a_mixer_changes_with_the_step(batches):
    params = {"temperature": {0: 4.0, 100: 0.25}, "floor": 0.0}
    plugin = MixPlugin("reward_difficulty", {"name": "reward_gap", "params": params})
    plugin.start(NAMES)
    plugin.observe(batch_of(batches, math=[1.0, 1.0], code=[0.0, 0.0]), ctx(1))
    for step, temperature in ((1, 4.0 - 3.75 / 100), (50, 2.125), (100, 0.25), (200, 0.25)):
        decided = plugin.on_domain_stats(stats(), ctx(step)).proportions.tolist()
        assert decided == pytest.approx(softmax([1.0, 0.0], temperature).tolist())


def test_what_only_the_domains_show_is_wrong_is_an_error_at_start():
    plugin = MixPlugin("reward_difficulty", {"name": "reward_gap", "params": {"floor": 0.4}})
    with pytest.raises(dh.ConfigError, match=r"dataflex\.plugins\.mix\.actuator\.params\.floor: got 0\.4"):
        Manager({"mix": plugin}).start_domains(("a", "b", "c"))


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ([0.5], r"must be \(2,\), one for each of code, math"),
        ([0.5, -0.5], "negative for math"),
        ([float("nan"), 1.0], "NaN or infinite for code"),
        ([0.0, 0.0], "all 0"),
        ("ab", "must be numbers"),
    ],
)
def test_proportions_that_cannot_be_name_the_plugin(given, wrong):
    with pytest.raises(dh.DecisionError, match=f"plugin 'mix' .* at step 3: .*{wrong}"):
        resolve_proportions(given, NAMES, Origin("mix", "on_domain_stats", 3))
    assert resolve_proportions(torch.tensor([3.0, 1.0]), NAMES, Origin("mix", "x")).tolist() == [0.75, 0.25]


class Broken:
    observes = "post_reward"

    def observe(self, batch, ctx):
        raise RuntimeError("no")

    def on_domain_stats(self, stats, ctx):
        return dh.DomainDecision(proportions=torch.tensor([-1.0, 2.0]))


def test_a_failing_plugin_stops_the_run_or_is_disabled(batches):
    batch = batch_of(batches, [1, 1], [0, 0])
    with pytest.raises(dh.PluginError, match="plugin 'broken' .* in observe at step 1: RuntimeError: no"):
        Manager({"broken": Broken()}).observe("post_reward", batch, ctx(1))
    with pytest.raises(dh.DecisionError, match="negative for code"):
        Manager({"broken": Broken()}).on_domain_stats(stats(), ctx(1))
    quiet = Manager({"broken": Broken()}, on_error="disable")
    assert quiet.mixes
    quiet.observe("post_reward", batch, ctx(1))
    assert not quiet.mixes
    assert quiet.on_domain_stats(stats(), ctx(1)) is None


@pytest.mark.parametrize("mixer", ["reward_gap", "tscl", "odm", "sec", "dads", "doremi", "dump_ucb"])
def test_a_saved_plugin_decides_the_same_bit_for_bit(batches, mixer):
    def build():
        manager = Manager({"mix": MixPlugin("reward_difficulty", mixer, window=3)})
        manager.start_domains(NAMES)
        return manager

    def step(manager, number):
        rewards = [number % 3 / 3, number % 4 / 7]
        manager.observe("post_reward", batch_of(batches, rewards, [number % 5 / 9, 0.1]), ctx(number))
        return manager.on_domain_stats(stats(), ctx(number)).tolist()

    whole = build()
    expected = [step(whole, number) for number in range(1, 10)]
    resumed = build()
    for number in range(1, 5):
        step(resumed, number)
    state = pickle.dumps(resumed._entries["mix"].plugin.state_dict())
    resumed = build()
    resumed._entries["mix"].plugin.load_state_dict(pickle.loads(state))
    assert [step(resumed, number) for number in range(5, 10)] == expected[4:]
