"""Failed groups get past successes of their prompt, and the pool keeps to its bounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from dataflex_replay import Bounds, Replay, Responses, SuccessPool

from dataflex_hooks import ConfigError
from dataflex_hooks.testing import Row, assert_plugin_contract, make_batch, make_context, run_hooks


def batch(*groups, log_prob=-0.5, columns=None):
    """A group is a prompt token and its rewards, or rewards with the response's tokens."""
    rows = []
    for number, (prompt, outcomes) in enumerate(groups):
        for session, outcome in enumerate(outcomes):
            reward, tokens = outcome if isinstance(outcome, tuple) else (outcome, (50 + session, 9))
            given = {"uid": f"g{number}", "session": session, "reward": reward, "prompt": (prompt, 5)}
            rows.append(Row(**given, tokens=tokens, length=len(tokens), log_prob=log_prob))
    built = make_batch(rows, columns=columns)
    return built.with_token_field("rollout_log_probs", built.values("old_log_probs"))


def step(plugin, number, given):
    outcome = run_hooks(plugin, given, ctx=make_context(step=number))
    added = [row for _, row in outcome.added]
    assert outcome.metrics["dataflex/plugin/replayed_total"] == len(added)
    assert outcome.metrics["dataflex/plugin/pool"] == len(plugin.pool.held)
    return added


def tokens(added):
    return [row.response for row in added]


# ---------------------------------------------------------------- what is replayed


def test_a_failed_group_gets_what_once_succeeded():
    plugin = Replay()
    assert step(plugin, 1, batch((1, [0, (1, (7, 8, 9))]), (2, [0, 0]), log_prob=-0.25)) == []
    (row,) = step(plugin, 2, batch((2, [0, 0]), (1, [0, 0])))
    assert (row.prompt, row.response, row.uid, row.reward) == ([1, 5], [7, 8, 9], "g1", 1.0)
    assert row.advantage is None and row.log_probs == [-0.25] * 3
    # The opposite: one success is enough for the group to need none, and what failed is never replayed.
    assert step(plugin, 3, batch((1, [0, 1]), (2, [0, 0]))) == []


def test_the_threshold_divides_success_from_failure():
    plugin = Replay(success_threshold=0.2)
    step(plugin, 1, batch((1, [(0.2, (7,)), (0.3, (8,))])))
    assert tokens(step(plugin, 2, batch((1, [0.2, 0.1])))) == [[8]]
    assert step(plugin, 3, batch((1, [0.21, 0.1]))) == []


def test_nothing_of_the_same_step_is_replayed():
    assert step(Replay(), 1, batch((1, [1, 1]), (1, [0, 0]))) == []


def test_per_group_and_max_rows_limit_what_is_added():
    first = batch((1, [(1, (7,)), (1, (8,)), (1, (9,))]), (2, [(1, (6,)), 0, 0]))
    failed = batch((1, [0, 0]), (2, [0, 0]))
    for limits, expected in (({}, 2), ({"per_group": 2}, 3), ({"per_group": 4}, 4), ({"max_rows": 1}, 1)):
        plugin = Replay(**limits)
        step(plugin, 1, first)
        assert len(step(plugin, 2, failed)) == expected, limits


def test_rows_in_another_order_are_answered_alike():
    def run(order):
        plugin = Replay(per_group=2)
        for number, given in ((1, [(1, [(1, (7,)), (1, (8,))]), (2, [(1, (6,)), 0])]), (2, [(1, [0, 0]), (2, [0])])):
            rows = [
                Row(uid=f"g{g}", session=s, reward=r[0] if isinstance(r, tuple) else r, prompt=(p, 5), length=1)
                if not isinstance(r, tuple)
                else Row(uid=f"g{g}", session=s, reward=r[0], prompt=(p, 5), length=1, tokens=r[1])
                for g, (p, of) in enumerate(given)
                for s, r in enumerate(of)
            ]
            built = make_batch([rows[i] for i in order(len(rows))])
            built = built.with_token_field("rollout_log_probs", built.values("old_log_probs"))
            added = step(plugin, number, built)
        return added

    assert run(range) == run(lambda n: range(n)[::-1]) != []


