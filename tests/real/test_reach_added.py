"""Rows that a plugin adds: they reach the gradient as given, and change nothing that is computed over rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dataflex_hooks import AddedRow, PluginError, RewardDecision, UpdateDecision, hookimpl
from tests.real.harness import StoredBatch
from tests.real.plugins import Decide

pytestmark = pytest.mark.real

FIELDS = (
    "advantages",
    "returns",
    "response_mask",
    "old_log_probs",
    "rollout_log_probs",
    "rollout_is_weights",
    "values",
)
FIRST = AddedRow(prompt=[5, 6, 7], response=[8, 9, 10, 4], advantage=1.5, domain="sort", reward=1.0)
SECOND = AddedRow(prompt=[9, 5], response=[4, 8], advantage=[-0.5, 2.0], reward=0.25)


class Add:
    """Adds rows."""

    provides = {"add"}

    def __init__(self, *rows: AddedRow) -> None:
        self.rows = rows

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> RewardDecision:
        return RewardDecision(add=self.rows)


@pytest.fixture(scope="module")
def rows(stored):
    """Two rows short of a mini-batch."""
    return stored.select(list(range(62)))


def added_of(outcome, name):
    """The field of the added rows, in the order in which they were added."""
    found = {key: outcome.fields[name][i] for i, key in enumerate(outcome.keys) if key.startswith("added-")}
    return [found[key] for key in sorted(found)]


def own_of(outcome, name):
    return {key: value for key, value in outcome.of(name).items() if not key.startswith("added-")}


def gradient_norm(model_dir, examples) -> float:
    """|gradient| of the token-mean policy gradient on policy, with the model read from its files.

    ``examples``: prompt, response, and the factor of each response token (advantage times weight).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total = sum(len(response) for _, response, _ in examples)
    for prompt, response, factors in examples:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits, dim=-1)[torch.arange(len(response)), torch.tensor(response)]
        (-(log_probs * torch.tensor(factors)).sum() / total).backward()
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


def enlarged(rows: StoredBatch, outcome, weights=None) -> list[tuple[list[int], list[int], list[float]]]:
    """The rollout's rows with the advantages of the update, and the two added rows as they were written down above."""
    advantages = own_of(outcome, "advantages")
    prompts, responses = (list(rows.fields[name].unbind()) for name in ("prompts", "responses"))
    examples = [
        (prompts[i].tolist(), responses[i].tolist(), advantages[key].tolist())
        for i, key in enumerate(rows.keys)
        if key in advantages
    ]
    given = [(FIRST, [1.5] * 4), (SECOND, [-0.5, 2.0])]
    for (row, factors), scale in zip(given, weights or ([1.0] * 4, [1.0] * 2), strict=True):
        examples.append((list(row.prompt), list(row.response), [f * s for f, s in zip(factors, scale, strict=True)]))
    return examples


def test_two_added_rows_give_the_gradient_of_the_enlarged_batch(live, rows, demo):
    plain = live.update(rows, fields=FIELDS)
    outcome = live.update(rows, plugins={"add": Add(FIRST, SECOND)}, fields=FIELDS)
    assert outcome.metrics["dataflex/added_rows"] == 2.0
    assert [value.tolist() for value in added_of(outcome, "advantages")] == [[1.5] * 4, [-0.5, 2.0]]
    expected = gradient_norm(demo.model_dir, enlarged(rows, outcome))
    assert outcome.grad_norm == pytest.approx(expected, rel=1e-4)
    # The opposite: without the two rows the same computation gives the gradient of the plain batch.
    assert plain.grad_norm == pytest.approx(gradient_norm(demo.model_dir, enlarged(rows, plain)[:-2]), rel=1e-4)
    assert outcome.grad_norm != pytest.approx(plain.grad_norm, rel=1e-2)


