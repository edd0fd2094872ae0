"""Every branch of the trainer class, over a mocked verl trainer.

The pattern for changes to ``DataFlexTrainer``: lay it over a base class whose methods are mocks, replace the bridge by
mocks, and say which call reaches which.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from dataflex_hooks import (
    AddedRow,
    ConfigError,
    DecisionError,
    HookManager,
    LossCoefficients,
    RewardDecision,
    UpdateDecision,
    hookimpl,
)
from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.decision_log.schema import Facts

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")

from dataflex_verl import added_checks, added_rows  # noqa: E402
from dataflex_verl import apply as apply_module  # noqa: E402
from dataflex_verl import trainer as trainer_module  # noqa: E402
from dataflex_verl.bridge import FetchedRows  # noqa: E402
from dataflex_verl.decision_log import RunLog  # noqa: E402
from dataflex_verl.trainer import DataFlexTrainer, plan_lines  # noqa: E402


class Plugin:
    """Decides at both hooks; ``decision`` None means it has no opinion."""

    provides = {"rewards", "mask", "weights", "update_scale", "skip_update"}
    requires = {"post_advantage": ("advantages",)}

    def __init__(self, decision=None, rewards=None) -> None:
        self.decision, self.rewards = decision, rewards
        self.contexts = []

    @hookimpl
    def post_reward(self, batch, ctx):
        return None if self.rewards is None else RewardDecision(rewards=self.rewards)

    @hookimpl
    def post_advantage(self, batch, ctx):
        self.contexts.append(ctx)
        return self.decision


def view() -> RolloutBatch:
    ones = torch.ones(4)
    fields = {"response_mask": ones.long(), "rm_scores": ones, "advantages": ones}
    return RolloutBatch(["a_0_0", "a_1_0"], torch.tensor([0, 2, 4]), {}, fields)


@pytest.fixture
def base(mocker):
    """A class with mocks in the place of the verl methods that ours extends; ``base.calls`` keeps their order."""
    calls = mocker.Mock()
    calls.advantage.return_value = SimpleNamespace(extra_info={})

    class Base:
        def __init__(self, config):
            self.config = config
            self.trainer_mode = config.trainer.v1.trainer_mode
            self.global_steps, self.local_trigger_step = 1, 0

        def fit(self, agent_loop_manager):
            return calls.fit(agent_loop_manager)

        def step(self, metrics, timing_raw):
            metrics["step"] = 1.0
            return calls.step(metrics, timing_raw)

        def _balance_batch(self, batch, metrics, *args, **kwargs):
            return calls.balance(batch, *args, **kwargs)

        def _compute_advantage(self, batch, metrics):
            return calls.advantage(batch)

        def _update_critic(self, batch, metrics):
            return calls.critic(batch)

        def _update_actor(self, batch, metrics):
            return calls.actor(batch)

        def _save_checkpoint(self):
            calls.save()

        def _load_checkpoint(self):
            calls.load()

        def _compute_metrics(self, batch, metrics, *args, **kwargs):
            metrics["late"] = 2.0
            calls.metrics(*args, **kwargs)

    Base.calls = calls
    return Base


@pytest.fixture
def bridge(mocker):
    fake = mocker.patch.object(trainer_module, "bridge")
    mocker.patch.object(apply_module, "bridge", fake)
    fake.fetch.side_effect = lambda batch, fields, **kwargs: FetchedRows(view(), ["a_0_0", "a_1_0"], frozenset(), None)
    return fake


@pytest.fixture
def make(mocker, base, bridge):
    """Build the trainer with plugins by label and a ``dataflex`` block."""

    def build(objects=None, mode="dataflex_sync", **block):
        config = OmegaConf.create(
            {
                "trainer": {"v1": {"trainer_mode": mode}},
                "algorithm": {"adv_estimator": "grpo"},
                "data": {"seed": 5},
                "dataflex": block or None,
            }
        )
        OmegaConf.set_struct(config, True)
        hooks = HookManager.from_config(block, estimator="grpo", has_groups=True, extra_plugins=objects)
        prepare = mocker.patch.object(trainer_module, "prepare", return_value=(hooks, LossCoefficients("token")))
        trainer = type("Trainer", (DataFlexTrainer, base), {})(config)
        prepare.assert_called_once_with(config)
        return trainer

    return build


def meta():
    return SimpleNamespace(extra_info={"temperature": 1.0}, name="fresh")


@pytest.mark.parametrize("mode", ["dataflex_sync", "dataflex_mix_sync"])
def test_verl_sees_its_own_mode_name(make, mode):
    trainer = make(mode=mode)
    assert trainer.trainer_mode == trainer.config.trainer.v1.trainer_mode == "sync"


def test_configuration_errors_come_before_verls_constructor(mocker, base):
    mocker.patch.object(trainer_module, "prepare", side_effect=ConfigError([]))
    constructed = mocker.spy(base, "__init__")
    config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "dataflex_sync"}}})
    with pytest.raises(ConfigError):
        type("Trainer", (DataFlexTrainer, base), {})(config)
    constructed.assert_not_called()


def test_without_plugins_every_call_falls_through(make, base, bridge):
    trainer, metrics, batch = make(), {}, meta()
    assert trainer._balance_batch(batch, metrics, keep_minibatch=True) is base.calls.balance.return_value
    base.calls.balance.assert_called_once_with(batch, keep_minibatch=True)
    assert trainer._compute_advantage(batch, metrics) is base.calls.advantage.return_value
    assert trainer._update_critic(batch, metrics) is base.calls.critic.return_value
    assert trainer._update_actor(batch, metrics) is base.calls.actor.return_value
    bridge.fetch.assert_not_called()
    assert metrics == {}


def test_post_reward_comes_before_balancing_and_passes_new_rewards_on(make, base, bridge):
    trainer, batch = make({"p": Plugin(rewards=torch.tensor([1.0, 2.0]))}), meta()
    trainer._balance_batch(batch, {})
    assert bridge.fetch.call_args.args == (batch, frozenset({"rm_scores"}))
    (given, name, rewards), _ = bridge.write_field.call_args
    assert given is batch and name == "rm_scores" and rewards.values.tolist() == [0.0, 1.0, 0.0, 2.0]
    base.calls.balance.assert_called_once_with(bridge.write_field.return_value)


def test_post_reward_without_a_decision_writes_nothing(make, base, bridge):
    batch = meta()
    make({"p": Plugin()})._balance_batch(batch, {})
    bridge.write_field.assert_not_called()
    base.calls.balance.assert_called_once_with(batch)


def test_post_advantage_comes_after_verls_advantages_and_keeps_extra_info(make, base, bridge):
    stored = SimpleNamespace(extra_info={})
    base.calls.advantage.return_value = stored
    plugin = Plugin(UpdateDecision(mask=torch.tensor([True, False])))
    metrics: dict = {}
    result = make({"p": plugin})._compute_advantage(meta(), metrics)
    assert bridge.fetch.call_args.args == (stored, frozenset({"advantages", "rm_scores"}))
    assert bridge.fetch.call_args.kwargs == {"with_weights": True}
    assert stored.extra_info == {"temperature": 1.0}
    (given, weights), _ = bridge.write_weights.call_args
    assert given is stored and weights.values.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert result is bridge.write_weights.return_value
    assert metrics["dataflex/kept_frac"] == 0.5 and metrics["dataflex/applied"] == 1.0
    assert metrics["timing_s/dataflex"] >= 0


def test_calls_of_both_hooks_are_logged_once_an_update(make):
    trainer, batch = make({"p": Plugin(rewards=torch.tensor([1.0, 2.0]))}), meta()
    for _ in range(2):
        metrics: dict = {}
        trainer._balance_batch(batch, metrics)
        trainer._compute_advantage(batch, metrics)
        assert (metrics["dataflex/p/decided_total"], metrics["dataflex/p/abstained_total"]) == (1, 1)
        assert metrics["timing_s/dataflex/p"] > 0


def test_no_opinion_writes_nothing(make, base, bridge):
    assert make({"p": Plugin()})._compute_advantage(meta(), {}) is base.calls.advantage.return_value
    bridge.write_weights.assert_not_called()


def test_apply_to_advantages_scales_them_instead(make, bridge):
    plugin = Plugin(UpdateDecision(mask=torch.tensor([True, False])))
    result = make({"p": plugin}, apply_to="advantages")._compute_advantage(meta(), {})
    assert result is bridge.write_field.return_value
    (_, name, advantages), _ = bridge.write_field.call_args
    assert name == "advantages" and advantages.values.tolist() == [1.0, 1.0, 0.0, 0.0]
    bridge.write_weights.assert_not_called()


def test_shadow_mode_decides_and_changes_nothing(make, base, bridge):
    plugin = Plugin(UpdateDecision(mask=torch.tensor([True, False]), skip_update=True), rewards=torch.ones(2))
    trainer, metrics, batch = make({"p": plugin}, apply=False), {}, meta()
    trainer._balance_batch(batch, metrics)
    assert trainer._compute_advantage(batch, metrics) is base.calls.advantage.return_value
    trainer._update_actor(batch, metrics)
    base.calls.actor.assert_called_once()
    bridge.write_field.assert_not_called()
    bridge.write_weights.assert_not_called()
    assert metrics["dataflex/kept_frac"] == 0.5
    assert (metrics["dataflex/applied"], metrics["dataflex/skip_update"]) == (0.0, 1.0)


def test_skip_update_calls_neither_update_and_ends_with_the_step(make, base):
    plugin = Plugin(UpdateDecision(skip_update=True))
    trainer, batch = make({"p": plugin}), meta()
    advantages = trainer._compute_advantage(batch, {})
    assert trainer._update_critic(advantages, {}) is advantages
    assert trainer._update_actor(advantages, {}) is advantages
    base.calls.critic.assert_not_called()
    base.calls.actor.assert_not_called()
    plugin.decision = None
    trainer._balance_batch(batch, {})
    trainer._compute_advantage(batch, {})
    trainer._update_actor(batch, {})
    base.calls.actor.assert_called_once()


def test_missing_fields_are_named_with_what_is_stored(make, bridge):
    bridge.fetch.side_effect = lambda batch, fields, **kw: FetchedRows(
        view(), ["a_0_0", "a_1_0"], frozenset({"advantages"}), None
    )
    bridge.stored_fields.return_value = ["responses", "rm_scores"]
    with pytest.raises(DecisionError, match="'p'.*post_advantage.*'advantages'.*responses, rm_scores"):
        make({"p": Plugin()})._compute_advantage(meta(), {})


def test_a_field_that_is_not_there_takes_out_the_plugin_that_needs_it(make, bridge, caplog):
    bridge.fetch.side_effect = lambda batch, fields, **kw: FetchedRows(
        view(), ["a_0_0", "a_1_0"], frozenset({"values"} & fields), None
    )
    bridge.stored_fields.return_value = ("advantages", "rm_scores")
    bad, fine = Plugin(), Plugin(UpdateDecision(mask=torch.tensor([True, False])))
    bad.provides, bad.requires = {"mask"}, {"post_advantage": ("values",)}
    trainer, metrics = make({"bad": bad, "fine": fine}, on_error="disable"), {}
    for _ in range(2):
        trainer._compute_advantage(meta(), metrics)
    assert bad.contexts == [] and len(fine.contexts) == 2 and len(caplog.records) == 1
    assert metrics["dataflex/bad/disabled"] == 1 and metrics["dataflex/kept_frac"] == 0.5
    with pytest.raises(DecisionError, match="requires the batch field 'values', which is not there"):
        make({"bad": bad, "fine": fine})._compute_advantage(meta(), {})


class Adds:
    provides = frozenset({"add"})

    def __init__(self, response):
        self.rows = [AddedRow("ab", response, 1.0)]

    @hookimpl
    def post_reward(self, batch, ctx):
        return RewardDecision(add=self.rows)


@pytest.fixture
def adding(make, mocker):
    """A trainer whose vocabulary has 26 letters, and the rows that it stored by key."""
    limits = added_checks.Limits(prompt=4, response=3, vocabulary=26, log_probs=False, bypass=False)
    mocker.patch.object(added_checks.Limits, "of", return_value=limits)
    mocker.patch.object(trainer_module, "refuse_shuffle")
    put = mocker.patch.object(added_rows, "put")

    def build(objects, **block):
        trainer = make(objects, **block)
        trainer.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [ord(c) - 97 for c in text])
        return trainer, put

    return build


def test_added_rows_that_no_batch_can_hold_are_their_plugins_failure(adding, caplog):
    batch, metrics = SimpleNamespace(keys=["a_0_0"]), {}
    plugins = {"bad": Adds([1, 99]), "fine": Adds("xyz")}
    trainer, put = adding(plugins, on_error="disable")
    trainer._post_reward(batch, metrics)
    (_, rows, _), _ = put.call_args
    assert [row.response for row in rows.values()] == [[23, 24, 25]] and metrics["dataflex/added_rows"] == 1
    assert trainer.hooks.disabled == ("bad",) and "add[0]: response holds token id 99" in caplog.text
    with pytest.raises(DecisionError, match="plugin 'bad' .* in post_reward at step 1: add.0.: response holds token"):
        adding(plugins)[0]._post_reward(batch, {})
    shadow, put = adding(plugins, apply=False)
    put.reset_mock()
    assert shadow._post_reward(batch, {}) is batch
    put.assert_not_called()


def test_context_carries_the_step_and_the_last_steps_metrics(make):
    plugin = Plugin()
    trainer = make({"p": plugin})
    metrics: dict = {}
    trainer.step(metrics, {})
    metrics["critic/score/mean"] = 0.25  # verl adds metrics to the same dict after step()
    trainer.global_steps = 2
    trainer._compute_advantage(meta(), {})
    (ctx,) = plugin.contexts
    assert (ctx.step, ctx.local_update, ctx.mode, ctx.estimator, ctx.seed) == (2, 0, "sync", "grpo", 5)
    assert dict(ctx.last_metrics) == {"step": 1.0, "critic/score/mean": 0.25}
    with pytest.raises(TypeError):
        ctx.last_metrics["step"] = 2.0


@pytest.fixture
def files(mocker, base):
    """Mocks of writing and reading, in one record with verl's own calls: ``base.calls`` keeps the order."""
    mocker.patch.object(trainer_module.state_files, "write", base.calls.write)
    mocker.patch.object(trainer_module.state_files, "write_metrics", base.calls.write_metrics)
    mocker.patch.object(trainer_module.checkpoint, "restore", base.calls.restore)
    mocker.patch.object(trainer_module.checkpoint, "step_folder", return_value="global_step_1")
    mocker.patch.object(trainer_module.checkpoint, "resume_folder", base.calls.resume_folder)
    mocker.patch.object(trainer_module.checkpoint.Kept, "add", base.calls.kept)