def test_prompts_are_told_apart_by_their_tokens_and_by_a_column():
    def second(identity, column):
        plugin = Replay(identity=identity)
        step(plugin, 1, batch((1, [(1, (7,)), 0]), columns={"index": [4, 4]}))
        return tokens(step(plugin, 2, batch((1, [0, 0]), columns={"index": [column] * 2})))

    assert second(None, 5) == second("index", 4) == [[7]]
    assert second("index", 5) == []
    assert Replay(identity="index").requires["post_reward"][-1] == "index"


def test_responses_that_cannot_be_trained_on_again_are_left_out():
    plugin = Replay()
    rows = [
        Row("a", 0, reward=1.0, prompt=(1, 5), tokens=(7, 8), mask=(1, 0)),
        Row("a", 1, 0, reward=1.0, prompt=(1, 5), tokens=(6, 6)),
        Row("a", 1, 1, reward=1.0, prompt=(1, 5), tokens=(5, 5)),
    ]
    built = make_batch(rows)
    step(plugin, 1, built.with_token_field("rollout_log_probs", built.values("old_log_probs")))
    assert len(plugin.pool.held) == 0


def test_a_run_without_log_probs_replays_without():
    plugin = Replay(rollout_log_probs=False)
    assert "rollout_log_probs" not in plugin.requires["post_reward"]
    step(plugin, 1, batch((1, [1])))
    assert step(plugin, 2, batch((1, [0])))[0].log_probs is None


def test_log_probs_that_rounding_left_above_0_are_cut():
    plugin = Replay()
    step(plugin, 1, batch((1, [1]), log_prob=1e-6))
    assert step(plugin, 2, batch((1, [0])))[0].log_probs == [0.0, 0.0]


# ---------------------------------------------------------------- the pool


def responses(*rows, log_probs=True):
    """(prompt, step, reward, tokens) each."""
    lengths = [len(row[3]) for row in rows]
    flat = np.array([token for row in rows for token in row[3]], dtype=np.int32)
    return Responses(
        prompt=np.array([row[0] for row in rows], dtype=np.int64),
        content=np.array([hash(tuple(row[3])) for row in rows], dtype=np.int64),
        step=np.array([row[1] for row in rows], dtype=np.int64),
        reward=np.array([row[2] for row in rows], dtype=np.float32),
        offsets=np.array([0, *np.cumsum(lengths)], dtype=np.int64),
        tokens=flat,
        log_probs=-flat.astype(np.float32) if log_probs else np.zeros(0, dtype=np.float32),
    )


def pool(capacity=2, total=100, max_age=10, keep="recent"):
    return SuccessPool(Bounds(capacity, total, max_age, keep))


def held(pool):
    return [(int(pool.held.prompt[i]), *pool.held.row(i)[0]) for i in range(len(pool.held))]


OFFERED = ((1, 1, 0.9, [11]), (1, 2, 0.6, [12]), (1, 3, 0.7, [13]), (2, 3, 0.6, [21, 22]))


def test_a_full_prompt_keeps_the_recent_or_the_best():
    recent, best = pool(), pool(keep="reward")
    for row in OFFERED:
        recent.add(responses(row))
        best.add(responses(row))
    assert held(recent) == [(1, 13), (1, 12), (2, 21, 22)]
    assert held(best) == [(1, 11), (1, 13), (2, 21, 22)]
    together = pool(keep="reward")
    together.add(responses(*OFFERED[::-1]))
    assert held(together) == held(best)


def test_the_total_holds_over_all_prompts():
    small = pool(total=2)
    small.add(responses(*OFFERED))
    assert len(small.held) == 2 and set(small.held.step.tolist()) == {3}
    best = pool(total=2, keep="reward")
    best.add(responses(*OFFERED))
    assert held(best) == [(1, 11), (1, 13)]