def test_an_added_row_is_verls_own_update_of_a_batch_that_had_it(live, rows):
    # verl gives a group of one its raw reward as advantage: rows put into the batch by hand get theirs that way.
    by_hand = [one_row(rows, FIRST, 1.5, "one"), one_row(rows, SECOND, 0.5, "two")]
    expected = live.update(joined(rows, by_hand), plain=True, fields=FIELDS)
    constant = AddedRow(SECOND.prompt, SECOND.response, advantage=0.5)
    outcome = live.update(rows, plugins={"add": Add(FIRST, constant)}, fields=FIELDS)
    assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    theirs = expected.of("old_log_probs")
    torch.testing.assert_close(added_of(outcome, "old_log_probs")[0], theirs["one_0_0"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(added_of(outcome, "old_log_probs")[1], theirs["two_0_0"], rtol=1e-5, atol=1e-6)


def one_row(rows: StoredBatch, row: AddedRow, advantage: float, uid: str) -> dict[str, Any]:
    tokens = torch.tensor([*row.prompt, *row.response])
    ones, rewards = torch.ones(len(row.response), dtype=torch.int64), torch.zeros(len(row.response))
    rewards[-1] = advantage
    return {
        "uid": uid,
        "prompts": torch.tensor(row.prompt),
        "responses": torch.tensor(row.response),
        "input_ids": tokens,
        "position_ids": torch.arange(len(tokens)),
        "response_mask": ones,
        "loss_mask": ones,
        "rm_scores": rewards,
        "rollout_log_probs": -torch.ones(len(row.response)),
    }


def joined(rows: StoredBatch, by_hand: list[dict[str, Any]]) -> StoredBatch:
    """The stored rows and rows made by hand, other fields as in the first row."""
    import transfer_queue as tq
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    rows.put("scratch")
    template = tq.kv_batch_get(keys=rows.keys[:1], partition_id="scratch")[0]
    base = {name: template[name] for name in template.keys()}
    keys = [f"{row['uid']}_{row.get('session_id', 0)}_0" for row in by_hand]
    tags = [
        {
            **rows.tags[0],
            "prompt_len": len(row["prompts"]),
            "response_len": len(row["responses"]),
            "seq_len": len(row["input_ids"]),
        }
        for row in by_hand
    ]
    fields = list_of_dict_to_tensordict([{name: row.get(name, base[name]) for name in base} for row in by_hand])
    tq.kv_batch_put(keys=keys, partition_id="scratch", fields=fields, tags=tags)
    everything = [*rows.keys, *keys]
    data = tq.kv_batch_get(keys=everything, partition_id="scratch")
    tq.kv_clear(keys=everything, partition_id="scratch")
    return StoredBatch(everything, [*rows.tags, *tags], data)


def test_nothing_added_changes_nothing(live, rows):
    plain = live.update(rows, fields=FIELDS)
    outcome = live.update(rows, plugins={"add": Add()}, fields=FIELDS)
    assert outcome.grad_norm == plain.grad_norm and outcome.keys != []
    shadow = live.update(rows, {"apply": False}, plugins={"add": Add(FIRST)}, fields=FIELDS)
    assert shadow.grad_norm == plain.grad_norm and not any(key.startswith("added-") for key in shadow.keys)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "rloo"])
def test_added_rows_stay_out_of_statistics(live, rows, estimator):
    settings = {"algorithm.adv_estimator": estimator, "algorithm.rollout_correction.rollout_is": "token"}
    settings["algorithm.rollout_correction.rollout_is_batch_normalize"] = True
    seen = Decide(lambda batch: UpdateDecision(weights=1.0 + batch.rewards))
    plain = live.update(rows, plugins={"seen": seen}, settings=settings, fields=FIELDS)
    far = AddedRow(FIRST.prompt, FIRST.response, 3.0, reward=50.0, log_probs=[-9.0, -0.1, -9.0, -0.1])
    outcome = live.update(rows, plugins={"seen": seen, "add": Add(far, SECOND)}, settings=settings, fields=FIELDS)
    for name in ("advantages", "rollout_is_weights"):
        for key, value in own_of(plain, name).items():
            torch.testing.assert_close(own_of(outcome, name)[key], value, rtol=2e-5, atol=2e-6)
    assert [batch.bs for batch in seen.batches] == [62, 62]
    same = [name for name in plain.metrics if name.startswith(("actor/entropy", "rollout_corr/", "training/rollout"))]
    # verl's means over sequences count its own padding, of which the smaller batch has two rows; its spread of weights
    # that are all 1 is the root of a rounding error.
    same = [name for name in same if not any(word in name for word in ("seq", "ppl", "rollout_is_std"))]
    same += ["dataflex/kept_frac", "dataflex/reward_all", "dataflex/seen/weight_mean"]
    assert len(same) > 8
    for name in same:
        assert outcome.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-4, abs=1e-6), name
    # verl's metrics leave out what carries its tag for padding.
    assert {outcome.keys[i].startswith("added-") for i in outcome.padding} == {True}


