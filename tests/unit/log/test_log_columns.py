"""What stands in a row of the decision log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import dataflex_hooks as dh
from dataflex_hooks.decision_log import schema
from dataflex_hooks.decision_log.columns import UpdateRecord, table
from dataflex_hooks.decision_log.schema import Labels
from dataflex_verl import presets
from dataflex_verl.decision_log import problems as log_problems
from tests.unit.log.simulated import simulate

DOCUMENT = Path(__file__).parents[3] / "docs" / "decision_log.md"


def rows_of(hooks: dh.HookManager, batch: dh.RolloutBatch, step: int = 1, **record) -> list[dict]:
    ctx = dh.StepContext(step, explain=True)
    reward = hooks.post_reward(batch, ctx)
    update = hooks.post_advantage(batch, ctx, dh.LossCoefficients("token"))
    noted = UpdateRecord(step, 0, hooks.config.apply, batch, reward, batch, update, **record)
    return table(noted, Labels.of(hooks.plan(), False), ("domain",)).to_pylist()


class Rewards:
    provides = {"rewards", "add"}

    @dh.hookimpl
    def post_reward(self, batch, ctx):
        added = dh.AddedRow([1, 2], [3, 4, 5], 0.5, domain="demo", reward=1.0)
        return dh.RewardDecision(rewards=batch.rewards + 10, add=[added])


class Mask:
    provides = {"mask"}

    @dh.hookimpl
    def post_advantage(self, batch, ctx):
        return dh.UpdateDecision(mask=batch.lengths <= 2, reason="too long", scores=-batch.lengths.double())


def test_every_column_of_the_schema_is_documented() -> None:
    assert schema.tables() in DOCUMENT.read_text(encoding="utf-8")


def test_rewards_before_and_after_reasons_scores_and_added_rows(batches) -> None:
    hooks = dh.HookManager({"own": Rewards(), "short": Mask()})
    batch = batches.build([batches.Row("a", length=2, reward=1.0), batches.Row("a", session=1, length=5)])
    short, long, added = rows_of(hooks, batch)
    assert (short["reward"], short["new_reward"], short["state"], short["why"]) == (1.0, 11.0, "trained", None)
    assert (long["reward"], long["new_reward"], long["state"], long["why"]) == (0.0, 10.0, "masked", "short: too long")
    assert (short["weight"], long["weight"]) == (1.0, 0.0) and (short["keep_short"], long["keep_short"]) == (
        True,
        False,
    )
    assert (short["score_short"], long["score_short"]) == (-2.0, -5.0)
    assert (added["state"], added["why"], added["domain"], added["response_tokens"]) == ("added", "own", "demo", 3)
    assert added["weight"] is None and added["uid"] == ""


def test_drops_say_who_and_the_host_says_that_a_row_was_alone(batches) -> None:
    hooks = dh.HookManager.from_config(
        {"plugins": {"f": {**presets.block("difffilter")["plugins"]["difffilter"], "effect": "drop"}}},
        estimator="grpo",
        has_groups=True,
    )
    batch = batches.groups([1.0, 0.0], [1.0, 1.0])
    ctx = dh.StepContext(1)
    reward = hooks.post_reward(batch, ctx)
    assert reward.row_keep is not None and reward.row_keep.tolist() == [True, True, False, False]
    kept = batches.build(batches.rows([[1.0, 0.0]])[:1])
    update = hooks.post_advantage(kept, ctx, dh.LossCoefficients("token"))
    noted = UpdateRecord(1, 0, True, batch, reward, kept, update)
    rows = table(noted, Labels.of(hooks.plan(), False), ("domain",)).to_pylist()
    assert [row["state"] for row in rows] == ["trained", "dropped", "dropped", "dropped"]
    assert rows[1]["why"] == "host: the only rollout of its prompt that is left"
    assert rows[2]["why"] == rows[3]["why"] == "f: group_solve_rate/threshold_band"
    assert [row["weight"] for row in rows] == [1.0, None, None, None]
    assert rows[0]["keep_f"] is True and rows[2]["keep_f"] is False
    # In a band 0, outside minus the distance: the pass rate 1 is 0.2 above the band.
    assert rows[0]["score_f"] == 0.0 and rows[2]["score_f"] == pytest.approx(-0.2)


def test_prompts_are_known_by_dataset_row_and_by_content_and_signals_by_key(tmp_path: Path) -> None:
    run = simulate(presets.block("dump_ucb"), tmp_path)
    rows = pq.read_table(run.folder).to_pylist()
    evicted = [row for row in rows if row["state"] == "evicted"]
    assert len(evicted) == 4 * 8 and len(rows) == 4 * (24 + 8)
    assert {row["why"] for row in evicted} == {"verl: filter_groups"}
    ours = [row for row in rows if row["state"] != "evicted"]
    assert {row["dataset_row"] for row in ours} == set(range(6))
    hashes = {(row["step"], row["uid"]): row["prompt_hash"] for row in ours}
    assert len(set(hashes.values())) == len(hashes) == 24
    assert {row["signal_acc"] for row in ours} == {0.0, 1.0} and "signal_note" not in ours[0]
    shares = {(row["step"], row["domain"]): row["proportion"] for row in ours}
    assert all(0 < share < 1 for share in shares.values()) and len(set(shares.values())) > 3


@pytest.mark.parametrize(
    ("later", "expected"), [(0.5, 0.5), ("err", None), (None, None), ([1, 2], None), (10**400, None)]
)
def test_a_signal_that_is_no_number_in_a_later_step_does_not_stop_the_run(batches, later, expected) -> None:
    infos = np.empty(2, dtype=object)
    infos[:] = [{"reward_extra_info": {"acc": True}}, {"reward_extra_info": {"acc": later}}]
    labels = Labels(signals=("acc",))
    for extra, wanted in (({"extra_fields": infos}, [1.0, expected]), ({}, [None, None])):
        batch = batches.build([batches.Row("a"), batches.Row("a", session=1)], columns=extra)
        noted = UpdateRecord(2, 0, True, batch, dh.HookManager().post_reward(batch, dh.StepContext(2)))
        found = [row["signal_acc"] for row in table(noted, labels, ()).to_pylist()]
        assert [None if np.isnan(value) else value for value in found] == wanted


def test_shadow_mode_logs_what_would_have_been(tmp_path: Path) -> None:
    block = {"plugins": presets.block("difffilter")["plugins"], "apply": False}
    shadow = pq.read_table(simulate(block, tmp_path / "a").folder).to_pylist()
    real = pq.read_table(simulate({**block, "apply": True}, tmp_path / "b").folder).to_pylist()
    assert [(row["state"], row["weight"]) for row in shadow] == [(row["state"], row["weight"]) for row in real]
    assert {row["state"] for row in shadow} == {"trained", "masked"}


def test_token_columns_come_with_tokens_only(tmp_path: Path) -> None:
    without = pq.read_table(simulate(presets.block("per"), tmp_path / "a").folder)
    tokens = pq.read_table(simulate(presets.block("per"), tmp_path / "b", log="tokens").folder)
    names = {column.name for column in schema.TOKEN_COLUMNS}
    assert names <= set(tokens.column_names) and not names & set(without.column_names)
    for row in tokens.to_pylist():
        assert {len(row[name]) for name in names} == {row["response_tokens"]}
        valid = [a for a, counts in zip(row["advantages"], row["response_mask"], strict=True) if counts]
        assert np.float32(np.mean(valid)) == pytest.approx(row["advantage"]) and len(valid) == row["loss_tokens"]
        assert all(np.float32(value) == value for value in row["old_log_probs"])


def test_a_token_scorer_gives_mean_scores_only_to_a_run_that_logs(batches) -> None:
    hooks = dh.HookManager.from_config(presets.block("ar"), estimator="grpo", has_groups=True)
    batch = batches.build([batches.Row("a", log_prob=-0.5), batches.Row("b", log_prob=-1.0)])
    (row, _) = rows_of(hooks, batch)
    assert row["score_ar"] == pytest.approx(float(torch.tensor(-0.5).exp()))
    merged = hooks.post_advantage(batch, dh.StepContext(1), dh.LossCoefficients("token"))
    assert merged.decisions[0].scores is None and merged.decisions[0].factor is not None


def test_without_pyarrow_the_start_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("dataflex_verl.decision_log.find_spec", lambda name: None)
    on = dh.HookManager.from_config({"log_decisions": True}, estimator="grpo", has_groups=True)
    (problem,) = log_problems(on)
    assert str(problem) == (
        "dataflex.log_decisions: got True; accepted: false in this environment: pyarrow, which writes the files, is "
        "not installed; pip install 'dataflex-verl[analysis]'"
    )
    assert log_problems(dh.HookManager.from_config({}, estimator="grpo", has_groups=True)) == []


@pytest.mark.parametrize("given", [False, True, "tokens"])
def test_log_decisions_is_a_switch_with_three_positions(given, problems) -> None:
    assert dh.parse({"log_decisions": given, "log_dir": "logs"}).log_decisions == given
    assert dh.parse({}).log_decisions is False
    (text,) = problems({"log_decisions": "token"})
    assert text == "dataflex.log_decisions: got 'token'; accepted: false, true or tokens; did you mean 'tokens'?"
    (text,) = problems({"log_dir": 3})
    assert text == "dataflex.log_dir: got 3; accepted: the path of a folder"
