"""The plugins of docs/plugins/writing.md do what the page says, each beside a case in which they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dataflex_hooks as dh
from tests.unit.docs.snippets import blocks

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def shown(registry: Any) -> SimpleNamespace:
    names: dict[str, Any] = {"__name__": "shown"}
    exec("\n\n".join(block.text for block in blocks("docs/plugins/writing.md", "python")), names)
    return SimpleNamespace(**names)


def manager(**plugins: object) -> dh.HookManager:
    return dh.HookManager.from_config(None, estimator="grpo", has_groups=True, extra_plugins=plugins)


def test_weights_follow_the_probability(shown, batches, ctx, token_mean) -> None:
    rows = [batches.Row(uid="a", log_prob=-0.1), batches.Row(uid="a", session=1, log_prob=-2.1)]
    for power, ratio in ((0.5, np.e), (0.0, 1.0)):
        weights = manager(w=shown.Confident(power)).post_advantage(batches.build(rows), ctx, token_mean).weights
        values = torch.as_tensor(weights).flatten()
        assert float(values[0] / values[-1]) == pytest.approx(ratio, rel=1e-5)
    with pytest.raises(dh.ConfigError, match="power: got -1; accepted: a finite number >= 0"):
        shown.Confident(-1)


def test_empty_responses_leave_and_rewards_are_clipped(shown, batches, ctx) -> None:
    rows = [batches.Row(uid="a", reward=3.0), batches.Row(uid="a", session=1, reward=0.5, mask=0)]
    batch = batches.build(rows)
    assert shown.DropEmpty().post_reward(batch, ctx).keep.tolist() == [True, False]
    assert shown.Clip().post_reward(batch, ctx).rewards.tolist() == [1.0, 0.5]


def test_brevity_is_paid_for(shown, batches, ctx) -> None:
    batch = batches.build([batches.Row(uid="a", length=1), batches.Row(uid="a", session=1, length=4)])
    decision = shown.PayForBrevity(bonus=1.0, longest=2).post_reward(batch, ctx)
    assert decision.shift.tolist() == [0.5, 0.0] and decision.metrics == {"bonus_mean": 0.25}


def test_two_owners_of_the_rewards_are_refused_and_an_adjuster_is_not(shown) -> None:
    with pytest.raises(dh.ConfigError, match="rewards"):
        manager(one=shown.Clip(), two=shown.Clip())
    assert manager(one=shown.Clip(), two=shown.PayForBrevity()).labels == ("one", "two")


def test_long_prompts_are_refused(shown, ctx) -> None:
    candidates = dh.PromptBatch(np.arange(2), None, {"prompt_length": np.array([100, 4000])})
    assert shown.SkipLongPrompts().pre_rollout(candidates, ctx).admit.tolist() == [True, False]


def test_domains_get_equal_shares(shown, ctx) -> None:
    stats = dh.DomainStats(("a", "b", "c", "d"), np.array([5, 1, 0, 2]))
    assert shown.Uniform().on_domain_stats(stats, ctx).proportions.tolist() == [0.25] * 4


def test_the_scorer_measures_the_distance_from_the_groups_mean(shown, batches) -> None:
    batch = batches.groups([1, 0, 0, 0], [1, 1, 1, 1])
    assert shown.Spread().score(batch, 1).tolist() == [0.75, 0.25, 0.25, 0.25, 0, 0, 0, 0]
    assert shown.Spread(power=2.0).score(batch, 1)[0] == 0.75**2


def test_chance_is_the_same_after_a_resume_and_another_in_the_next_step(shown, batches) -> None:
    batch = batches.groups(*[[1, 0]] * 50)
    first, resumed = shown.MaskSome(share=0.5), shown.MaskSome(share=0.5)
    masks = [first.post_advantage(batch, dh.StepContext(step=step)).mask for step in (1, 2)]
    resumed.load_state_dict({"seen": 100})
    again = resumed.post_advantage(batch, dh.StepContext(step=2)).mask
    assert torch.equal(masks[1], again) and not torch.equal(masks[0], again)
    assert resumed.state_dict() == first.state_dict() == {"seen": 200}


def test_each_mistake_that_the_page_lists_is_found(shown) -> None:
    class Undecorated:
        def post_advantage(self, batch, ctx):
            return None

    class Defaulted:
        @dh.hookimpl
        def post_advantage(self, batch, ctx=None):
            return None

    class Unknown:
        provides = {"maks"}

        @dh.hookimpl
        def post_advantage(self, batch, ctx):
            return None

    class HalfState:
        @dh.hookimpl
        def post_advantage(self, batch, ctx):
            return None

        def state_dict(self):
            return {}

    for wrong in (Undecorated(), Defaulted(), shown.KeepShort, Unknown(), HalfState()):
        with pytest.raises(dh.ConfigError):
            manager(wrong=wrong)
    assert manager(right=shown.KeepShort()).labels == ("right",)
