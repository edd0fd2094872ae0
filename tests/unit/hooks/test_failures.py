"""Whatever of a plugin fails: the error names plugin, distribution, version, hook and step, or the run goes on."""

from __future__ import annotations

import logging
import pickle

import pytest

import dataflex_hooks as dh
from dataflex_hooks.testing import make_context, make_groups, make_prompts, make_stats

FAILING = """
    import dataflex_hooks as df

    class Failing:
        '''Raises in the one place that it is told, or where a hook returns something that is no decision.'''

        provides = {"mask", "proportions", "admit", "keep"}
        observes = "post_reward"

        def __init__(self, where="", hooks=("pre_rollout", "post_reward", "post_advantage", "on_domain_stats")):
            self.where, self.hooks = where, hooks
            self.at("constructor")

        def at(self, place):
            if place == self.where:
                raise ZeroDivisionError("no such number")
            if self.where == f"{place} result":
                return 3

        @df.hookimpl
        def pre_rollout(self): return self.at("pre_rollout")

        @df.hookimpl
        def post_reward(self): return self.at("post_reward")

        @df.hookimpl
        def post_advantage(self): return self.at("post_advantage")

        @df.hookimpl
        def on_domain_stats(self): return self.at("on_domain_stats")

        def start(self, domains): self.at("start")
        def observe(self, batch, ctx): self.at("observe")
        def scorer_means(self, step): return self.at("scorer_means") or {}
        def state_dict(self): return {"x": self.at("state_dict")}
        def load_state_dict(self, state): self.at("load_state_dict")
"""
STEP = 7
TOKEN = dh.LossCoefficients("token")
RUNNING = {
    "pre_rollout": lambda manager: manager.pre_rollout(make_prompts(4), make_context(STEP)),
    "post_reward": lambda manager: manager.post_reward(make_groups([1, 0]), make_context(STEP)),
    "post_advantage": lambda manager: manager.post_advantage(make_groups([1, 0]), make_context(STEP), TOKEN),
    "on_domain_stats": lambda manager: manager.on_domain_stats(make_stats(), make_context(STEP)),
    "observe": lambda manager: manager.observe("post_reward", make_groups([1, 0]), make_context(STEP)),
    "scorer_means": lambda manager: manager.scorer_means(STEP),
    "state_dict": lambda manager: manager.state_dict(STEP),
}


def load_again(manager):
    manager.load_state_dict(manager.state_dict(STEP), STEP)


AT_START = {
    "start": (lambda manager: manager.start_domains(("math", "code")), 0),
    "load_state_dict": (load_again, STEP),
}


@pytest.fixture
def build(distribution):
    distribution("acme-flaky", {"flaky": "acme_flaky:Failing"}, {"acme_flaky": FAILING}, version="2.5.1")

    def built(where, **settings):
        block = {"plugins": {"net": {"plugin": "flaky", "where": where, **settings}}}
        return dh.HookManager.from_config(block, estimator="grpo", has_groups=True)

    return built


def assert_names_the_plugin(error: dh.PluginError, hook: str, step: int) -> None:
    assert str(error).startswith(f"plugin 'net' (acme-flaky 2.5.1) in {hook} at step {step}: ")
    origin = error.origin
    assert (origin.label, origin.distribution, origin.version, origin.hook, origin.step) == (
        "net",
        "acme-flaky",
        "2.5.1",
        hook,
        step,
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.origin, type(again)) == (str(error), origin, type(error))


@pytest.mark.parametrize("where", RUNNING)
def test_an_exception_names_plugin_distribution_version_hook_and_step(build, where):
    with pytest.raises(dh.PluginError) as caught:
        RUNNING[where](build(where))
    assert_names_the_plugin(caught.value, where, STEP)
    assert "ZeroDivisionError: no such number" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    RUNNING[where](build("nowhere"))


@pytest.mark.parametrize("where", AT_START)
@pytest.mark.parametrize("on_error", ["raise", "disable"])
def test_a_failure_at_start_stops_the_run_in_any_case(build, where, on_error):
    call, step = AT_START[where]
    with pytest.raises(dh.PluginError) as caught:
        call(build(where, on_error=on_error))
    assert_names_the_plugin(caught.value, where, step)
    call(build("nowhere"))


@pytest.mark.parametrize("hook", ["pre_rollout", "post_reward", "post_advantage", "on_domain_stats"])
def test_a_wrong_result_is_named_in_the_same_way(build, hook):
    with pytest.raises(dh.DecisionError) as caught:
        RUNNING[hook](build(f"{hook} result"))
    assert_names_the_plugin(caught.value, hook, STEP)


def test_a_constructor_that_raises_names_setting_class_and_distribution(build):
    with pytest.raises(dh.ConfigError) as caught:
        build("constructor", on_error="disable")
    text = str(caught.value)
    assert text.startswith("dataflex.plugins.net: got ")
    raised = "Failing raised ZeroDivisionError: no such number"
    assert text.endswith(f"{raised} (raised in acme_flaky, from acme-flaky 2.5.1)")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


