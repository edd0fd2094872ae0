"""The package ``dataflex-replay`` on the real trainer: a failed group trains on a past success, weighed by its age."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataflex_verl.bridge import jagged
from tests.real.harness import StoredBatch
from tests.real.test_reach_added import KeepOf, gradient_norm

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("contrib")]

FIELDS = (
    "prompts",
    "responses",
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "rollout_is_weights",
    "response_mask",
    "rm_scores",
)


@pytest.fixture(scope="module")
def rows(stored):
    """Seven groups of eight rollouts: room for eight rows more in the mini-batch of 64."""
    return stored.select(list(range(56)))


def changed(rows: StoredBatch, **values: torch.Tensor) -> StoredBatch:
    """The same rows with other jagged values."""
    fields = rows.fields.clone()
    for name, value in values.items():
        fields[name] = jagged(value, rows.fields[name].offsets())
    return StoredBatch(rows.keys, rows.tags, fields)


def solved_group(rows: StoredBatch) -> tuple[str, torch.Tensor]:
    """The uid of a group with a success, and (bs,) which rows are its."""
    rewards = [float(row.sum()) for row in rows.fields["rm_scores"].unbind()]
    uid = next(key.rsplit("_", 2)[0] for key, reward in zip(rows.keys, rewards, strict=True) if reward > 0.5)
    return uid, torch.tensor([key.startswith(uid) for key in rows.keys])


def failed(rows: StoredBatch) -> tuple[str, StoredBatch]:
    """The rows with every reward of one group 0."""
    uid, of_group = solved_group(rows)
    scores = rows.fields["rm_scores"]
    values = scores.values().clone()
    values[of_group.repeat_interleave(scores.offsets().diff())] = 0.0
    return uid, changed(rows, rm_scores=values)


def drifted(rows: StoredBatch) -> StoredBatch:
    """The rows as another policy would have written them."""
    values = rows.fields["rollout_log_probs"].values()
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(3))
    return changed(rows, rollout_log_probs=(values + 0.5 * noise).clamp(max=0.0))


def make(**parameters: Any) -> dict[str, object]:
    from dataflex_replay import Replay

    return {"replay": Replay(**parameters)}


def replayed_key(outcome: Any, uid: str, rows: StoredBatch) -> str:
    (key,) = [key for key in outcome.keys if key.startswith(uid) and key not in rows.keys]
    return key


def by_key(outcome: Any, name: str) -> dict[str, torch.Tensor]:
    return dict(zip(outcome.keys, outcome.fields[name], strict=True))


def test_a_failed_group_trains_on_a_past_success_as_its_formula_says(live, rows, demo):
    settings = {"algorithm.rollout_correction.rollout_is": "token"}
    plugins = make()
    first = drifted(rows)
    assert "dataflex/added_rows" not in live.update(first, plugins=plugins, settings=settings, step=1).metrics
    uid, second = failed(rows)
    outcome = live.update(second, plugins=plugins, settings=settings, step=2, fields=FIELDS)
    assert outcome.metrics["dataflex/added_rows"] == 1.0
    key = replayed_key(outcome, uid, rows)
    fields = {name: by_key(outcome, name) for name in FIELDS}

    # It is a response of the first step that succeeded, with the log-probs that it had then.
    rewards = [float(row.sum()) for row in rows.fields["rm_scores"].unbind()]
    written = {
        tuple(rows.fields["responses"].unbind()[i].tolist()): first.fields["rollout_log_probs"].unbind()[i]
        for i, own in enumerate(rows.keys)
        if own.startswith(uid) and rewards[i] > 0.5
    }
    response = tuple(fields["responses"][key].tolist())
    assert response in written
    assert torch.equal(fields["prompts"][key], fields["prompts"][f"{uid}_0_0"])
    candidates = [
        first.fields["rollout_log_probs"].unbind()[i]
        for i, own in enumerate(rows.keys)
        if own.startswith(uid) and tuple(rows.fields["responses"].unbind()[i].tolist()) == response
    ]
    behaviour = fields["rollout_log_probs"][key]
    assert any(torch.equal(behaviour, candidate) for candidate in candidates)

    # One success among nine: the group's GRPO advantages.
    assert fields["advantages"][key].tolist() == pytest.approx([8 / 3] * len(response), rel=1e-4)
    of_group = [own for own in rows.keys if own.startswith(uid)]
    assert all(
        fields["advantages"][own].tolist() == pytest.approx([-1 / 3] * n, rel=1e-4)
        for own in of_group
        for n in [len(fields["responses"][own])]
    )

    # verl's weight, capped at its threshold of 2.
    expected = (fields["old_log_probs"][key] - behaviour).exp().clamp(max=2.0)
    torch.testing.assert_close(fields["rollout_is_weights"][key], expected, rtol=1e-5, atol=0)
    assert (expected - 1).abs().max() > 0.05

    trained = [own for own in outcome.keys if bool(fields["response_mask"][own].any())]
    examples = [
        (
            fields["prompts"][own].tolist(),
            fields["responses"][own].tolist(),
            (fields["advantages"][own] * fields["rollout_is_weights"][own]).tolist(),
        )
        for own in trained
    ]
    assert len(examples) == 57
    assert outcome.grad_norm == pytest.approx(gradient_norm(demo.model_dir, examples), rel=1e-3)
    # The opposite: the same batch without the replay.
    plain = live.update(second, settings=settings, step=2)
    assert plain.grad_norm != pytest.approx(outcome.grad_norm, rel=1e-2)


def test_without_a_failed_group_or_a_past_success_nothing_changes_bit_for_bit(live, rows):
    _, second = failed(rows)
    # The same batch again: what it solved it solves, what failed was never solved. And a failed group without a past.
    for batch, past in ((rows, rows), (second, None)):
        live.update(batch, step=2)
        state = live.state()
        plugins = make()
        if past is not None:
            live.update(past, plugins=plugins, step=1)
        outcome = live.update(batch, plugins=plugins, step=2)
        assert "dataflex/added_rows" not in outcome.metrics and live.same_state(state)
    assert outcome.metrics["dataflex/replay/failed_groups_total"] >= 1.0


def test_without_correction_the_replay_counts_fully(live, rows):
    plugins = make()
    live.update(drifted(rows), plugins=plugins, step=1)
    uid, second = failed(rows)
    outcome = live.update(second, plugins=plugins, step=2, fields=FIELDS)
    assert "rollout_is_weights" not in outcome.fields
    assert by_key(outcome, "advantages")[replayed_key(outcome, uid, rows)].tolist()[0] == pytest.approx(8 / 3, rel=1e-4)


def test_the_replay_leaves_with_a_group_that_another_plugin_drops(live, rows):
    settings = {"critic.enable": False}
    plugins = make()
    live.update(rows, plugins=plugins, step=1)
    _, second = failed(rows)
    first_group = second.select(sorted(range(56), key=lambda i: not second.keys[i].startswith(failed(rows)[0])))
    outcome = live.update(first_group, plugins={**plugins, "keep": KeepOf(0)}, settings=settings, step=2)
    assert outcome.metrics["dataflex/added_rows_without_group"] == 1.0
    plain = live.update(first_group, plugins={"keep": KeepOf(0)}, settings=settings, step=2)
    assert outcome.grad_norm == plain.grad_norm


def test_a_restored_pool_replays_what_the_first_would_have(live, rows):
    plugins, other = make(), make()
    live.update(drifted(rows), plugins=plugins, step=1)
    state = plugins["replay"].state_dict()
    _, second = failed(rows)
    expected = live.update(second, plugins=plugins, step=2)
    other["replay"].load_state_dict(state)
    assert live.update(second, plugins=other, step=2).grad_norm == expected.grad_norm
    assert live.update(second, plugins=make(), step=2).grad_norm != pytest.approx(expected.grad_norm, rel=1e-2)