def order(base):
    return [call[0] for call in base.calls.mock_calls]


def test_state_is_written_before_verls_checkpoint_and_metrics_after_they_are_complete(make, base, files):
    trainer, metrics = make({"p": Plugin()}), {}
    trainer.use_critic = False
    trainer.step(metrics, {})
    trainer._save_checkpoint()
    trainer._compute_metrics(meta(), metrics, {}, global_steps=1, epoch=0)
    assert order(base) == ["step", "write", "save", "kept", "metrics", "write_metrics"]
    assert base.calls.write.call_args.args[0] == "global_step_1"
    assert base.calls.write_metrics.call_args.args == (base.calls.write.return_value, 1, {"step": 1.0, "late": 2.0})
    # The next step was not saved: its metrics stay out of the checkpoint.
    trainer._compute_metrics(meta(), metrics, {}, global_steps=2, epoch=0)
    base.calls.write_metrics.assert_called_once()


def test_a_run_without_plugins_writes_no_state(make, base, files):
    trainer = make()
    trainer._save_checkpoint()
    trainer._compute_metrics(meta(), {}, {}, global_steps=1, epoch=0)
    assert order(base) == ["save", "metrics"]


def test_state_is_restored_from_the_folder_that_verl_resumes_from(make, base, files):
    base.calls.resume_folder.return_value = "global_step_4"
    base.calls.restore.return_value = {"reward": 0.5}
    plugin = Plugin()
    trainer = make({"p": plugin})
    trainer._load_checkpoint()
    assert order(base) == ["resume_folder", "load", "restore"]
    base.calls.restore.assert_called_once_with("global_step_4", trainer.hooks)
    trainer._compute_advantage(meta(), {})
    assert dict(plugin.contexts[0].last_metrics) == {"reward": 0.5}


