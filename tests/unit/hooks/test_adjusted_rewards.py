"""Scales and shifts of rewards: any number of plugins, whatever their order, each on the owner's rewards."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflex_hooks import ConfigError, DecisionError, HookManager, RewardDecision, hookimpl

PARTS = {"reward_scale", "reward_shift"}
properties = settings(max_examples=60, deadline=None)


class Gives:
    """Returns a RewardDecision made by ``make(batch)``; remembers the rewards it saw."""

    def __init__(self, make, provides=PARTS):
        self.make, self.provides, self.seen = make, provides, []

    @hookimpl
    def post_reward(self, batch):
        self.seen.append(batch.rewards.tolist())
        return self.make(batch)


def adjusts(scale=None, shift=None, **more):
    given = {name: torch.tensor(value) for name, value in (("scale", scale), ("shift", shift)) if value is not None}
    return Gives(lambda batch: RewardDecision(**given, **more))


def owns(rewards):
    return Gives(lambda batch: RewardDecision(rewards=torch.tensor(rewards)), {"rewards"})


def watches():
    return Gives(lambda batch: None, {"keep"})


@pytest.fixture
def batch(batches):
    return batches.groups([1.0, 0.0], [0.5, 0.25])


def test_scales_multiply_and_shifts_add_up_on_the_owners_rewards(batch, ctx):
    first, second, late = adjusts([2.0, 2, 1, 1], [0.5, 0, 0, 0]), adjusts([3.0] * 4, [0.0, -1, 0, 0]), watches()
    owner = owns([1.0, 2.0, 3.0, 4.0])
    manager = HookManager({"late": late, "b": second, "a": first, "owner": owner})
    merged = manager.post_reward(batch, ctx)
    expected = [6.5, 11.0, 9.0, 12.0]
    assert batch.with_token_field("rm_scores", merged.rewards).rewards.tolist() == expected
    assert owner.seen == [[1.0, 0.0, 0.5, 0.25]]
    assert first.seen == second.seen == [[1.0, 2.0, 3.0, 4.0]]
    assert late.seen == [expected]
    assert (merged.owner, merged.changed) == ("owner", True)


def test_without_an_owner_verls_rewards_are_adjusted(batch, ctx):
    merged = HookManager({"a": adjusts([2.0] * 4, [1.0] * 4)}).post_reward(batch, ctx)
    assert batch.with_token_field("rm_scores", merged.rewards).rewards.tolist() == [3.0, 1.0, 2.0, 1.5]
    assert merged.owner == ""


def test_the_shift_goes_to_the_last_token_and_the_scale_to_every_token(batches, ctx):
    rows = [batches.Row("u", session=0, length=3), batches.Row("u", session=1, length=1)]
    batch = batches.build(rows, rm_scores=torch.tensor([1.0, 2.0, 3.0, 4.0]), without=[])
    per_token = Gives(lambda b: RewardDecision(rewards=torch.tensor([1.0, 2.0, 3.0, 4.0])), {"rewards"})
    merged = HookManager({"owner": per_token, "a": adjusts([2.0, 0.5], [10.0, -1.0])}).post_reward(batch, ctx)
    assert merged.rewards.tolist() == [2.0, 4.0, 16.0, 1.0]
    assert merged.per_token


def test_rows_of_one_session_are_adjusted_each_and_the_last_one_counts(batches, ctx):
    rows = [
        batches.Row("u", session=0, output=0, reward=1.0),
        batches.Row("u", session=0, output=1, reward=2.0),
        batches.Row("u", session=1, output=0, reward=4.0),
    ]
    batch = batches.build(rows)
    merged = HookManager({"a": adjusts([5.0, 3.0, 1.0], [0.0, 1.0, 0.0])}).post_reward(batch, ctx)
    assert batch.with_token_field("rm_scores", merged.rewards).rewards.tolist() == [5.0, 7.0, 4.0]
    assert merged.generated.reward == (7.0 + 4.0) / 2
    assert merged.metrics == {
        "dataflex/reward_adjustment": 2.5,
        "dataflex/a/reward_scale": 2.0,
        "dataflex/a/reward_shift": 0.5,
    }


def test_neutral_adjustments_leave_every_bit(batches, ctx):
    scores = torch.tensor([-0.0, 0.1, -0.0, 1 / 3])
    batch = batches.build([batches.Row("u", session=s) for s in range(2)], rm_scores=scores)
    merged = HookManager({"a": adjusts([1.0, 1.0], [0.0, 0.0])}).post_reward(batch, ctx)
    assert merged.rewards is None and not merged.changed
    one = HookManager({"a": adjusts([1.0, 2.0], [0.0, 0.0])}).post_reward(batch, ctx)
    assert one.rewards[:2].view(torch.int32).tolist() == scores[:2].view(torch.int32).tolist()
    assert one.rewards[2:].tolist() == (2 * scores[2:]).tolist()


ROWS = st.integers(1, 5)
NUMBER = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


@st.composite
def adjustments(draw):
    n = draw(ROWS)
    column = st.none() | st.lists(NUMBER, min_size=n, max_size=n)
    labels = draw(st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1, max_size=5))
    return draw(st.lists(NUMBER, min_size=n, max_size=n)), {label: (draw(column), draw(column)) for label in labels}


@given(case=adjustments(), data=st.data())
@properties
def test_the_order_of_adjusters_does_not_change_a_bit(batches, ctx, case, data):
    rewards, given_by = case
    batch = batches.groups(rewards)

    def merged(labels):
        manager = HookManager({label: adjusts(*given_by[label]) for label in labels})
        try:
            return manager.post_reward(batch, ctx)
        except DecisionError as error:
            return str(error)

    one, other = merged(sorted(given_by)), merged(data.draw(st.permutations(sorted(given_by))))
    if isinstance(one, str):
        assert one == other
        return
    assert one.metrics == other.metrics
    assert (one.rewards is None) == (other.rewards is None)
    assert one.rewards is None or torch.equal(one.rewards.view(torch.int32), other.rewards.view(torch.int32))
    applied = batch.rewards if one.rewards is None else batch.with_token_field("rm_scores", one.rewards).rewards
    for row, reward in enumerate(applied.tolist()):
        scale = math.prod(s[row] for s, _ in given_by.values() if s is not None)
        shift = math.fsum(t[row] for _, t in given_by.values() if t is not None)
        expected = float(batch.rewards[row]) * scale + shift
        assert reward == pytest.approx(expected, rel=1e-6, abs=1e-6 * (1 + abs(shift) + abs(expected - shift)))


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        ({"scale": torch.ones(3)}, r"scale: shape \(3,\) is none of"),
        ({"shift": torch.ones(8)}, r"shift must be one per response \(4,\): it acts on a response's reward"),
        (
            {"scale": torch.tensor([1.0, math.nan, 1, 1])},
            r"scale are NaN or infinite at 1 of 4 responses, first in row 1",
        ),
        ({"shift": [0.0] * 4}, r"shift must be a torch\.Tensor, got list"),
        ({"scale": torch.full((4,), 1e39, dtype=torch.float64)}, r"of 'a' take rewards out of range, first in row 0"),
    ],
    ids=["shape", "per token", "nan", "no tensor", "overflow"],
)
def test_what_cannot_be_applied_is_refused_with_the_plugin(batch, ctx, decision, message):
    with pytest.raises(DecisionError, match=rf"plugin 'a' \(no distribution\) in post_reward at step 3.*{message}"):
        HookManager({"a": Gives(lambda b: RewardDecision(**decision))}).post_reward(batch, ctx)


def test_a_plugin_that_declares_nothing_is_no_adjuster(batch, ctx):
    class Undeclared:
        @hookimpl
        def post_reward(self, batch):
            return RewardDecision(scale=torch.ones(4))

    said = "returned reward_scale, and has no `provides`, which stands for add, keep: write provides = {'reward_scale'}"
    with pytest.raises(DecisionError, match=re.escape(said)):
        HookManager({"a": Undeclared()}).post_reward(batch, ctx)
    with pytest.raises(DecisionError, match="returned reward_shift, but provides only reward_scale: add it"):
        HookManager({"a": Gives(lambda b: RewardDecision(shift=torch.ones(4)), {"reward_scale"})}).post_reward(
            batch, ctx
        )


def test_any_number_may_adjust_and_one_may_own(batch):
    HookManager({"a": adjusts(), "b": adjusts(), "owner": owns([0.0] * 4)})
    with pytest.raises(ConfigError, match="rewards from 'second'.* and 'owner'"):
        HookManager({"owner": owns([0.0] * 4), "second": owns([0.0] * 4)})


def test_rewards_are_there_for_whoever_is_called_and_fetched_for_nobody():
    manager = HookManager({"a": adjusts()})
    assert manager.required_fields("post_reward", 1) == {"rm_scores"}
    assert HookManager({"a": Gives(lambda b: None, {"add"})}).required_fields("post_reward", 1) == {"rm_scores"}
    assert HookManager().required_fields("post_reward", 1) == frozenset()


# ---------------------------------------------------------------- metrics of a plugin's own


def test_metrics_of_a_decision_are_logged_under_the_label(batch, ctx):
    values = iter([{"saved": 3, "calls_total": 2}, {"saved": 5.5, "calls_total": 4, "max/depth": True}])
    manager = HookManager({"r": Gives(lambda b: RewardDecision(metrics=next(values)), set())})
    assert not manager.post_reward(batch, ctx).changed
    manager.post_reward(batch, ctx)
    logged = {name: value for name, value in manager.calls.take().items() if not name.startswith("timing_s/")}
    assert logged == {
        "dataflex/r/saved": 5.5,
        "dataflex/r/calls_total": 6.0,
        "dataflex/r/ma-x:depth": 1.0,
        "dataflex/r/decided_total": 2.0,
        "dataflex/r/abstained_total": 0.0,
    }
    assert "dataflex/r/saved" not in manager.calls.take()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([1.0], "metrics is list; accepted: a mapping of names to numbers"),
        ({3: 1.0}, "metrics has the name 3; accepted: names that are text"),
        ({"x": "many"}, r"metrics\['x'\] is 'many'; accepted: a finite number"),
        ({"x": math.nan}, r"metrics\['x'\] is nan; accepted: a finite number"),
        ({"kept_frac": 1.0}, "metric 'kept_frac' is logged by the host: give it another name"),
    ],
)
def test_metrics_that_cannot_be_logged_are_refused(batch, ctx, metrics, message):
    with pytest.raises(DecisionError, match=message):
        HookManager({"r": Gives(lambda b: RewardDecision(metrics=metrics), set())}).post_reward(batch, ctx)