def test_a_row_that_joins_a_group_counts_in_its_baseline(live, rows):
    uid = rows.keys[0].rsplit("_", 2)[0]
    plain = live.update(rows, fields=FIELDS)
    joined = AddedRow(FIRST.prompt, FIRST.response, 1.5, reward=1.0, uid=uid)
    outcome = live.update(rows, plugins={"add": Add(joined)}, fields=FIELDS)
    rewards = {key: float(row.sum()) for key, row in zip(rows.keys, rows.fields["rm_scores"].unbind(), strict=True)}
    group = torch.tensor([1.0, *(reward for key, reward in rewards.items() if key.startswith(uid))])
    for key, value in plain.of("advantages").items():
        expected = value
        if key.startswith(uid):
            expected = torch.full_like(value, (rewards[key] - float(group.mean())) / (float(group.std()) + 1e-6))
        torch.testing.assert_close(outcome.of("advantages")[key], expected, rtol=1e-4, atol=1e-5)
    (own,) = [i for i, key in enumerate(outcome.keys) if key.startswith(uid) and key not in rewards]
    assert outcome.fields["advantages"][own].tolist() == [1.5] * 4


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_row_that_brings_no_advantage_gets_its_groups(live, rows, estimator):
    settings = {"algorithm.adv_estimator": estimator}
    uid = rows.keys[0].rsplit("_", 2)[0]
    by_hand = {**one_row(rows, FIRST, 0.75, uid), "session_id": 99}
    expected = live.update(joined(rows, [by_hand]), plain=True, settings=settings, fields=FIELDS)
    member = AddedRow(FIRST.prompt, FIRST.response, None, reward=0.75, uid=uid)
    outcome = live.update(rows, plugins={"add": Add(member)}, settings=settings, fields=FIELDS)
    advantages = dict(zip(outcome.keys, outcome.fields["advantages"], strict=True))
    (key,) = [key for key in advantages if key.startswith(uid) and key not in rows.keys]
    for name, value in expected.of("advantages").items():
        torch.testing.assert_close(advantages[key if name == f"{uid}_99_0" else name], value, rtol=1e-5, atol=1e-6)
    assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert advantages[key].abs().min() > 0


class KeepOf:
    """Drops rows of the first group before the log-prob passes, all but ``count`` of them."""

    provides = {"keep"}
    requires = {"post_reward": ("rm_scores",)}

    def __init__(self, count: int) -> None:
        self.count = count

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> RewardDecision:
        place = torch.arange(batch.bs)
        return RewardDecision(keep=(batch.group != batch.group[0]) | (place < self.count))


