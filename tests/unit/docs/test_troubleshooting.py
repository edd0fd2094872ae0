"""Symptoms of docs/troubleshooting.md that are no command there, produced here, each beside its opposite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dataflex_hooks as dh
from dataflex_verl.commands.hydra_config import CommandLine, CompositionError, compose_config
from tests.unit.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MODE = "trainer.v1.trainer_mode=dataflex_sync"
BAND = {"plugin": "select", "scorer": {"name": "group_solve_rate"}, "actuator": {"name": "threshold_band"}}


def decide(batch: Any, ctx: Any, token_mean: Any, block: Any = None, **plugins: object) -> Any:
    hooks = dh.HookManager.from_config(block, estimator="grpo", has_groups=True, extra_plugins=plugins)
    return hooks.post_advantage(batch, ctx, token_mean)


@pytest.mark.parametrize(
    ("override", "texts", "meant"),
    [
        ("+dataflex=dificulty", ["Could not find 'dataflex/dificulty'", "difffilter"], "+dataflex=difffilter"),
        (
            "dataflex.warmup_step=3",
            ["Could not override 'dataflex.warmup_step'", "Key 'dataflex' is not in struct"],
            "+dataflex.warmup_step=3",
        ),
    ],
)
def test_hydra_says_what_the_page_quotes(override: str, texts: list[str], meant: str) -> None:
    with pytest.raises(CompositionError) as caught:
        compose_config(CommandLine.parse([MODE, override]))
    assert all(text in str(caught.value) for text in texts)
    for quoted in ("`Could not find 'dataflex/...'`", "`Could not override 'dataflex...'`", "Key 'dataflex' is not in"):
        assert quoted in PAGE
    assert compose_config(CommandLine.parse([MODE, meant])).dataflex


@pytest.mark.parametrize(("threshold", "kept"), [(0.5, 0.5), (2.0, 0.0)])
def test_a_threshold_above_all_rewards_keeps_nothing(batches, ctx, token_mean, threshold: float, kept: float) -> None:
    scorer = {"name": "group_solve_rate", "params": {"success_threshold": threshold}}
    found = decide(batches.groups([1, 0], [0, 0]), ctx, token_mean, {"plugins": {"band": {**BAND, "scorer": scorer}}})
    assert found.metrics["dataflex/kept_frac"] == kept and bool(found.weights.any()) == (kept > 0)


@pytest.mark.parametrize(("rewards", "kept"), [(([1, 0], [0, 1]), 1.0), (([1, 0], [1, 1]), 0.5)])
def test_a_band_of_0_to_1_keeps_what_is_solved_sometimes(batches, ctx, token_mean, rewards, kept: float) -> None:
    found = decide(batches.groups(*rewards), ctx, token_mean, {"plugins": {"band": BAND}})
    assert found.metrics["dataflex/kept_frac"] == kept
    assert (found.metrics["dataflex/weight_std"] == 0) == (kept == 1.0)


@pytest.mark.parametrize(("second", "equal"), [(1.0, True), (3.0, False)])
def test_equal_advantages_give_equal_weights(batches, ctx, token_mean, second: float, equal: bool) -> None:
    rows = [batches.Row(uid="a", advantage=1.0), batches.Row(uid="a", session=1, advantage=second)]
    block = {"plugins": {"per": {"plugin": "reweight", "scorer": "advantage_magnitude", "actuator": "per_advantage"}}}
    found = decide(batches.build(rows), ctx, token_mean, block)
    assert (found.metrics["dataflex/weight_std"] == 0) == equal


def test_nan_stops_the_run_with_the_message_of_the_page(batches, token_mean) -> None:
    class Ratio:
        def __init__(self, value: float) -> None:
            self.value = value

        @dh.hookimpl
        def post_advantage(self, batch, ctx):
            return dh.UpdateDecision(weights=torch.tensor([1.0, self.value, 1.0, 1.0]))

    batch, ctx = batches.groups([1, 0], [0, 1]), dh.StepContext(step=3)
    with pytest.raises(dh.PluginError) as caught:
        decide(batch, ctx, token_mean, ratio=Ratio(float("nan")))
    assert str(caught.value) in PAGE
    assert decide(batch, ctx, token_mean, ratio=Ratio(2.0)).metrics["dataflex/ratio/weight_mean"] == 1.25


def test_the_reward_of_what_is_kept_is_not_that_of_all(batches, ctx, token_mean) -> None:
    found = decide(batches.groups([1, 1], [1, 1], [1, 0]), ctx, token_mean, {"plugins": {"band": BAND}})
    assert found.metrics["dataflex/reward_kept"] == 0.5 and found.metrics["dataflex/reward_all"] == pytest.approx(5 / 6)


@pytest.mark.parametrize("on_error", ["raise", "disable"])
def test_a_plugin_that_fails_stops_the_run_or_is_left_out(batches, ctx, token_mean, on_error: str, registry) -> None:
    @dh.register_scorer("page_failing")
    class Failing(dh.Scorer):
        def score(self, batch, step_id, **ctx):
            raise RuntimeError("no connection")

    plugin = {"plugin": "select", "scorer": "page_failing", "actuator": "topk_fraction", "on_error": on_error}
    block = {"plugins": {"flaky": plugin}}
    if on_error == "raise":
        with pytest.raises(dh.PluginError, match="plugin 'flaky'.*no connection"):
            decide(batches.groups([1, 0]), ctx, token_mean, block)
    else:
        found = decide(batches.groups([1, 0]), ctx, token_mean, block)
        assert found.metrics["dataflex/flaky/disabled"] == 1.0
