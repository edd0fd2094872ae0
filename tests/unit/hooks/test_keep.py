"""Drops of several plugins become one, and too few left become the named fallback."""

from __future__ import annotations

import pytest
import torch

from dataflex_hooks import (
    ConfigError,
    DecisionError,
    HookManager,
    LossCoefficients,
    RewardDecision,
    StepContext,
    UpdateDecision,
    hookimpl,
    parse,
)
from dataflex_hooks.keep import KeepRules
from dataflex_hooks.merge import LabelledDecision, merge_update
from dataflex_hooks.merge_reward import Generated, merge_reward
from dataflex_hooks.resolve import Origin, resolve_rewards


@pytest.fixture
def batch(batches):
    """Two groups of three sessions, rewards 1 0 0 and 1 1 0."""
    return batches.groups([1, 0, 0], [1, 1, 0])


def bools(text: str) -> torch.Tensor:
    return torch.tensor([letter == "1" for letter in text])


def early(batch, rules=None, **decisions):
    resolved = [resolve_rewards(d, batch, Origin(label, "post_reward")) for label, d in decisions.items()]
    return merge_reward(resolved, batch, rules)


def late(batch, rules=None, kind="token", generated=None, mask_scale="none", **decisions):
    labelled = [LabelledDecision(label, decision) for label, decision in decisions.items()]
    return merge_update(labelled, batch, LossCoefficients(kind), mask_scale, rules, generated)


def text(rows: torch.Tensor | None) -> str | None:
    return None if rows is None else "".join(str(int(row)) for row in rows)


def test_a_row_stays_if_every_plugin_keeps_it(batch):
    one, two = RewardDecision(keep=bools("111100")), RewardDecision(keep=bools("011110"))
    assert text(early(batch, a=one, b=two).row_keep) == text(early(batch, a=two, b=one).row_keep) == "011100"
    assert early(batch, a=RewardDecision(keep=bools("111111"))).row_keep is None
    assert early(batch).row_keep is None
    late_one, late_two = UpdateDecision(keep=bools("111100")), UpdateDecision(keep=bools("011110"))
    assert text(late(batch, a=late_one, b=late_two).in_batch) == "011100"


def test_a_dropped_row_is_in_no_average(batch):
    """A mask leaves its place in the average, a drop does not: with mask_scale the same weights come out."""
    weights = torch.arange(1.0, 7.0)
    dropped = late(batch, d=UpdateDecision(keep=bools("110110")), w=UpdateDecision(weights=weights))
    masked = late(batch, d=UpdateDecision(mask=bools("110110")), w=UpdateDecision(weights=weights))
    assert torch.equal(dropped.weights, masked.weights)
    assert dropped.metrics["dataflex/weight_mean"] == pytest.approx(1.0)
    assert masked.metrics["dataflex/weight_mean"] == pytest.approx(masked.metrics["dataflex/kept_tokens_frac"])
    scaled = late(batch, mask_scale="kept", d=UpdateDecision(keep=bools("110110")))
    assert set(scaled.weights.tolist()) == {0.0, 1.0}


def test_shares_are_of_what_was_generated(batch):
    first = early(batch, d=RewardDecision(keep=bools("111000"), reason="why"))
    assert first.metrics["dataflex/kept_frac"] == first.metrics["dataflex/kept_groups_frac"] == 0.5
    assert first.metrics["dataflex/dropped_frac"] == 0.5
    assert first.metrics["dataflex/d/dropped_rows_total/why"] == 3
    assert first.generated == Generated(6, 2, 0.5)
    rest = late(batch, generated=Generated(12, 4, 0.25), m=UpdateDecision(mask=bools("111000")))
    assert rest.metrics["dataflex/kept_frac"] == 0.25 and rest.metrics["dataflex/kept_groups_frac"] == 0.25
    assert rest.metrics["dataflex/reward_all"] == 0.25
    assert rest.metrics["dataflex/reward_kept"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("min_keep", "keep", "left"),
    [(None, "000000", "fallback"), (None, "000001", "000001"), (2, "000001", "fallback"), (0.5, "000011", "fallback"),
     (0.5, "000111", "000111"), (0.34, "000011", "fallback"), (1 / 3, "000011", "000011"), (99, "111111", None)],
)  # fmt: skip
def test_the_least_that_has_to_stay(batch, min_keep, keep, left):
    rules = KeepRules(min_keep)
    reward = early(batch, rules, d=RewardDecision(keep=bools(keep)))
    update = late(batch, rules, d=UpdateDecision(keep=bools(keep)))
    for rows, skip in ((reward.row_keep, reward.skip_update), (update.in_batch, update.skip_update)):
        assert ("fallback" if skip else text(rows)) == left
        assert not skip or rows is None


def test_keep_all_and_keep_best(batch):
    keep, scores = bools("000000"), torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3, 0.7])
    decision = RewardDecision(keep=keep, scores=scores)
    assert early(batch, KeepRules(2, "keep_all"), d=decision).row_keep is None
    best = early(batch, KeepRules(3, "keep_best"), d=decision)
    assert text(best.row_keep) == "010101" and not best.skip_update
    assert best.metrics["dataflex/fallback"] == 1.0
    # What is kept stays; the best of the others join it.
    some = RewardDecision(keep=bools("100000"), scores=scores)
    assert text(early(batch, KeepRules(3, "keep_best"), d=some).row_keep) == "110100"
    # A row that fewer plugins are against comes first, whatever its score.
    against = RewardDecision(keep=bools("111011"))
    assert text(early(batch, KeepRules(1, "keep_best"), d=decision, e=against).row_keep) == "010000"
    other = RewardDecision(keep=bools("000010"))
    assert text(early(batch, KeepRules(1, "keep_best"), d=decision, e=other).row_keep) == "000010"


