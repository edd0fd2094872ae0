"""Views of a batch: structure, padded and jagged access, reductions, ties, read-only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataflex_hooks import FieldError, RolloutBatch


@pytest.fixture
def agent_rows(batches):
    """Two prompts; the first session of `a_b` has two outputs of 3 and 1 tokens, of which one token is a tool's."""
    row = batches.Row
    return [
        row("z", 0, 0, length=2, reward=1.0, advantage=(1.0, 3.0)),
        row("a_b", 1, 0, length=1, reward=0.25, advantage=-2.0),
        row("a_b", 0, 1, length=1, reward=0.5, advantage=8.0),
        row("a_b", 0, 0, length=3, reward=0.0, advantage=(2.0, 99.0, -6.0), mask=(1, 0, 1)),
    ]


@pytest.fixture
def agent_batch(batches, agent_rows):
    return batches.build(agent_rows)


def test_structure_follows_the_keys(agent_batch):
    b = agent_batch
    assert (b.bs, len(b), b.n_groups, b.n_sessions, b.n_tokens, b.longest) == (4, 4, 2, 3, 7, 3)
    assert b.uid.tolist() == ["z", "a_b", "a_b", "a_b"]
    assert b.group.tolist() == [1, 0, 0, 0]
    assert b.session.tolist() == [2, 1, 0, 0]
    assert b.session_number.tolist() == [0, 1, 0, 0]
    assert b.output_index.tolist() == [0, 0, 1, 0]
    assert b.is_final.tolist() == [True, True, True, False]
    assert b.lengths.tolist() == [2, 1, 1, 3]
    assert b.row_of_token.tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert b.position.tolist() == [0, 1, 0, 0, 0, 1, 2]
    assert b.n_valid.tolist() == [2, 1, 1, 2]


