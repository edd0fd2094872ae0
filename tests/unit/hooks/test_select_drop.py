"""The plugin ``select`` with ``effect: drop``: where it acts, and what it says about advantages."""

from __future__ import annotations

import pytest
import torch

from dataflex_hooks import ConfigError, HookManager, RewardDecision, Selector, UpdateDecision, register_selector
from dataflex_hooks.plugins.select import SelectPlugin

BAND = {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}}


@pytest.fixture
def within_group(registry):
    @register_selector("first_of_group")
    class FirstOfGroup(Selector):
        within_group = True

        def act(self, scores, batch, **ctx):
            return (batch.session_number == 0).nonzero().flatten()

    return "first_of_group"


def test_it_acts_at_the_earliest_hook_that_has_what_it_reads():
    early = SelectPlugin("group_solve_rate", BAND, effect="drop")
    assert early.hooks == ("post_reward",) and early.provides == {"keep"} and set(early.requires) == {"post_reward"}
    late = SelectPlugin("advantage_magnitude", "topk_fraction", effect="drop")
    assert late.hooks == ("post_advantage",) and late.provides == {"keep"}
    masked = SelectPlugin("group_solve_rate", BAND)
    assert masked.hooks == ("post_advantage",) and masked.provides == {"mask"}


def test_the_manager_calls_only_the_hooks_in_use():
    manager = HookManager({"early": SelectPlugin("group_solve_rate", BAND, effect="drop")})
    assert manager.active("post_reward", 1) and not manager.active("post_advantage", 1)
    assert HookManager({"mask": SelectPlugin("group_solve_rate", BAND)}).active("post_reward", 1) is False


def test_both_hooks_drop_what_a_mask_would_mask(batches, ctx):
    batch = batches.groups([1, 0], [1, 1], [0, 0])
    plugin = SelectPlugin("group_solve_rate", BAND, effect="drop")
    early, mask = plugin.post_reward(batch, ctx), SelectPlugin("group_solve_rate", BAND).post_advantage(batch, ctx)
    assert isinstance(early, RewardDecision) and isinstance(mask, UpdateDecision)
    assert torch.equal(early.keep, mask.mask) and early.keep.tolist() == [True, True, False, False, False, False]
    late = SelectPlugin("advantage_magnitude", "topk_fraction", effect="drop").post_advantage(batch, ctx)
    assert late.mask is None and int(late.keep.sum()) == 3


def test_scores_say_what_is_nearly_good_enough(batches, ctx):
    batch = batches.groups([1, 0], [1, 1], [0, 0])
    decision = SelectPlugin("group_solve_rate", BAND, effect="drop").post_reward(batch, ctx)
    assert decision.scores.tolist() == pytest.approx([0, 0, -0.2, -0.2, -0.2, -0.2])
    lowest = {"name": "topk_fraction", "params": {"largest": False}}
    assert SelectPlugin("reward_difficulty", lowest).post_advantage(batch, ctx).scores.tolist() == [-1, 0, -1, -1, 0, 0]


def test_advantages_default_to_what_the_paper_defines(within_group, batches, ctx):
    batch = batches.groups([1, 0])
    assert SelectPlugin("reward_difficulty", within_group, effect="drop").post_reward(batch, ctx).advantages == "kept"
    over_group = SelectPlugin("reward_difficulty", within_group, effect="drop", advantages="group")
    assert over_group.post_reward(batch, ctx).advantages == "group"
    assert SelectPlugin("reward_difficulty", "topk_fraction", effect="drop").advantages is None


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            {"effect": "dorp", "advantages": "grup", "include": ["kl"]},
            [
                "effect: got 'dorp'; accepted: one of drop, mask; did you mean 'drop'?",
                "advantages: got 'grup'; accepted: one of group, kept; did you mean 'group'?",
                "include: got ['kl']; accepted: [] or [kl, entropy]: both or none, since verl takes both from one mask",
            ],
        ),
        (
            {"advantages": "group"},
            [
                "advantages: got 'group'; accepted: nothing with effect: mask, which leaves every row in its group; or "
                "set effect: drop"
            ],
        ),
        (
            {"effect": "drop", "include": ["kl", "entropy"]},
            ["include: got ['kl', 'entropy']; accepted: nothing with effect: drop, which takes rows out of every term"],
        ),
        (
            {"scorer": "advantage_magnitude", "effect": "drop", "advantages": "kept"},
            [
                "advantages: got 'kept'; accepted: group: its scores are known only after the advantages, which are "
                "then those of the whole group"
            ],
        ),
        ({"include": "kl"}, ["include: got 'kl'; accepted: [] or [kl, entropy]: both or none, since verl takes both"]),
    ],
)
def test_settings_that_cannot_act_are_refused(settings, messages):
    with pytest.raises(ConfigError) as caught:
        SelectPlugin(**{"scorer": "reward_difficulty", "actuator": "topk_fraction", **settings})
    assert len(caught.value.problems) == len(messages)
    for problem, message in zip(caught.value.problems, messages, strict=True):
        assert str(problem).startswith(message)


def test_hooks_that_a_plugin_does_not_implement_are_refused():
    class Wrong(SelectPlugin):
        def __init__(self):
            super().__init__("reward_difficulty", "topk_fraction")
            self.hooks = ("post_rewards",)

    with pytest.raises(
        ConfigError, match=r"hooks = \('post_rewards',\); accepted: a tuple out of the hooks.*'post_rew"
    ):
        HookManager({"p": Wrong()})