SCORER = """
    import dataflex_hooks as df

    @df.register_scorer("judge")
    class Judge(df.Scorer):
        def __init__(self, broken=False):
            if broken:
                raise OSError("no model")

        def score(self, batch, step_id, **ctx):
            return batch.values("never_there")
"""


def test_a_component_of_another_package_is_named_beside_the_plugin_that_runs_it(distribution, registry):
    distribution("acme-judge", {"judge": "acme_judge:Judge"}, {"acme_judge": SCORER}, version="0.4")
    block = {"plugins": {"focus": {"plugin": "select", "scorer": "judge", "actuator": "topk_fraction"}}}
    manager = dh.HookManager.from_config(block, estimator="grpo", has_groups=True)
    with pytest.raises(dh.PluginError) as caught:
        RUNNING["post_advantage"](manager)
    assert str(caught.value).startswith("plugin 'focus' (dataflex-verl ")
    assert str(caught.value).endswith("(raised in acme_judge, from acme-judge 0.4)")
    block["plugins"]["focus"]["scorer"] = {"name": "judge", "params": {"broken": True}}
    with pytest.raises(
        dh.ConfigError, match=r"raised OSError: no model \(raised in acme_judge, from acme-judge 0\.4\)"
    ):
        dh.HookManager.from_config(block, estimator="grpo", has_groups=True)


@pytest.mark.parametrize("where", RUNNING)
def test_disable_logs_once_and_goes_on_without_the_plugin(build, where, caplog):
    manager = build(where, on_error="disable")
    assert manager.disabled_metrics() == {"dataflex/net/disabled": 0.0}
    with caplog.at_level(logging.INFO, logger="dataflex_hooks"):
        for _ in range(3):
            RUNNING[where](manager)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info
    text = record.getMessage()
    assert (
        text
        == f"plugin 'net' (acme-flaky 2.5.1) in {where} at step {STEP} failed and is disabled for the rest of the run"
    )
    assert manager.disabled_metrics() == {"dataflex/net/disabled": 1.0}
    for hook in dh.hookspecs.HOOKS:
        assert not manager.active(hook, STEP)
    assert manager.state_dict(STEP)["net"].disabled


def test_the_log_has_the_plugins_own_words(build, caplog):
    manager = build("post_reward result", on_error="disable")
    manager.post_reward(make_groups([1, 0]), make_context(STEP))
    assert "must return RewardDecision or None, got an object of builtins.int" in caplog.text


def test_a_mixer_that_fails_leaves_the_proportions_in_force(build):
    manager = build("on_domain_stats", on_error="disable")
    assert manager.on_domain_stats(make_stats(), make_context(STEP)) is None
    assert not manager.mixes


def test_without_a_failed_owner_rewards_are_verls_own_and_still_adjusted(caplog):
    class Owner:
        provides = frozenset({"rewards"})

        @dh.hookimpl
        def post_reward(self, batch):
            raise OSError("no connection")

    class Double:
        provides = frozenset({"reward_scale"})

        @dh.hookimpl
        def post_reward(self, batch):
            return dh.RewardDecision(scale=2 * (batch.rewards * 0 + 1))

    config = {"plugins": {"owner": {"plugin": f"{__name__}:made", "on_error": "disable"}}}
    made.plugin = Owner()
    extra = {"double": Double()}
    manager = dh.HookManager.from_config(config, estimator="grpo", has_groups=True, extra_plugins=extra)
    batch = make_groups([1, 0.5])
    for _ in range(2):
        merged = manager.post_reward(batch, make_context(STEP))
        assert batch.with_token_field("rm_scores", merged.rewards).rewards.tolist() == [2.0, 1.0]
        assert merged.owner == "" and merged.metrics["dataflex/owner/disabled"] == 1.0
    assert len(caplog.records) == 1


def made():
    return made.plugin


@pytest.mark.parametrize("top", [None, "raise", "disable"])
@pytest.mark.parametrize("own", [None, "raise", "disable"])
def test_on_error_for_all_holds_where_a_plugin_says_nothing_else(top, own):
    plugin = {"plugin": "select"} | ({} if own is None else {"on_error": own})
    block = {"plugins": {"p": plugin}} | ({} if top is None else {"on_error": top})
    (settings,) = dh.parse(block).plugins
    assert settings.on_error == (own or top or "raise")


def test_on_error_takes_two_words(problems):
    for block in (
        {"on_error": "ignore", "plugins": {}},
        {"plugins": {"p": {"plugin": "select", "on_error": "ignore"}}},
    ):
        text = next(text for text in problems(block) if "on_error" in text)
        assert "got 'ignore'; accepted: one of disable, raise" in text