@pytest.mark.parametrize("advantage", [None, 1.5])
def test_a_joined_row_counts_in_the_whole_groups_baseline_beside_a_drop(live, rows, advantage):
    uid = rows.keys[0].rsplit("_", 2)[0]
    member = AddedRow(FIRST.prompt, FIRST.response, advantage, reward=1.0, uid=uid)
    # Only settings that compute the baselines of whole groups: the critic is off.
    settings = {"critic.enable": False}
    whole = live.update(rows, plugins={"add": Add(member)}, settings=settings, fields=FIELDS)
    plugins = {"add": Add(member), "keep": KeepOf(3)}
    outcome = live.update(rows, plugins=plugins, settings=settings, fields=FIELDS)
    of_whole = dict(zip(whole.keys, whole.fields["advantages"], strict=True))
    left = {key: value for key, value in zip(outcome.keys, outcome.fields["advantages"], strict=True) if uid in key}
    assert len(left) == 4
    for key, value in left.items():
        torch.testing.assert_close(value, of_whole[key], rtol=1e-5, atol=1e-6)
    plain = live.update(rows, plugins={"keep": KeepOf(3)}, settings=settings, fields=FIELDS)
    assert not torch.allclose(plain.of("advantages")[rows.keys[0]], left[rows.keys[0]], rtol=1e-3)


def test_a_joined_row_leaves_with_a_group_that_is_dropped(live, rows):
    uid = rows.keys[0].rsplit("_", 2)[0]
    member = AddedRow(FIRST.prompt, FIRST.response, None, reward=1.0, uid=uid)
    settings = {"critic.enable": False}
    gone = live.update(rows, plugins={"keep": KeepOf(0)}, settings=settings, fields=FIELDS)
    outcome = live.update(rows, plugins={"add": Add(member), "keep": KeepOf(0)}, settings=settings, fields=FIELDS)
    assert outcome.metrics["dataflex/added_rows_without_group"] == 1.0
    assert outcome.metrics["dataflex/added_rows"] == 0.0
    assert outcome.of("advantages").keys() == gone.of("advantages").keys() and outcome.grad_norm == gone.grad_norm
    both = live.update(rows, plugins={"add": Add(member, SECOND), "keep": KeepOf(0)}, settings=settings, fields=FIELDS)
    assert both.metrics["dataflex/added_rows"] == both.metrics["dataflex/added_rows_without_group"] == 1.0
    assert [value.tolist() for value in added_of(both, "advantages")] == [[-0.5, 2.0]]


def test_behaviour_log_probs_reach_verls_correction(live, rows, demo):
    settings = {"algorithm.rollout_correction.rollout_is": "token"}
    with_log_probs = AddedRow(FIRST.prompt, FIRST.response, 1.5, log_probs=[-0.5, -6.0, -1.0, -9.0])
    plugins = {"add": Add(with_log_probs, SECOND)}
    outcome = live.update(rows, plugins=plugins, settings=settings, fields=FIELDS)
    weights, neutral = added_of(outcome, "rollout_is_weights")
    old, _ = added_of(outcome, "old_log_probs")
    # verl truncates at 2.
    expected = (old - torch.tensor([-0.5, -6.0, -1.0, -9.0])).exp().clamp(max=2.0)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
    assert weights.unique().numel() > 1 and neutral.tolist() == [1.0, 1.0]
    gradient = gradient_norm(demo.model_dir, enlarged(rows, outcome, (weights.tolist(), [1.0, 1.0])))
    # The rollout's own weights are 1 within rounding: its probabilities are the actor's.
    assert outcome.grad_norm == pytest.approx(gradient, rel=1e-3)
    without = live.update(rows, plugins={"add": Add(FIRST, SECOND)}, settings=settings, fields=FIELDS)
    assert [value.tolist() for value in added_of(without, "rollout_is_weights")] == [[1.0] * 4, [1.0] * 2]
    assert without.grad_norm != pytest.approx(outcome.grad_norm, rel=1e-2)
    # Weights of other plugins leave verl's own on added rows in place.
    weighed = {
        **plugins,
        "two": Decide(lambda batch: UpdateDecision(weights=2 * torch.ones(batch.bs), normalize="none")),
    }
    both = live.update(rows, plugins=weighed, settings=settings, fields=FIELDS)
    torch.testing.assert_close(added_of(both, "rollout_is_weights")[0], weights, rtol=1e-6, atol=0)


