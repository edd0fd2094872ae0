"""``run_hooks``: plugins decide as they would in a run, and the outcome says what that came to."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import dataflex_hooks as df
from dataflex_hooks.plugins.mix import MixPlugin
from dataflex_hooks.testing import (
    HookRunner,
    make_context,
    make_groups,
    make_prompts,
    make_stats,
    random_batch,
    run_hooks,
)


class KeepShort:
    provides = {"mask"}

    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(mask=batch.lengths <= 3, reason="too_long")


class DropFailed:
    provides = {"keep"}

    @df.hookimpl
    def post_reward(self, batch, ctx):
        return df.RewardDecision(keep=batch.rewards > 0)


class Halve:
    provides = {"rewards"}
    requires = {"post_reward": ("rm_scores",)}

    @df.hookimpl
    def post_reward(self, batch, ctx):
        return df.RewardDecision(rewards=1 - batch.rewards / 2)


class Double:
    provides = {"weights"}

    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(weights=torch.full((batch.bs,), 2.0), normalize="none", update_scale=None)


class Seen:
    requires = {"post_advantage": ("advantages", "rm_scores")}

    @df.hookimpl
    def post_advantage(self, batch, ctx):
        self.batch, self.ctx = batch, ctx
        return None


class Even:
    requires = {"pre_rollout": ("level",)}

    @df.hookimpl
    def pre_rollout(self, candidates, ctx):
        self.columns = sorted(candidates.columns)
        admit = torch.from_numpy(candidates.columns["level"] % 2 == 0)
        return df.RolloutDecision(admit=admit)


BATCH = make_groups([1, 0], [1, 1, 0], lengths=[[2, 3], [4, 3, 5]])


def test_a_mask_is_seen_in_kept_rows_and_weights():
    outcome = run_hooks(KeepShort(), BATCH)
    assert outcome.kept_rows == [0, 1, 3] and outcome.in_batch.all()
    assert outcome.row_weights.tolist() == [1, 1, 0, 1, 0]
    assert outcome.weights.tolist() == [1] * 5 + [0] * 4 + [1] * 3 + [0] * 5
    assert outcome.metrics["dataflex/kept_frac"] == pytest.approx(0.6)
    assert outcome.decisions["plugin"]["post_advantage"].reason == "too_long"


def test_without_plugins_nothing_is_decided():
    outcome = run_hooks(None, BATCH)
    assert outcome.kept.all() and (outcome.weights == 1).all() and outcome.decisions == {}
    assert torch.equal(outcome.rewards, BATCH.rewards)


def test_rows_dropped_at_one_hook_are_gone_at_the_next():
    seen = Seen()
    outcome = run_hooks({"drop": DropFailed(), "short": KeepShort(), "seen": seen}, BATCH)
    assert outcome.in_batch.tolist() == [True, False, True, True, False]
    assert outcome.kept_rows == [0, 3] and outcome.row_weights.tolist() == [1, 0, 0, 1, 0]
    assert seen.batch.rewards.tolist() == [1, 1, 1]
    assert outcome.decisions["seen"] == {"post_advantage": None}


def test_new_rewards_are_in_the_outcome_and_in_the_advantages():
    seen = Seen()
    outcome = run_hooks({"halve": Halve(), "seen": seen}, BATCH)
    assert outcome.rewards.tolist() == [0.5, 1.0, 0.5, 0.5, 1.0]
    assert seen.batch.values("advantages")[0] < 0 < BATCH.values("advantages")[0]
    run_hooks({"halve": Halve(), "seen": seen}, BATCH, ctx=make_context(1, estimator="gae"))
    assert torch.equal(seen.batch.values("advantages"), BATCH.values("advantages"))


def test_rules_and_coefficients_are_those_of_the_run():
    plain = run_hooks(KeepShort(), BATCH).row_weights
    scaled = run_hooks(KeepShort(), BATCH, config={"mask_scale": "kept"}).row_weights
    by_row = run_hooks(KeepShort(), BATCH, config={"mask_scale": "kept"}, loss="sequence").row_weights
    assert plain[0] == 1 and scaled[0] == pytest.approx(17 / 8) and by_row[0] == pytest.approx(5 / 3)


def test_plugins_of_a_configuration_stack_with_given_ones():
    top = {"plugin": "select", "scorer": "advantage_magnitude", "actuator": "topk_fraction"}
    outcome = run_hooks({"double": Double()}, BATCH, config={"plugins": {"top": top}})
    assert set(outcome.row_weights.tolist()) == {0.0, 2.0}
    assert set(outcome.decisions) == {"top", "double"}


def test_only_declared_fields_are_handed_over():
    class Undeclared:
        @df.hookimpl
        def post_advantage(self, batch, ctx):
            return df.UpdateDecision(weights=batch.values("advantages").abs())

    with pytest.raises(df.PluginError, match="no token field 'advantages'.*requires"):
        run_hooks(Undeclared(), BATCH)


class KeepsTwo:
    def __init__(self, advantages):
        self.advantages = advantages

    @df.hookimpl
    def post_reward(self, batch):
        alone = (batch.uid == "uid_1") & (batch.session_number.numpy() > 0)
        return df.RewardDecision(keep=(batch.session_number < 2) & ~torch.from_numpy(alone), advantages=self.advantages)


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [("kept", [0.7071, -0.7071, 1.5]), ("group", [1.5, -0.5, 1.5]), (None, [1.5, -0.5, 1.5])],
)
def test_advantages_after_a_drop_are_over_the_rows_that_a_run_takes(advantages, expected):
    seen = Seen()
    run_hooks({"drops": KeepsTwo(advantages), "sees": seen}, make_groups([1, 0, 0, 0], [1, 0, 0, 0], lengths=1))
    assert seen.batch.values("advantages").tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["advantages", "old_log_probs", "nothing_like_it"])
def test_a_field_that_no_run_has_at_that_hook_is_refused(name):
    class Early:
        requires = {"post_reward": (name,)}

        @df.hookimpl
        def post_reward(self, batch, ctx):
            return None

    with pytest.raises(df.PluginError, match=f"requires the batch field '{name}', which is not there"):
        run_hooks(Early(), BATCH)


def test_registration_is_that_of_a_run():
    with pytest.raises(df.ConfigError, match="^dataflex.plugins.b: got rewards from 'b' .* and 'a'"):
        run_hooks({"a": Halve(), "b": Halve()}, BATCH)


def test_a_plugin_without_a_label_is_named_by_its_class():
    class Half:
        @df.hookimpl
        def post_advantage(self, batch, ctx):
            return None

        def state_dict(self):
            return {}

    with pytest.raises(df.ConfigError, match="^Half: got state_dict without load_state_dict"):
        run_hooks(Half(), BATCH)
    with pytest.raises(df.ConfigError, match="^dataflex.plugins.mine.plugin: got state_dict without load_state_dict"):
        run_hooks({"mine": Half()}, BATCH)
    mix = MixPlugin("reward_difficulty", {"name": "static", "params": {"domains": ["math", "code"]}})
    with pytest.raises(df.ConfigError, match="^actuator.params.domains: got "):
        HookRunner(mix, domains=["math", "law"])


def test_candidates_are_admitted_by_declared_columns():
    even = Even()
    outcome = run_hooks(even, prompts=make_prompts(4, columns={"level": [1, 2, 3, 4], "other": [0] * 4}))
    assert outcome.admitted.tolist() == [False, True, False, True] and even.columns == ["level"]
    assert outcome.priority is None and outcome.proportions is None
    with pytest.raises(df.FieldError, match="columns level at pre_rollout; the prompts have other"):
        run_hooks(even, prompts=make_prompts(1, columns={"other": [0]}))


def test_a_mixer_decides_from_batches_over_several_steps():
    run = HookRunner(MixPlugin(scorer="reward_difficulty", actuator="tscl"))
    shares = [run.step(random_batch(seed)).proportions for seed in range(3)]
    assert np.allclose([share.sum() for share in shares], 1.0)
    assert run.domains == ("code", "math") and not np.allclose(shares[1], shares[2])
    assert np.array_equal(run.proportions, shares[2]) and run.last_step == 3


def test_statistics_can_be_given():
    class Best:
        provides = {"proportions"}

        @df.hookimpl
        def on_domain_stats(self, stats, ctx):
            return df.DomainDecision(
                proportions=torch.from_numpy(stats.scores["reward"] / stats.scores["reward"].sum())
            )

    outcome = run_hooks(Best(), stats=make_stats(("a", "b"), reward=[0.9, 0.3]))
    assert np.allclose(outcome.proportions, [0.75, 0.25])
    assert outcome.kept.numel() == 0 and outcome.rewards is None


class Fails:
    @df.hookimpl
    def post_advantage(self, batch, ctx):
        raise OSError("no connection")


def test_the_block_s_settings_of_calls_hold_for_plugins_given_directly():
    block = {"on_error": "disable", "warmup_step": 3, "slow_plugin_seconds": 0.5}
    runner = HookRunner({"bad": Fails(), "short": KeepShort()}, config=block)
    told = [(row["on_error"], row["warmup_step"], row["slow_plugin_seconds"]) for row in runner.hooks.plan()]
    assert told == [("disable", 3, 0.5)] * 2
    assert runner.step(BATCH, ctx=make_context(2)).kept_rows == [0, 1, 2, 3, 4]
    late = runner.step(BATCH, ctx=make_context(3))
    assert late.kept_rows == [0, 1, 3] and runner.hooks.disabled == ("bad",)
    assert late.metrics["dataflex/bad/disabled"] == 1 and late.metrics["dataflex/short/disabled"] == 0


@pytest.mark.parametrize("needs", ["rm_scores", "values"])
def test_a_mixer_that_fails_within_a_step_leaves_the_rest_of_it_to_the_others(needs):
    class Mix:
        provides, requires, observes = {"proportions"}, {"post_reward": (needs,)}, "post_reward"

        @df.hookimpl
        def post_reward(self, batch):
            return None

        @df.hookimpl
        def on_domain_stats(self, stats):
            return df.DomainDecision(proportions=torch.tensor([0.5, 0.5]))

        def observe(self, batch, ctx):
            raise OSError("no connection")

    runner = HookRunner({"mix": Mix(), "short": KeepShort()}, domains=("x", "y"), config={"on_error": "disable"})
    batch = make_groups([1, 0, 1], [0, 1], lengths=[[3, 5, 2], [6, 4]], domains=["x", "y"])
    for _ in range(2):
        outcome = runner.step(batch)
        assert (outcome.kept_rows, outcome.proportions) == ([0, 2], None)
        assert runner.hooks.disabled == ("mix",) and outcome.metrics["dataflex/short/disabled"] == 0
    with pytest.raises(df.PluginError, match="no connection|'values', which is not there"):
        HookRunner({"mix": Mix(), "short": KeepShort()}, domains=("x", "y")).step(batch)


def test_without_a_block_plugins_given_directly_have_the_documented_defaults():
    runner = HookRunner({"bad": Fails()})
    (row,) = runner.hooks.plan()
    assert (row["on_error"], row["warmup_step"], row["slow_plugin_seconds"]) == ("raise", 0, 30.0)
    with pytest.raises(df.PluginError, match="no connection"):
        runner.step(BATCH, ctx=make_context(1))


def test_a_slow_plugin_given_directly_is_counted_under_the_block_s_limit():
    class Sleeps:
        @df.hookimpl
        def post_advantage(self, batch, ctx):
            time.sleep(0.02)

    slow = "dataflex/plugin/slow_total"
    assert run_hooks(Sleeps(), BATCH, config={"slow_plugin_seconds": 0.01}).metrics[slow] == 1
    assert slow not in run_hooks(Sleeps(), BATCH, config={"slow_plugin_seconds": 10}).metrics
