"""The built-in plugins: scores reach actuators in the form they take, decisions come back for every row."""

from __future__ import annotations

import math

import pytest
import torch

from dataflex_hooks import (
    ConfigError,
    HookManager,
    LossCoefficients,
    PluginError,
    Reweighter,
    Scorer,
    Selector,
    StepContext,
    register_reweighter,
    register_scorer,
    register_selector,
)
from dataflex_hooks.plugins.reweight import ReweightPlugin
from dataflex_hooks.plugins.select import SelectPlugin


@pytest.fixture
def components(registry):
    """Components as a third party writes them: padded layout, `**kwargs`, no defaults of ours relied on."""

    class Seen:
        scores: torch.Tensor
        ctx: dict[str, object]

    @register_scorer("padded_advantages")
    class PaddedAdvantages(Scorer):
        requires = ("advantages", "uid", "token_level_rewards")
        granularity = "token"

        def __init__(self, offset=0.0, **kwargs):
            self.offset, self.host = offset, kwargs

        def score(self, batch, step_id, **ctx):
            Seen.ctx = {"step_id": step_id, **ctx}
            assert len(batch.non_tensor_batch["uid"]) == len(batch)
            return batch.batch["advantages"] + self.offset

    @register_scorer("given_scores")
    class GivenScores(Scorer):
        def __init__(self, scores, **kwargs):
            self.scores = scores

        def score(self, batch, step_id, **ctx):
            return torch.tensor(self.scores)

    @register_reweighter("as_given")
    class AsGiven(Reweighter):
        normalize = "none"

        def __init__(self, *, scorer, domains, window, **kwargs):
            self.host = (scorer, domains, window)

        def act(self, scores, batch, **ctx):
            Seen.scores = scores
            return scores.abs()

    @register_selector("rows")
    class Rows(Selector):
        def __init__(self, rows=None, **kwargs):
            self.rows = rows

        def act(self, scores, batch, **ctx):
            Seen.scores = scores
            return torch.tensor(self.rows) if isinstance(self.rows, list) else self.rows

    return Seen


@pytest.fixture
def batch(batches):
    row = batches.Row
    return batches.build(
        [
            row("a", 0, 0, length=3, advantage=(1.0, math.nan, 3.0), mask=(1, 0, 1)),
            row("a", 0, 1, length=1, advantage=6.0),
            row("b", 0, 0, length=2, advantage=(4.0, 2.0)),
        ]
    )


def test_a_published_reweighter_gets_token_scores_padded(components, batch, ctx):
    plugin = ReweightPlugin(scorer="padded_advantages", actuator="as_given", domains=["x"], window=5)
    decision = plugin.post_advantage(batch, ctx)
    assert components.scores.shape == (3, 3)
    assert components.scores[:, 2].tolist() == [3.0, 0.0, 0.0]
    assert decision.weights.shape == (3, 3)
    assert decision.normalize == "none"
    assert plugin.actuator.host == (plugin.scorer, ["x"], 5)
    assert plugin.scorer.host == {"domains": ["x"], "window": 5}


def test_scorers_are_told_the_step_and_the_rest_of_the_context(components, batch):
    ReweightPlugin(scorer="padded_advantages", actuator="as_given").post_advantage(
        batch, StepContext(step=7, estimator="rloo", last_metrics={"x": 1.0}, seed=5)
    )
    assert components.ctx == {
        "step_id": 7,
        "local_update": 0,
        "mode": "sync",
        "estimator": "rloo",
        "last_metrics": {"x": 1.0},
        "seed": 5,
    }


def test_token_scores_become_session_scores_for_a_selector(components, batch, ctx):
    plugin = SelectPlugin(scorer="padded_advantages", actuator={"name": "rows", "params": {"rows": [2]}})
    decision = plugin.post_advantage(batch, ctx)
    assert components.scores.tolist() == [4.0, 4.0, 3.0]
    assert decision.mask.tolist() == [False, False, True]
    assert decision.reason == "padded_advantages/rows"


def test_a_session_is_kept_whole_when_one_of_its_rows_is(components, batch, ctx):
    plugin = SelectPlugin(scorer="padded_advantages", actuator={"name": "rows", "params": {"rows": [1]}})
    assert plugin.post_advantage(batch, ctx).mask.tolist() == [True, True, False]


def test_a_selector_may_keep_nothing(components, batch, ctx):
    plugin = SelectPlugin(scorer="padded_advantages", actuator={"name": "rows", "params": {"rows": []}})
    assert plugin.post_advantage(batch, ctx).mask.tolist() == [False] * 3


def test_response_scores_are_broadcast_to_a_token_reweighter(registry, batch, ctx, components):
    plugin = ReweightPlugin(
        scorer={"name": "given_scores", "params": {"scores": [0.0, 0.5, 1.0]}}, actuator="advantage_reweight"
    )
    assert plugin.post_advantage(batch, ctx).weights.tolist() == pytest.approx([0.625] * 4 + [1.0] * 2)