def test_from_scratch_nothing_is_restored(make, base, files):
    base.calls.resume_folder.return_value = None
    make({"p": Plugin()})._load_checkpoint()
    assert order(base) == ["resume_folder", "load"]


def test_the_plan_says_what_runs(make):
    block = {"plugins": {"top": {"plugin": "select", "scorer": "reward_difficulty", "actuator": "topk_fraction"}}}
    text = "\n".join(plan_lines(make(**block).hooks, LossCoefficients("sequence", source="loss_mode=vanilla")))
    assert "top = select reward_difficulty -> topk_fraction at post_advantage from step 0" in text
    # A mask changes no other weight, so nothing averages 1.
    assert "average 1" not in text and "per sequence" not in text
    hooks = make(**block, mask_scale="kept").hooks
    assert "shares are counted per sequence (loss_mode=vanilla)" in "\n".join(
        plan_lines(hooks, LossCoefficients("sequence", source="loss_mode=vanilla"))
    )
    assert plan_lines(make().hooks, LossCoefficients("token")) == ["DataFlex plan: no plugin; the run is verl's own"]


class SlowDisk:
    """In the place of what writes a step; ``error`` is raised instead."""

    def __init__(self, mocker, error=None):
        self.written, self.error = [], error
        mocker.patch.object(RunLog, "_write", self.write)

    def write(self, records, info):
        time.sleep(0.2)
        if self.error is not None:
            raise self.error
        self.written += records


