"""The plugin ``select`` with a scorer of candidate prompts: who is admitted, and what is refused at the start."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataflex_hooks import (
    ConfigError,
    HookManager,
    PluginError,
    PromptBatch,
    Scorer,
    Selector,
    StepContext,
    register_scorer,
    register_selector,
)
from dataflex_hooks.plugins.select import SelectPlugin

BAND = {"name": "threshold_band", "params": {"low": 2.0, "high": 7.0}}


@pytest.fixture
def level(registry):
    """A scorer of the column `level`, plus the step and 100 for the domain `code`."""

    @register_scorer("level")
    class Level(Scorer):
        timing = "pre_rollout"
        granularity = "prompt"
        requires = ("level",)

        def __init__(self, shape=0, fill=None, **kwargs):
            self.shape, self.fill = shape, fill

        def score(self, batch, step_id, **ctx):
            assert isinstance(batch, PromptBatch) and ctx["seed"] == 0
            scores = batch.columns["level"] + step_id + 100 * (batch.domains == "code")
            if self.fill is not None:
                return self.fill
            return torch.from_numpy(scores.astype(np.float64)).reshape(-1, *[1] * self.shape)

    return "level"


def candidates(levels, domains=None):
    names = np.empty(len(levels), dtype=object)
    names[:] = domains or ["math"] * len(levels)
    return PromptBatch(np.arange(len(levels)), names, {"level": np.array(levels)})


def test_it_declares_an_admission_over_columns(level):
    plugin = SelectPlugin(level, BAND)
    assert plugin.hooks == ("pre_rollout",) and plugin.provides == {"admit"}
    assert plugin.requires == {"pre_rollout": ("level",)}
    assert SelectPlugin("reward_difficulty", BAND).provides == {"mask"}


def test_what_the_selector_keeps_is_admitted(level):
    plugin = SelectPlugin(level, BAND)
    decision = plugin.pre_rollout(candidates([0, 1, 2, 3], ["math", "math", "code", "math"]), StepContext(step=2))
    # Levels plus step: 2, 3, 104, 5 in the open interval (2, 7).
    assert decision.admit.tolist() == [False, True, False, True]
    assert decision.priority is None and decision.rollouts is None
    assert plugin.pre_rollout(candidates([90, 80]), StepContext(step=2)).admit.tolist() == [False, False]


def test_the_manager_calls_it_past_its_warm_up(level):
    block = {"mechanism": "select", "scorer": {"name": level}, "actuator": BAND, "warmup_step": 3}
    hooks = HookManager.from_config(block, estimator="grpo", has_groups=True)
    assert hooks.draws and not hooks.mixes and not hooks.ranks
    assert hooks.candidate_columns_by_setting() == {"dataflex": ("level",)}
    assert hooks.pre_rollout(candidates([0, 1]), StepContext(step=2)) == (None, None)
    admitted, _ = hooks.pre_rollout(candidates([0, 9]), StepContext(step=3))
    assert admitted.tolist() == [True, False]


@pytest.mark.parametrize("selector", ["topk_fraction", "gfpo", "dapo", "max_variance", "of_somebody"])
def test_selectors_that_need_a_batch_are_refused_with_the_reason(level, selector, registry):
    @register_selector("of_somebody")
    class OfSomebody(Selector):
        def act(self, scores, batch, **ctx):
            return torch.arange(batch.bs)

    params = {"k": 1} if selector == "gfpo" else {}
    with pytest.raises(ConfigError) as caught:
        SelectPlugin(level, {"name": selector, "params": params}, rollouts=4)
    (problem,) = caught.value.problems
    assert str(problem) == (
        f"actuator.name: got {selector!r}; accepted: a selector that decides from the scores of candidate prompts "
        "alone (threshold_band); level scores prompts before anything is generated, few or one at a time"
    )
    SelectPlugin("reward_difficulty", {"name": selector, "params": params}, rollouts=4)


@pytest.mark.parametrize(
    ("settings", "setting"), [({"effect": "drop"}, "effect"), ({"include": ["kl", "entropy"]}, "include")]
)
def test_settings_about_rows_are_refused(level, settings, setting):
    with pytest.raises(ConfigError, match=f"^{setting}: .*nothing with a scorer of candidate prompts"):
        SelectPlugin(level, BAND, **settings)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"shape": 1}, r"scorer 'level' must return \(2,\), a score for each candidate, got shape \(2, 1\)"),
        ({"fill": [1.0, 2.0]}, "scorer 'level' must return a torch.Tensor, got list"),
        ({"fill": torch.tensor([1.0, torch.nan])}, "scorer 'level' returned NaN or infinite scores"),
    ],
)
def test_scores_that_are_none_name_the_scorer(level, params, message):
    block = {"mechanism": "select", "scorer": {"name": level, "params": params}, "actuator": BAND}
    hooks = HookManager.from_config(block, estimator="grpo", has_groups=True)
    with pytest.raises(PluginError, match=f"plugin 'select' .* in pre_rollout at step 1: .*{message}"):
        hooks.pre_rollout(candidates([0, 1]), StepContext(step=1))