def test_update_scale_scales_added_rows_too_and_masks_leave_them(live, rows):
    add = Add(FIRST, SECOND)
    plain = live.update(rows, plugins={"add": add})
    half = Decide(lambda batch: UpdateDecision(update_scale=0.5))
    assert live.update(rows, plugins={"add": add, "half": half}).grad_norm == pytest.approx(
        0.5 * plain.grad_norm, rel=1e-4
    )
    nothing = Decide(lambda batch: UpdateDecision(mask=torch.zeros(batch.bs)))
    alone = live.update(rows, plugins={"add": add, "mask": nothing})
    assert 0.0 < alone.grad_norm != pytest.approx(plain.grad_norm, rel=1e-2)
    assert live.update(rows, plugins={"mask": nothing}).grad_norm == 0.0


class KeepFirst:
    """Drops all rows but the first ``early`` before the log-prob passes, and all but ``late`` before the updates."""

    provides = {"keep"}
    requires = {"post_reward": ("rm_scores",), "post_advantage": ("advantages",)}

    def __init__(self, early: int, late: int) -> None:
        self.early, self.late = early, late

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> RewardDecision:
        return RewardDecision(keep=torch.arange(batch.bs) < self.early)

    @hookimpl
    def post_advantage(self, batch: Any, ctx: Any) -> UpdateDecision:
        return UpdateDecision(keep=torch.arange(batch.bs) < self.late)


@pytest.mark.parametrize(("early", "late", "size"), [(64, 64, 128), (30, 64, 64), (64, 30, 64)])
def test_rows_added_beside_a_drop_fill_the_mini_batches(live, stored, demo, early, late, size):
    # Only settings that compute the baselines of whole groups: the critic is off.
    settings = {"critic.enable": False}
    plugins = {"add": Add(FIRST, SECOND), "first": KeepFirst(early, late)}
    small = {**settings, "actor_rollout_ref.actor.ppo_mini_batch_size": 2}
    outcome = live.update(stored, plugins=plugins, settings=small, fields=FIELDS)
    trained = [bool(mask.any()) for mask in outcome.fields["response_mask"]]
    counts = [sum(trained[i : i + 16]) for i in range(0, len(trained), 16)]
    assert sum(counts) == min(early, late) + 2 and max(counts) - min(counts) <= 1
    if size == 64:
        outcome = live.update(stored, plugins=plugins, settings=settings, fields=FIELDS)
        assert len(outcome.keys) == size
        assert outcome.grad_norm == pytest.approx(gradient_norm(demo.model_dir, enlarged(stored, outcome)), rel=1e-4)


def test_several_plugins_add_in_an_order_that_is_not_theirs(live, rows):
    one, two = {"a": Add(FIRST), "b": Add(SECOND)}, {"b": Add(SECOND), "a": Add(FIRST)}
    first, second = live.update(rows, plugins=one), live.update(rows, plugins=two)
    assert first.keys == second.keys and first.grad_norm == second.grad_norm
    assert [len(value) for value in added_of(first, "advantages")] == [4, 2]


def test_a_critic_learns_nothing_from_added_rows(live, rows):
    settings = {"algorithm.adv_estimator": "gae"}
    live.trainer.use_critic = True
    try:
        outcome = live.update(rows, plugins={"add": Add(FIRST, SECOND)}, settings=settings, fields=FIELDS)
        plain = live.update(rows, settings=settings, fields=FIELDS)
    finally:
        live.trainer.use_critic = False
    for returns, values in zip(added_of(outcome, "returns"), added_of(outcome, "values"), strict=True):
        assert torch.equal(returns, values)
    assert [value.tolist() for value in added_of(outcome, "advantages")] == [[1.5] * 4, [-0.5, 2.0]]
    for key, value in own_of(plain, "advantages").items():
        torch.testing.assert_close(own_of(outcome, "advantages")[key], value, rtol=1e-4, atol=1e-5)


def test_an_unusable_row_stops_the_run_and_names_plugin_and_row(live, rows):
    long = AddedRow("a" * 400, [4], 1.0)
    with pytest.raises(PluginError, match=r"plugin 'add'.*post_reward at step 1: add\[1\]: prompt has .* at most"):
        live.update(rows, plugins={"add": Add(FIRST, long)})