def test_padded_access_reads_like_a_dataproto(agent_batch):
    expected = torch.tensor([[1, 3, 0], [-2, 0, 0], [8, 0, 0], [2, 99, -6]], dtype=torch.float32)
    assert torch.equal(agent_batch.batch["advantages"], expected)
    assert agent_batch.batch["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 1]]
    assert torch.equal(agent_batch.batch["token_level_rewards"].sum(-1), agent_batch.rewards)
    assert torch.equal(agent_batch.batch["token_level_scores"], agent_batch.batch["rm_scores"])
    assert agent_batch.batch["advantages"] is agent_batch.batch["advantages"]
    assert agent_batch.non_tensor_batch["uid"].tolist() == ["z", "a_b", "a_b", "a_b"]
    assert agent_batch.non_tensor_batch["domain"].dtype == object
    assert "advantages" in agent_batch.batch and "entropy" not in agent_batch.batch
    assert set(agent_batch.non_tensor_batch) == {"uid", "domain"} and len(agent_batch.non_tensor_batch) == 2
    assert len(agent_batch.batch) == len(list(agent_batch.batch)) == 5


def test_padded_and_jagged_are_inverse(agent_batch):
    values = torch.arange(7.0)
    assert torch.equal(agent_batch.to_values(agent_batch.to_padded(values)), values)


def test_align_tells_rows_from_tokens(agent_batch):
    rows, per_token = agent_batch.align(torch.arange(4))
    assert (rows.tolist(), per_token) == ([0, 1, 2, 3], False)
    tokens, per_token = agent_batch.align(torch.arange(7))
    assert (tokens.tolist(), per_token) == (list(range(7)), True)
    padded, per_token = agent_batch.align(agent_batch.to_padded(torch.arange(7)))
    assert (padded.tolist(), per_token) == (list(range(7)), True)
    with pytest.raises(ValueError, match=r"shape \(5,\) is none of: one per response \(4,\)"):
        agent_batch.align(torch.zeros(5))


def test_token_reductions_leave_out_tool_tokens(agent_batch):
    advantages = agent_batch.values("advantages")
    assert agent_batch.mean_over_tokens(advantages).tolist() == [2.0, -2.0, 8.0, -2.0]
    assert agent_batch.sum_over_tokens(advantages).tolist() == [4.0, -2.0, 8.0, -4.0]
    assert agent_batch.max_over_tokens(advantages).tolist() == [3.0, -2.0, 8.0, 2.0]


def test_token_reductions_read_bfloat16(agent_batch):
    values = torch.arange(agent_batch.n_tokens, dtype=torch.float32)
    for reduce in (agent_batch.sum_over_tokens, agent_batch.mean_over_tokens, agent_batch.max_over_tokens):
        assert torch.equal(reduce(values.to(torch.bfloat16)), reduce(values))


def test_token_reductions_of_a_row_without_valid_tokens_are_zero(batches):
    batch = batches.build([batches.Row("a", length=2, mask=0, advantage=-4.0), batches.Row("b", advantage=-4.0)])
    advantages = batch.values("advantages")
    assert batch.mean_over_tokens(advantages).tolist() == [0.0, -4.0]
    assert batch.max_over_tokens(advantages).tolist() == [0.0, -4.0]


def test_sessions_and_groups_average_what_belongs_to_them(agent_batch):
    sessions = agent_batch.per_session(torch.tensor([5.0, 1.0, 2.0, 4.0]))
    assert sessions.tolist() == [3.0, 1.0, 5.0]
    assert agent_batch.expand_sessions(sessions).tolist() == [5.0, 1.0, 3.0, 3.0]
    groups = agent_batch.per_group(sessions)
    assert groups.tolist() == [2.0, 5.0]
    assert agent_batch.expand_groups(groups).tolist() == [5.0, 2.0, 2.0, 2.0]
    assert agent_batch.expand_rows(torch.arange(4)).tolist() == [0, 0, 1, 2, 3, 3, 3]


def test_session_reward_is_that_of_the_final_output(agent_batch):
    assert agent_batch.rewards.tolist() == [1.0, 0.25, 0.5, 0.0]
    assert agent_batch.session_rewards.tolist() == [0.5, 0.25, 1.0]


def test_tie_rank_follows_content_not_position_or_uid(batches, agent_rows):
    rank = batches.build(agent_rows).tie_rank
    assert sorted(rank.tolist()) == [0, 1, 2, 3]
    shuffled = [agent_rows[i] for i in (2, 0, 3, 1)]
    assert torch.equal(batches.build(shuffled).tie_rank, rank[[2, 0, 3, 1]])

    def contents_in_order(uids):
        rows = [
            batches.Row(uid, session=i, prompt=prompt, tokens=tokens)
            for i, (uid, prompt, tokens) in enumerate(
                zip(uids, [(1,), (1,), (2,)], [(4, 5), (5, 4), (4, 5)], strict=True)
            )
        ]
        return batches.build(rows).tie_rank.tolist()

    assert contents_in_order(["x", "y", "z"]) == contents_in_order(["q", "c", "a"])


def test_tie_rank_of_equal_content_falls_back_to_session_and_output(batches):
    rows = [
        batches.Row("a", session=s, output=o, prompt=(1,), tokens=(2, 3)) for s, o in ((1, 0), (0, 1), (0, 0), (2, 0))
    ]
    assert batches.build(rows).tie_rank.tolist() == [2, 1, 0, 3]


def test_tie_rank_tells_a_prefix_and_token_zero_apart(batches):
    rows = [batches.Row("a", session=i, length=len(t), tokens=t) for i, t in enumerate([(0,), (0, 0), (0, 0, 0)])]
    orders = set()
    for permutation in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        rank = batches.build([rows[i] for i in permutation]).tie_rank.tolist()
        orders.add(tuple(r for _, r in sorted(zip(permutation, rank, strict=True))))
    assert len(orders) == 1


def test_tie_rank_without_prompts_says_what_is_missing(batches):
    batch = batches.build(batches.rows([[1, 0]]), without=["prompts"])
    with pytest.raises(FieldError, match="no token field 'prompts'"):
        _ = batch.tie_rank


def test_missing_fields_are_named_with_what_is_there(agent_batch):
    with pytest.raises(FieldError, match=r"no token field 'entropy'.*advantages, domain.*`requires`"):
        agent_batch.batch["entropy"]
    with pytest.raises(FieldError, match="no column 'data_source'"):
        agent_batch.non_tensor_batch["data_source"]
    assert agent_batch.non_tensor_batch.get("data_source") is None


def test_in_place_changes_are_noticed(agent_batch):
    assert agent_batch.mutated() == []
    agent_batch.values("advantages")[0] = 5
    agent_batch.batch["old_log_probs"].mul_(2)
    assert agent_batch.mutated() == ["advantages", "old_log_probs (padded)"]


def test_columns_refuse_writes_and_leave_the_hosts_array_writable():
    column = np.array([1, 2])
    batch = RolloutBatch(["a_0_0", "a_1_0"], torch.tensor([0, 1, 2]), {"n": column, "t": torch.tensor([3, 4])}, {})
    with pytest.raises(ValueError, match="read-only"):
        batch.column("n")[0] = 9
    with pytest.raises(ValueError, match="read-only"):
        batch.uid[0] = "b"
    column[0] = 9
    assert batch.column("n").tolist() == [9, 2]
    assert batch.column("t").tolist() == [3, 4]


def test_list_columns_stay_objects():
    batch = RolloutBatch(["a_0_0", "a_1_0"], torch.tensor([0, 1, 2]), {"turns": [[1, 2], [3, 4]]}, {})
    assert batch.column("turns").shape == (2,)
    assert batch.column("turns")[1] == [3, 4]


@pytest.mark.parametrize("key", ["a", "a_0", "a_x_0", "a_0_x", "a__0"])
def test_malformed_keys_are_shown(key):
    with pytest.raises(ValueError, match=f"row key '{key}' does not read"):
        RolloutBatch([key], torch.tensor([0, 1]), {}, {})


def test_lengths_have_to_agree():
    offsets = torch.tensor([0, 1, 2])
    keys = ["a_0_0", "a_1_0"]
    with pytest.raises(ValueError, match=r"offsets must be \(3,\) from 0 for 2 keys, got \(2,\)"):
        RolloutBatch(keys, torch.tensor([0, 2]), {}, {})
    with pytest.raises(ValueError, match=r"token field 'x' must be \(2,\), got \(3,\)"):
        RolloutBatch(keys, offsets, {}, {"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="field 'd' must have 2 rows, got 1"):
        RolloutBatch(keys, offsets, {"d": ["m"]}, {})
    with pytest.raises(ValueError, match=r"prompt offsets must be \(3,\)"):
        RolloutBatch(keys, offsets, {}, {}, (torch.zeros(2), torch.tensor([0, 2])))


def test_an_empty_batch_has_a_structure_too():
    batch = RolloutBatch([], torch.tensor([0]), {}, {"response_mask": torch.zeros(0)})
    assert (batch.bs, batch.n_groups, batch.n_sessions, batch.longest) == (0, 0, 0, 0)
    assert batch.mean_over_tokens(torch.zeros(0)).shape == (0,)


def test_a_replaced_token_field_leaves_the_original_alone(agent_batch):
    changed = agent_batch.with_token_field("rm_scores", torch.ones(7))
    assert changed.rewards.tolist() == [2.0, 1.0, 1.0, 3.0]
    assert agent_batch.rewards.tolist() == [1.0, 0.25, 0.5, 0.0]
    assert torch.equal(changed.group, agent_batch.group)