def test_prompt_scores_are_passed_on_unaveraged(batches, ctx):
    """A third output row must not move 1/5 off 0.2, which the strict band would then admit."""
    rows = [batches.Row("a", 0, output, reward=1.0) for output in range(3)]
    rows += [batches.Row("a", session) for session in range(1, 5)]
    plugin = SelectPlugin(
        scorer="group_solve_rate", actuator={"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}}
    )
    assert plugin.post_advantage(batches.build(rows), ctx).mask.tolist() == [False] * 7


def test_required_fields_are_those_of_both_components(components):
    plugin = SelectPlugin(scorer="padded_advantages", actuator="topk_fraction")
    fields = HookManager({"x": plugin}).required_fields("post_advantage", 0)
    assert fields == {"advantages", "rm_scores", "response_mask", "prompts", "responses"}


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ([1.0, 2.0], r"scorer 'given_scores' returned scores of a wrong shape: shape \(2,\)"),
        ([1.0, math.nan, 2.0], "scorer 'given_scores' returned NaN or infinite scores"),
    ],
)
def test_bad_scores_name_the_scorer(components, batch, ctx, token_mean, scorer, message):
    plugin = SelectPlugin(scorer={"name": "given_scores", "params": {"scores": scorer}}, actuator="threshold_band")
    with pytest.raises(PluginError, match=message):
        HookManager({"sel": plugin}).post_advantage(batch, ctx, token_mean)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([True, False, True], r"selector 'rows' must return the kept row indices as \(k,\) int64.*mask.nonzero\(\)"),
        ([0.0, 1.0], "must return the kept row indices"),
        ([[0], [1]], "must return the kept row indices"),
        ([0, 3], r"selector 'rows' returned row indices outside \[0, 3\)"),
        ([-1], r"outside \[0, 3\)"),
    ],
)
def test_bad_row_indices_name_the_selector(components, batch, ctx, token_mean, rows, message):
    actuator = {"name": "rows", "params": {"rows": rows}}
    plugin = SelectPlugin(scorer="padded_advantages", actuator=actuator)
    with pytest.raises(PluginError, match=message):
        HookManager({"sel": plugin}).post_advantage(batch, ctx, token_mean)


def test_normalize_of_the_plugin_wins_over_the_reweighters(components):
    assert ReweightPlugin("token_prob", "softmax").normalize == "mean"
    assert ReweightPlugin("token_prob", "as_given").normalize == "none"
    assert ReweightPlugin("token_prob", "as_given", normalize="mean").normalize == "mean"


def test_a_scorer_that_needs_the_loss_is_refused_with_the_reason(registry):
    @register_scorer("clip_ratio")
    class ClipRatio(Scorer):
        timing = "in_loss"

        def score(self, batch, step_id, **ctx):
            return batch.rewards

    with pytest.raises(ConfigError, match="scorer.name: got 'clip_ratio'.*forward pass of the update itself"):
        SelectPlugin("clip_ratio", "threshold_band")


def test_select_and_reweight_stack(batches, ctx):
    rows = batches.rows([[1, 0], [0, 0], [1, 1]], advantage=1.0)
    rows = [batches.Row(**{**vars(row), "advantage": 4.0}) if i == 1 else row for i, row in enumerate(rows)]
    block = {
        "plugins": {
            "select": {"scorer": "group_solve_rate", "actuator": "threshold_band"},
            "per": {
                "plugin": "reweight",
                "scorer": "advantage_magnitude",
                "actuator": {"name": "per_advantage", "params": {"epsilon": 0.0}},
            },
        }
    }
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    merged = manager.post_advantage(batches.build(rows), ctx, LossCoefficients("token"))
    assert merged.weights.tolist() == pytest.approx([w / 1.5 for w in (1, 1, 2, 2)] + [0.0] * 8)
    assert merged.metrics["dataflex/select/masked_rows_total/group_solve_rate:threshold_band"] == 4
    calls = manager.calls.take()
    assert calls["timing_s/dataflex/select"] > 0
    assert (calls["dataflex/per/decided_total"], calls["dataflex/per/abstained_total"]) == (1, 0)


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.75])
def test_topk_selection_does_not_depend_on_row_order(batches, ctx, fraction):
    rows = batches.rows([[0, 1, 0, 1], [1, 1, 0, 0]])
    plugin = SelectPlugin("reward_difficulty", {"name": "topk_fraction", "params": {"fraction": fraction}})
    mask = plugin.post_advantage(batches.build(rows), ctx).mask
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 7, 1, 6, 2, 5, 4]):
        shuffled = plugin.post_advantage(batches.build([rows[i] for i in order]), ctx).mask
        assert torch.equal(shuffled, mask[order])
