"""Builders of inputs: what they say is in a batch is in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataflex_hooks import testing
from dataflex_hooks.testing import Row, grpo_advantages, make_batch, make_groups, make_prompts, make_stats, random_batch


def test_groups_of_rewards_become_sessions_of_groups():
    batch = make_groups([1, 0, 0], [1, 1], lengths=[[3, 5, 2], 8], domains=["math", "code"])
    assert (batch.bs, batch.n_groups, batch.n_sessions) == (5, 2, 5)
    assert batch.uid.tolist() == ["uid_0"] * 3 + ["uid_1"] * 2
    assert batch.lengths.tolist() == [3, 5, 2, 8, 8]
    assert batch.rewards.tolist() == [1, 0, 0, 1, 1]
    assert batch.column("dataflex_domain").tolist() == ["math"] * 3 + ["code"] * 2


@pytest.mark.parametrize(("given", "message"), [([1, 2, 3], "lengths|length has 3"), ([[1], 2], r"length\[0\] has 1")])
def test_a_list_that_fits_no_group_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        make_groups([1, 0], [1, 0], lengths=given)


def test_advantages_are_those_of_grpo():
    batch = make_groups([1, 0, 0, 0], [1, 1], [0.5], lengths=2)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    of_row = batch.values("advantages").reshape(-1, 2)
    assert torch.allclose(of_row[:4, 0], expected) and torch.equal(of_row[:, 0], of_row[:, 1])
    assert of_row[4:, 0].tolist() == pytest.approx([0.0, 0.0, 0.5], abs=1e-6)


def test_advantages_are_zero_at_tokens_of_tools():
    batch = make_groups([1, 0], lengths=3, masks=(1, 0, 1))
    values = batch.values("advantages").reshape(2, 3)
    assert (values[:, 1] == 0).all() and (values[:, ::2] != 0).all()


def test_rows_carry_several_outputs_columns_and_fields():
    rows = [Row("a", 0, 0, length=1), Row("a", 0, 1, length=3, reward=1.0, log_prob=(-1.0, -2.0, -3.0)), Row("b")]
    batch = make_batch(
        rows, columns={"level": [1, 1, 2]}, token_fields={"entropy": torch.arange(6.0)}, without=["prompts", "domain"]
    )
    assert (batch.n_sessions, batch.is_final.tolist()) == (2, [False, True, True])
    assert batch.session_rewards.tolist() == [1.0, 0.0]
    assert batch.values("old_log_probs").tolist() == [-0.5, -1.0, -2.0, -3.0, -0.5, -0.5]
    assert batch.column("level").tolist() == [1, 1, 2]
    assert "prompts" not in batch.field_names and "domain" not in batch.field_names


@pytest.mark.parametrize("name", ["mask", "advantage", "log_prob", "tokens"])
def test_values_of_another_length_than_the_row_are_refused_though_the_total_is_right(name):
    one, other = {name: (1, 0)}, {name: (1, 1)}
    with pytest.raises(ValueError, match=f"row 0 has 2 values of {name} for length=3 tokens"):
        make_batch([Row("a", length=3, **one), Row("b", length=1, **other)])
    assert make_batch([Row("a", length=2, **one), Row("b", length=2, **other)]).bs == 2


def test_rows_without_tokens_take_no_reward_from_others():
    with_empty = random_batch(0, groups=4, lengths=(0, 2), rewards=[1.0])
    assert (with_empty.lengths == 0).any() and (with_empty.lengths > 0).any()
    assert torch.equal(with_empty.rewards, (with_empty.lengths > 0).float())


def test_random_batches_repeat_and_vary_with_the_seed():
    one, same, other = (random_batch(seed, outputs=3, tool_share=0.3) for seed in (4, 4, 5))
    assert one.uid.tolist() == same.uid.tolist() != other.uid.tolist()
    assert torch.equal(one.values("entropy"), same.values("entropy"))
    assert one.n_sessions == 24 < one.bs
    assert 0 < (one.values("response_mask") == 0).sum() < one.n_tokens / 2
    assert (one.n_valid > 0).all()
    assert sorted(set(one.column("domain"))) == ["code", "math"]


def test_random_columns_are_one_a_group_or_one_a_row():
    batch = random_batch(1, columns={"level": [1, 2, 3]}, row_columns={"judge": [0.1, 0.2]})
    levels = {(uid, level) for uid, level in zip(batch.uid, batch.column("level"), strict=True)}
    judges = {(uid, judge) for uid, judge in zip(batch.uid, batch.column("judge"), strict=True)}
    assert len(levels) == batch.n_groups < len(judges)


def test_taken_rows_are_those_rows():
    batch = random_batch(2, outputs=2, tool_share=0.2)
    rows = torch.tensor([5, 0, 3])
    taken = testing.take_rows(batch, rows)
    for name in ("entropy", "responses"):
        for place, row in enumerate(rows.tolist()):
            before = batch.values(name)[batch.offsets[row] : batch.offsets[row + 1]]
            assert torch.equal(taken.values(name)[taken.offsets[place] : taken.offsets[place + 1]], before)
    assert taken.uid.tolist() == batch.uid[[5, 0, 3]].tolist()
    assert torch.equal(testing.take_rows(batch, batch.rewards > 0).rewards, batch.rewards[batch.rewards > 0])


def test_tie_ranks_follow_taken_rows():
    batch = make_groups([0, 0, 0], [0, 0])
    taken = testing.take_rows(batch, torch.tensor([4, 2, 1, 0, 3]))
    assert taken.tie_rank.tolist() == batch.tie_rank[[4, 2, 1, 0, 3]].tolist()


def test_prompts_have_rows_domains_and_columns():
    prompts = make_prompts(3, domains=("a", "b"), columns={"level": [7, 8, 9]})
    assert prompts.dataset_rows.tolist() == [0, 1, 2] and prompts.domains.tolist() == ["a", "b", "a"]
    assert prompts.columns["level"].tolist() == [7, 8, 9]
    assert make_prompts(rows=[5, 9], domains=None).domains is None
    with pytest.raises(ValueError, match="'level' has 1 entries for 3"):
        make_prompts(3, columns={"level": [7]})


def test_statistics_have_what_is_given_and_the_rest_even():
    stats = make_stats(("a", "b"), reward=[0.9, 0.1], counts=[4, 8])
    assert stats.scores["reward"].tolist() == [0.9, 0.1] and stats.scores["kept"].tolist() == [1.0, 1.0]
    assert stats.groups.tolist() == [1, 2] and np.isclose(stats.proportions.sum(), 1.0)
    with pytest.raises(ValueError, match="reward has 1 entries for 2 domains"):
        make_stats(("a", "b"), reward=[0.9])


def test_grpo_reads_the_final_output_of_a_session():
    rows = [Row("a", 0, 0, reward=9.0), Row("a", 0, 1, reward=1.0), Row("a", 1, 0, reward=0.0)]
    values = grpo_advantages(make_batch(rows)).reshape(3, 2)[:, 0]
    assert torch.allclose(values, torch.tensor([0.7071, 0.7071, -0.7071]), atol=1e-4)