@pytest.fixture
def training(make, base, tmp_path):
    """A run with a log that hands over step 3, the last one before ``ends`` is called."""

    def train(ends=lambda: "verl's own"):
        trainer = make()
        trainer.log = RunLog(tmp_path, trainer.hooks, Facts())

        def steps(manager):
            trainer.log._records.append("step 3")
            trainer.log.end_of_step()
            return ends()

        base.calls.fit.side_effect = steps
        return trainer.fit("agents")

    return train


def test_training_ends_when_the_last_step_of_the_log_is_on_the_disk(training, mocker):
    disk = SlowDisk(mocker)
    assert training(lambda: list(disk.written)) == []
    assert disk.written == ["step 3"]


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_run_that_fails_has_its_last_whole_step_on_the_disk(training, mocker, error):
    disk = SlowDisk(mocker)

    def fails():
        raise error

    with pytest.raises(type(error)) as caught:
        training(fails)
    assert caught.value is error and disk.written == ["step 3"]


def test_a_last_step_that_cannot_be_written_is_an_error_and_hides_no_other(training, mocker, caplog):
    SlowDisk(mocker, OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        training()
    assert not caplog.records

    def fails():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        training(fails)
    (record,) = caplog.records
    assert "the decision log lacks its last step" in record.getMessage() and "disk full" in caplog.text


def test_without_a_log_training_is_verls_own(make, base):
    base.calls.fit.return_value = 5
    assert make().fit("agents") == 5
    base.calls.fit.assert_called_once_with("agents")
