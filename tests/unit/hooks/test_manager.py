"""Calling plugins: order, warm-up, ownership, and errors that say who, where and when."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch

from dataflex_hooks import (
    DecisionError,
    HookManager,
    LossCoefficients,
    PluginError,
    RewardDecision,
    StepContext,
    UpdateDecision,
    hookimpl,
)


class Hook:
    """A plugin whose `post_advantage` is the given function."""

    def __init__(self, decide, **attributes):
        self.decide = decide
        vars(self).update(attributes)

    @hookimpl
    def post_advantage(self, batch, ctx):
        return self.decide(batch, ctx)


class RewardHook(Hook):
    @hookimpl
    def post_reward(self, batch, ctx):
        return self.decide(batch, ctx)

    @hookimpl
    def post_advantage(self):
        return None


@pytest.fixture
def batch(batches):
    return batches.groups([1, 0], [0, 0])


def test_plugins_are_called_one_by_one_in_order_over_two_steps(batches, token_mean):
    calls = []

    class Recorder:
        def __init__(self, label):
            self.label = label

        @hookimpl
        def post_reward(self, ctx):
            calls.append((ctx.step, "post_reward", self.label))

        @hookimpl
        def post_advantage(self, ctx):
            calls.append((ctx.step, "post_advantage", self.label))

    manager = HookManager()
    for label in ("second", "first", "third"):
        manager.register(label, Recorder(label), warmup_step=2 if label == "first" else 0)
    batch = batches.groups([1, 0])
    for step in (1, 2):
        ctx = StepContext(step=step)
        assert not manager.post_reward(batch, ctx).changed
        assert not manager.post_advantage(batch, ctx, token_mean).changed
    assert calls == [
        (1, "post_reward", "second"),
        (1, "post_reward", "third"),
        (1, "post_advantage", "second"),
        (1, "post_advantage", "third"),
        (2, "post_reward", "second"),
        (2, "post_reward", "first"),
        (2, "post_reward", "third"),
        (2, "post_advantage", "second"),
        (2, "post_advantage", "first"),
        (2, "post_advantage", "third"),
    ]


def test_required_fields_are_the_union_of_active_plugins():
    manager = HookManager()
    manager.register("a", Hook(None, requires={"post_advantage": ["entropy", "uid"], "post_reward": ("x",)}))
    manager.register("b", Hook(None, requires={"post_advantage": ("token_level_scores", "values")}), warmup_step=5)
    # Rewards are logged over all rows and over those kept, whoever is called.
    assert manager.required_fields("post_advantage", 0) == {"entropy", "rm_scores"}
    assert manager.required_fields("post_advantage", 5) == {"entropy", "rm_scores", "values"}
    assert HookManager().required_fields("post_advantage", 5) == frozenset()
    assert manager.required_fields("post_reward", 5) == frozenset()
    assert not manager.active("post_reward", 5)


def test_config_order_does_not_change_the_result(batch, ctx):
    def plugin(seed):
        weights = torch.rand(4, generator=torch.Generator().manual_seed(seed)) * 10**seed
        return Hook(lambda batch, ctx: UpdateDecision(weights=weights))

    plugins = {"a": plugin(1), "b": plugin(2), "c": plugin(3)}
    coefficients = LossCoefficients("sequence")
    results = [
        HookManager({label: plugins[label] for label in order}).post_advantage(batch, ctx, coefficients).weights
        for order in ("abc", "cab", "bca")
    ]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_plugins_exception_names_plugin_hook_and_step_and_is_chained(batch, ctx, token_mean):
    def fail(batch, ctx):
        return batch.values("entropy")

    with pytest.raises(PluginError) as caught:
        HookManager({"ok": Hook(lambda b, c: None), "bad": Hook(fail)}).post_advantage(batch, ctx, token_mean)
    text = str(caught.value)
    assert text.startswith(
        "plugin 'bad' (no distribution) in post_advantage at step 3: FieldError: no token field 'entropy'"
    )
    assert "there is: advantages, domain, old_log_probs, prompts, response_mask, responses, rm_scores, uid" in text
    assert caught.value.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_the_distribution_is_in_the_message(batches, ctx, token_mean):
    block = {"mechanism": "select", "scorer": "token_prob", "actuator": "threshold_band"}
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    batch = batches.build(batches.rows([[1, 0]]), without=["old_log_probs"])
    with pytest.raises(
        PluginError, match=r"plugin 'select' \(dataflex-verl \d+\.\d+.*\) in post_advantage at step 3: FieldE"
    ):
        manager.post_advantage(batch, ctx, token_mean)


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda b, c: 1, r"must return UpdateDecision or None, got an object of builtins\.int"),
        (lambda b, c: RewardDecision(), "must return UpdateDecision or None, got an object of .*RewardDecision"),
        (lambda b, c: UpdateDecision(weights=-torch.ones(4)), "weights are negative at 4 of 4 responses"),
        (
            lambda b, c: UpdateDecision(mask=torch.ones(4)),
            "returned mask, but provides only skip_update, weights: add it to",
        ),
        (lambda b, c: b.values("advantages").add_(1) and None, "changed advantages in place; batches are read-only"),
        (lambda b, c: b.batch["rm_scores"].zero_() and None, r"changed rm_scores \(padded\) in place"),
        (lambda b, c: b.rewards.zero_() and None, "changed rewards in place"),
    ],
)
def test_unusable_decisions_name_the_plugin(batch, ctx, token_mean, decide, message):
    plugin = Hook(decide, provides={"weights", "skip_update"})
    expected = r"plugin 'bad' \(no distribution\) in post_advantage at step 3: .*" + message
    with pytest.raises(PluginError, match=expected):
        HookManager({"bad": plugin}).post_advantage(batch, ctx, token_mean)


def test_mutation_is_blamed_even_when_the_plugin_fails_afterwards(batch, ctx, token_mean):
    def change_and_fail(batch, ctx):
        batch.values("advantages").zero_()
        raise RuntimeError("later")

    manager = HookManager({"ok": Hook(lambda b, c: None), "bad": Hook(change_and_fail)})
    with pytest.raises(DecisionError, match="'bad'.*changed advantages in place") as caught:
        manager.post_advantage(batch, ctx, token_mean)
    assert isinstance(caught.value.__cause__, RuntimeError)


def disabling(plugin_module):
    return {"plugins": {"bad": {"plugin": plugin_module, "on_error": "disable"}}}


def test_on_error_disable_logs_once_and_goes_on(distribution, batch, token_mean, caplog):
    source = """
        from dataflex_hooks import hookimpl
        class Bad:
            @hookimpl
            def post_advantage(self, batch):
                raise RuntimeError("broken")
    """
    distribution("acme-bad", {}, {"acme_bad": source})
    manager = HookManager.from_config(disabling("acme_bad:Bad"), estimator="grpo", has_groups=True)
    with caplog.at_level(logging.ERROR, logger="dataflex_hooks"):
        for step in (1, 2):
            merged = manager.post_advantage(batch, StepContext(step=step), token_mean)
            assert merged.metrics["dataflex/bad/disabled"] == 1.0 and not merged.changed
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info
    assert "plugin 'bad' (no distribution) in post_advantage at step 1 failed and is disabled" in record.getMessage()
    assert not manager.active("post_advantage", 3)


def test_on_error_disable_does_not_excuse_mutation(distribution, batch, ctx, token_mean):
    source = """
        from dataflex_hooks import hookimpl
        class Bad:
            @hookimpl
            def post_advantage(self, batch):
                batch.values("advantages").zero_()
                raise RuntimeError("broken")
    """
    distribution("acme-bad", {}, {"acme_bad_2": source})
    manager = HookManager.from_config(disabling("acme_bad_2:Bad"), estimator="grpo", has_groups=True)
    with pytest.raises(DecisionError, match="changed advantages in place"):
        manager.post_advantage(batch, ctx, token_mean)


def test_the_reward_owner_runs_first_and_others_see_its_rewards(batches, ctx):
    batch = batches.build([batches.Row("a", 0, length=3, reward=1.0), batches.Row("a", 1, length=1, reward=0.0)])
    seen = []
    manager = HookManager(
        {
            "watcher": RewardHook(lambda b, c: seen.append(b.rewards.tolist())),
            "owner": RewardHook(lambda b, c: RewardDecision(rewards=b.rewards + 2), provides={"rewards"}),
        }
    )
    merged = manager.post_reward(batch, ctx)
    assert (merged.owner, merged.per_token) == ("owner", False)
    assert merged.rewards.dtype == torch.float32 and merged.rewards.tolist() == [0, 0, 3, 2]
    assert seen == [[3.0, 2.0]]
    assert batch.rewards.tolist() == [1.0, 0.0]


def test_rewards_per_token_are_taken_as_they_are(batches, ctx):
    batch = batches.groups([1, 0])
    decide = lambda b, c: RewardDecision(rewards=b.to_padded(torch.tensor([1.0, -2.0, 3.0, 4.0])))  # noqa: E731
    merged = HookManager({"owner": RewardHook(decide, provides={"rewards"})}).post_reward(batch, ctx)
    assert merged.per_token and merged.rewards.tolist() == [1.0, -2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("rewards", "provides", "message"),
    [
        (torch.ones(2), set(), "returned rewards, but provides only nothing"),
        (torch.ones(3), {"rewards"}, r"rewards: shape \(3,\) is none of"),
        (
            torch.tensor([1.0, torch.nan]),
            {"rewards"},
            "rewards are NaN or infinite at 1 of 2 responses, first in row 1",
        ),
    ],
)
def test_unusable_rewards_name_the_plugin(batches, ctx, rewards, provides, message):
    manager = HookManager({"owner": RewardHook(lambda b, c: RewardDecision(rewards=rewards), provides=provides)})
    with pytest.raises(DecisionError, match=r"plugin 'owner' .* in post_reward at step 3: " + message):
        manager.post_reward(batches.groups([1, 0]), ctx)


def test_a_reward_decision_without_rewards_changes_nothing(batches, ctx):
    manager = HookManager({"owner": RewardHook(lambda b, c: RewardDecision(), provides={"rewards"})})
    assert not manager.post_reward(batches.groups([1, 0]), ctx).changed


def test_the_context_is_read_only():
    metrics = {"x": 1.0}
    ctx = StepContext(step=1, last_metrics=metrics)
    metrics["x"] = 2.0
    assert ctx.last_metrics["x"] == 1.0
    with pytest.raises(TypeError):
        ctx.last_metrics["x"] = 3.0
    with pytest.raises(AttributeError):
        ctx.step = 2
