"""Whatever of a plugin fails: the error names plugin, distribution, version, hook and step, or the run goes on."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch

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


class Decides:
    """Returns one decision at the hook of its type, in every step."""

    requires = {"post_reward": ("rm_scores",)}

    def __init__(self, decision, **declared):
        self.decision = decision
        self.hooks = ("post_reward" if isinstance(decision, dh.RewardDecision) else "post_advantage",)
        self.__dict__.update(declared)
        self.provides = dh.decisions.given_parts(decision)

    @dh.hookimpl
    def post_reward(self, batch):
        return self.decision

    @dh.hookimpl
    def post_advantage(self, batch):
        return self.decision


def deciding(on_error, **decisions):
    plugins = {label: Decides(decision) for label, decision in decisions.items()}
    return dh.HookManager.from_config({"on_error": on_error}, estimator="grpo", has_groups=True, extra_plugins=plugins)


GEO_MEAN = dh.LossCoefficients("sequence", per_token=False, source="loss_mode=geo_mean")
HUGE = torch.full((2,), 1e39, dtype=torch.float64)
FINE = dh.UpdateDecision(mask=torch.tensor([True, False]))
AT_FAULT = {
    "tokens under such a loss": (dh.UpdateDecision(weights=torch.ones(5)), GEO_MEAN, "decides per token"),
    "weights": (dh.UpdateDecision(weights=HUGE, normalize="none"), TOKEN, "weights and scales of 'bad' overflows"),
    "a scale": (dh.UpdateDecision(update_scale=1e300), TOKEN, "weights and scales of 'bad' overflows"),
}


@pytest.mark.parametrize("case", AT_FAULT)
def test_an_update_decision_that_cannot_be_merged_on_its_own_is_its_plugins_failure(case, caplog):
    decision, coefficients, text = AT_FAULT[case]
    batch = make_groups([1, 0], lengths=[[2, 3]])
    manager = deciding("disable", bad=decision, fine=FINE)
    for step in (1, 2):
        merged = manager.post_advantage(batch, make_context(step), coefficients)
        assert merged.row_keep.tolist() == [True, False] and merged.weights.tolist() == [1, 1, 0, 0, 0]
        assert [one.label for one in merged.decisions] == ["fine"]
        assert merged.metrics["dataflex/bad/disabled"] == 1 and merged.metrics["dataflex/fine/disabled"] == 0
    (record,) = caplog.records
    assert "plugin 'bad' (no distribution) in post_advantage at step 1 failed" in record.getMessage()
    assert text in caplog.text
    with pytest.raises(dh.DecisionError, match=f"plugin 'bad' .* in post_advantage at step 1: .*{text}"):
        deciding("raise", bad=decision, fine=FINE).post_advantage(batch, make_context(1), coefficients)


def test_an_adjustment_out_of_range_on_its_own_is_its_plugins_failure(caplog):
    bad = dh.RewardDecision(scale=HUGE, keep=torch.tensor([False, True]))
    fine = dh.RewardDecision(shift=torch.tensor([1.0, 2.0]))
    batch = make_groups([1, 0.5])
    manager = deciding("disable", bad=bad, fine=fine)
    for step in (1, 2):
        merged = manager.post_reward(batch, make_context(step))
        assert batch.with_token_field("rm_scores", merged.rewards).rewards.tolist() == [2.0, 2.5]
        assert merged.row_keep is None and merged.metrics["dataflex/bad/disabled"] == 1
    assert len(caplog.records) == 1 and "scales and shifts of 'bad' take rewards out of range" in caplog.text
    with pytest.raises(dh.DecisionError, match="scales and shifts of 'bad' take rewards out of range"):
        deciding("raise", bad=bad, fine=fine).post_reward(batch, make_context(1))


def test_an_owner_whose_own_scale_is_out_of_range_leaves_verls_rewards():
    bad = dh.RewardDecision(rewards=torch.full((2,), 5.0), scale=HUGE)
    fine = dh.RewardDecision(shift=torch.tensor([1.0, 2.0]))
    batch = make_groups([1, 0.5])
    merged = deciding("disable", bad=bad, fine=fine).post_reward(batch, make_context(1))
    assert batch.with_token_field("rm_scores", merged.rewards).rewards.tolist() == [2.0, 2.5] and merged.owner == ""
    alone = deciding("disable", bad=bad).post_reward(batch, make_context(1))
    assert alone.rewards is None


def test_rewards_that_no_float32_can_hold_are_their_owners_failure():
    bad = dh.RewardDecision(rewards=-HUGE)
    manager = deciding("disable", bad=bad)
    assert manager.post_reward(make_groups([1, 0]), make_context(1)).rewards is None and manager.disabled == ("bad",)
    with pytest.raises(dh.DecisionError, match="rewards are beyond float32 at 2 of 2 responses, first in row 0"):
        deciding("raise", bad=bad).post_reward(make_groups([1, 0]), make_context(1))


def test_added_rows_that_the_host_cannot_use_are_their_plugins_failure(caplog):
    def check(rows, origin):
        for row in rows:
            if row.response == "?":
                raise dh.DecisionError(origin, "add[0]: no such word")

    keep = torch.tensor([True, False])
    bad = dh.RewardDecision(add=[dh.AddedRow("a", "?", 1.0)], keep=keep)
    fine = dh.RewardDecision(add=[dh.AddedRow("a", "b", 1.0)])
    manager = deciding("disable", bad=bad, fine=fine)
    merged = manager.post_reward(make_groups([1, 0]), make_context(1), check)
    assert [(label, row.response) for label, row in merged.add] == [("fine", "b")] and merged.row_keep is None
    assert manager.disabled == ("bad",) and "no such word" in caplog.text
    with pytest.raises(dh.DecisionError, match="plugin 'bad' .*no such word"):
        deciding("raise", bad=bad, fine=fine).post_reward(make_groups([1, 0]), make_context(1), check)


def test_a_declared_field_that_is_not_there_is_its_plugins_failure(caplog):
    needs = {"post_advantage": ("advantages", "entropy", "values")}
    plugins = {"bad": Decides(FINE, requires=needs), "fine": Decides(FINE, requires={})}
    built = {}
    for on_error in ("raise", "disable"):
        built[on_error] = dh.HookManager.from_config(
            {"on_error": on_error}, estimator="grpo", has_groups=True, extra_plugins=plugins
        )
    gone = ("post_advantage", STEP, {"entropy", "values"}, {"advantages"})
    with pytest.raises(dh.DecisionError, match="requires the batch field 'entropy', which is not there"):
        built["raise"].refuse_missing(*gone)
    with pytest.raises(dh.DecisionError, match="the batch has advantages, entropies; did you mean 'entropies'"):
        built["raise"].refuse_missing(*gone[:3], {"advantages", "entropies"})
    manager = built["disable"]
    manager.refuse_missing("post_advantage", STEP, {"other"}, {"advantages"})
    assert manager.disabled == ()
    manager.refuse_missing(*gone)
    assert manager.disabled == ("bad",) and len(caplog.records) == 1 and "'entropy'" in caplog.text
    assert manager.required_fields("post_advantage", STEP) == {"rm_scores"}


NOBODY = {
    "a product of weights and scales": (
        dh.UpdateDecision(weights=torch.full((2,), 1e30), normalize="none"),
        dh.UpdateDecision(update_scale=1e30),
        "product of weights and scales of 'a', 'b' overflows float32",
    ),
    "a sum of adjustments": (
        dh.RewardDecision(scale=torch.full((2,), 1e30)),
        dh.RewardDecision(scale=torch.full((2,), 1e30)),
        "scales and shifts of 'a' and 'b' take rewards out of range",
    ),
    "two baselines": (
        dh.RewardDecision(keep=torch.tensor([True, False]), advantages="kept"),
        dh.RewardDecision(keep=torch.tensor([False, True]), advantages="group"),
        "one batch has one baseline",
    ),
}


@pytest.mark.parametrize("case", NOBODY)
@pytest.mark.parametrize("on_error", ["raise", "disable"])
def test_what_is_no_single_plugins_fault_stops_the_run_in_any_case(case, on_error):
    one, other, text = NOBODY[case]

    def run(**decisions):
        manager = deciding(on_error, **decisions)
        if isinstance(one, dh.RewardDecision):
            manager.post_reward(make_groups([1, 0]), make_context(1))
        else:
            manager.post_advantage(make_groups([1, 0]), make_context(1), TOKEN)
        assert manager.disabled == ()

    with pytest.raises(dh.DecisionError, match=text):
        run(a=one, b=other)
    run(a=one)
    run(b=other)


def test_scales_too_large_to_add_up_are_judged_by_the_rewards_they_make():
    big = dh.RewardDecision(scale=torch.full((2,), 1e308, dtype=torch.float64))
    batch = make_groups([0, 0])
    merged = deciding("raise", big=big).post_reward(batch, make_context(1))
    assert batch.with_token_field("rm_scores", merged.rewards).rewards.tolist() == [0, 0]
    assert merged.metrics["dataflex/big/reward_scale"] == pytest.approx(1e308)
    with pytest.raises(dh.DecisionError, match="scales and shifts of 'big' and 'two' take rewards out of range"):
        deciding("disable", big=big, two=big).post_reward(batch, make_context(1))