def test_ties_of_keep_best_break_by_content(batches):
    rows = [batches.Row("a", i, 0, tokens=(9 - i, 3)) for i in range(4)]
    decision = RewardDecision(keep=torch.zeros(4, dtype=torch.bool), scores=torch.ones(4))
    kept = early(batches.build(rows), KeepRules(2, "keep_best"), d=decision).row_keep
    mirrored = early(batches.build(rows[::-1]), KeepRules(2, "keep_best"), d=decision).row_keep
    assert text(kept) == text(mirrored.flip(0))


def test_masks_count_only_when_a_least_is_asked(batch):
    mask = UpdateDecision(mask=bools("000001"))
    assert not late(batch, m=mask).skip_update
    assert late(batch, KeepRules(2), m=mask).skip_update
    restored = late(batch, KeepRules(2, "keep_all"), m=mask)
    assert restored.row_keep.all() and set(restored.weights.tolist()) == {1.0}
    best = late(batch, KeepRules(2, "keep_best"), m=UpdateDecision(mask=bools("000001"), scores=torch.arange(6.0)))
    assert text(best.row_keep) == "000011"


def test_include_marks_whole_masked_rows(batch):
    terms = ("kl", "entropy")
    assert text(late(batch, m=UpdateDecision(mask=bools("110011"), include=terms)).excluded) == "001100"
    assert late(batch, m=UpdateDecision(mask=bools("110011"))).excluded is None
    assert late(batch, m=UpdateDecision(mask=bools("111111"), include=terms)).excluded is None
    two = late(batch, m=UpdateDecision(mask=bools("110011"), include=terms), n=UpdateDecision(mask=bools("011111")))
    assert text(two.excluded) == "001100"


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (UpdateDecision(include=("kl",), mask=torch.ones(6)), r"include is \('kl',\); accepted: \(\) or \('kl', 'ent"),
        (UpdateDecision(include=("kl", "entropy"), mask=torch.ones(12)), "this decision distinguishes tokens"),
        (UpdateDecision(keep=torch.ones(12)), r"keep must be one per response \(6,\): only whole rows"),
        (UpdateDecision(keep=torch.full((6,), 0.5)), "keep holds values other than 0 and 1"),
        (UpdateDecision(scores=torch.ones(12)), r"scores must be one per response \(6,\)"),
    ],
)
def test_unusable_decisions_are_refused(batch, decision, message):
    with pytest.raises(DecisionError, match=message):
        late(batch, p=decision)


def test_two_baselines_for_one_batch_are_refused(batch):
    kept, group = (RewardDecision(keep=bools("111100"), advantages=over) for over in ("kept", "group"))
    with pytest.raises(DecisionError, match="plugin 'b'.*wants advantages over 'group' rows, plugin 'a' over 'kept'"):
        early(batch, a=kept, b=group)
    assert early(batch, a=kept, b=RewardDecision(keep=bools("011111"))).advantages == "kept"
    with pytest.raises(DecisionError, match="advantages is 'gruop'; accepted: one of group, kept; did you mean"):
        early(batch, a=RewardDecision(keep=bools("111100"), advantages="gruop"))


def test_every_plugin_sees_all_rows_whatever_another_drops(batch):
    seen = []

    class Drop:
        provides = {"keep"}

        @hookimpl
        def post_reward(self, batch):
            seen.append(batch.bs)
            return RewardDecision(keep=torch.arange(batch.bs) < 2)

    merged = HookManager({"a": Drop(), "b": Drop()}).post_reward(batch, StepContext(step=1))
    assert seen == [6, 6] and text(merged.row_keep) == "110000"


def test_settings_of_the_least_are_checked():
    config = parse({"min_keep": 0.25, "fallback": "keep_best", "max_fill": 2})
    assert config.keep_rules == KeepRules(0.25, "keep_best") and config.max_fill == 2.0
    assert parse({}).keep_rules == KeepRules(None, "skip_update") and parse({}).max_fill == 4.0
    with pytest.raises(ConfigError) as caught:
        parse({"min_keep": 0, "fallback": "keep_bst", "max_fill": 0.5})
    assert [str(problem) for problem in caught.value.problems] == [
        "dataflex.min_keep: got 0; accepted: a number of rollouts >= 1, or a share of them in (0, 1)",
        "dataflex.fallback: got 'keep_bst'; accepted: one of keep_all, keep_best, skip_update; "
        "did you mean 'keep_best'?",
        "dataflex.max_fill: got 0.5; accepted: a number >= 1",
    ]


@pytest.mark.parametrize("empty", [(), []])
def test_an_empty_list_of_rows_to_add_is_nothing(batch, empty):
    class Silent:
        provides = {"rewards"}

        @hookimpl
        def post_reward(self, batch):
            return RewardDecision(add=empty)

    assert not HookManager({"p": Silent()}).post_reward(batch, StepContext(step=1)).changed