def test_equal_responses_of_a_prompt_are_kept_once_and_count_as_new():
    one = pool()
    one.add(responses((1, 1, 1.0, [11]), (1, 2, 1.0, [12])))
    one.add(responses((1, 5, 0.8, [11]), (2, 5, 0.8, [11])))
    assert held(one) == [(1, 11), (1, 12), (2, 11)]
    assert one.held.step.tolist() == [5, 2, 5]


def test_old_responses_are_forgotten():
    one = pool(max_age=2)
    one.add(responses(*OFFERED))
    one.forget(4)
    assert held(one) == [(1, 13), (1, 12), (2, 21, 22)]
    one.forget(5)
    assert held(one) == [(1, 13), (2, 21, 22)]
    one.forget(6)
    assert held(one) == []


def test_a_lookup_gives_the_best_of_each_prompt():
    one = pool()
    one.add(responses(*OFFERED))
    asked, found = one.find(np.array([2, 3, 1, 2]), 2)
    assert asked.tolist() == [0, 2, 2, 3]
    assert [one.held.row(i)[0] for i in found] == [[21, 22], [13], [12], [21, 22]]
    assert one.find(np.array([1]), 1)[1].tolist() == [0]
    assert pool().find(np.array([1]), 1)[1].tolist() == []


def test_bytes_stay_within_the_bound_that_is_stated():
    one = pool(capacity=4, total=32)
    random = np.random.default_rng(0)
    for number in range(20):
        rows = [(int(random.integers(8)), number, 1.0, random.integers(0, 99, 6).tolist()) for _ in range(16)]
        one.add(responses(*rows))
        assert len(one.held) <= 32 and np.unique(one.held.prompt, return_counts=True)[1].max() <= 4
        assert one.held.nbytes <= 32 * (8 * 6 + 36) + 8
        assert (np.diff(one.held.prompt) >= 0).all()
        np.testing.assert_array_equal(one.held.log_probs, -one.held.tokens.astype(np.float32))


# ---------------------------------------------------------------- state and parameters


def test_a_restored_pool_is_the_same_bit_for_bit_and_goes_on_alike():
    first = Replay(per_group=2)
    step(first, 1, batch((1, [(1, (7, 8)), (1, (9,))]), (2, [1, 0]), log_prob=-1 / 3))
    second = Replay(per_group=2)
    second.load_state_dict(first.state_dict())
    state = second.state_dict()["pool"]
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    for name, value in first.state_dict()["pool"].items():
        assert torch.equal(state[name], value) and state[name].dtype == value.dtype, name
    failed = batch((2, [0, 0]), (1, [0, 0]))
    assert step(first, 2, failed) == step(second, 2, failed) != []
    assert step(Replay(per_group=2), 2, failed) == []


def test_the_state_of_another_kind_of_pool_is_refused():
    state = Replay().state_dict()
    with pytest.raises(ValueError, match="filled with identity=None, here it is index"):
        Replay(identity="index").load_state_dict(state)
    with pytest.raises(ValueError, match="filled with log_probs=True, here it is False"):
        Replay(rollout_log_probs=False).load_state_dict(state)


def test_wrong_parameters_are_all_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Replay(success_threshold="half", per_group=0, capacity=0, total=True, max_age=0, keep="newest", identity=3)
    names = [problem.setting for problem in caught.value.problems]
    assert names == ["success_threshold", "per_group", "capacity", "total", "max_age", "keep", "identity"]
    for wrong, text in (({"per_group": 5}, "at most capacity=4"), ({"total": 2}, "at most total=2")):
        with pytest.raises(ConfigError, match=text):
            Replay(**wrong)


def test_columns_of_responses_are_what_a_checkpoint_holds():
    assert set(Replay().state_dict()["pool"]) == {field.name for field in dataclasses.fields(Responses)}


def test_it_keeps_the_contract_of_a_plugin():
    succeeded = batch((1, [(1, (7, 8)), (1, (6,)), 0]), (2, [1, 0]), (3, [0, 0]))
    assert_plugin_contract(Replay, batches=[succeeded, batch((1, [0, 0, 0]), (2, [0, 0]), (3, [0, 1]))])
