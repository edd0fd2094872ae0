"""The decision log of the real trainer: what it says is what was applied, and replaying it gives the same again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf, open_dict

from dataflex_hooks import HookManager
from dataflex_hooks.decision_log import files
from dataflex_hooks.decision_log.reader import DecisionLog
from dataflex_hooks.whatif.jsonl import JsonlSource
from dataflex_hooks.whatif.run import LOGGED, what_if
from dataflex_hooks.whatif.steps import LogSource
from dataflex_hooks.whatif.strategy import CannotReplay, Strategy
from dataflex_verl import presets
from dataflex_verl.checkpoint import TRACKER
from dataflex_verl.decision_log import open_log
from dataflex_verl.probe import check_loss
from tests.real.harness import compose_config
from tests.real.prompts import overrides
from tests.real.runs import train

pytestmark = pytest.mark.real

STACKS: dict[str, dict[str, Any]] = {
    "difffilter+per": {"names": ["difffilter", "per"]},
    "topk+softmax": {"names": ["topk", "softmax"]},
    "gfpo dropped": {"names": ["gfpo"], "effect": {"gfpo": "drop"}},
    "topk dropped, sequence mean": {
        "names": ["topk", "per"],
        "effect": {"topk": "drop"},
        "loss": "seq-mean-token-mean",
    },
    "maxvar+difficulty_length+curve": {"names": ["maxvar", "difficulty_length", "curve"]},
    "dapo in shadow mode": {"names": ["dapo", "pf_ppo"], "apply": False},
    "ar+high_entropy": {"names": ["ar", "high_entropy"], "log": "tokens"},
}


@pytest.mark.nightly
def test_a_whole_run_with_domains_resumed_is_logged_once_and_replayed(ray_session, demo, tmp_path: Path) -> None:
    given = overrides(
        demo,
        *presets.overrides(["difffilter", "dump_ucb"]),
        "+dataflex.log_decisions=true",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
        "trainer.save_freq=1",
    )
    given = [*(text for text in given if "resume_mode" not in text), "trainer.resume_mode=auto"]
    train(compose_config([*given, "trainer.total_training_steps=3"]))
    # As if the run had been killed before it saved its third step.
    (tmp_path / "run" / TRACKER).write_text("2")
    train(compose_config([*given, "trainer.total_training_steps=4"]))

    source = LogSource(DecisionLog.open(tmp_path / "run"))
    logged = list(source.steps())
    assert [step.step for step in logged] == [1, 2, 3, 4] and source.notes == []
    aside = [path.name for path in (source.path / files.SUPERSEDED / "1").iterdir()]
    assert aside == [files.step_name(3)]

    own = Strategy("run", OmegaConf.to_container(OmegaConf.create(source.facts.dataflex)))  # type: ignore[arg-type]
    result = what_if(source, [own, Strategy(LOGGED)])
    assert result.notes == [] and result.difference is not None
    assert result.difference.identical == result.rollouts == 4 * 64
    assert 0 < result.tallies[0].total.states["trained"] < result.rollouts
    proposed = dict(result.proposed[0])
    assert len(proposed) == 4
    for step in logged:
        assert proposed[step.step].tolist() == step.info["proposed"]
    assert len({tuple(shares.tolist()) for shares in proposed.values()}) > 1

    ours = what_if(source, [Strategy("difffilter", presets.block("difffilter"))]).tallies[0]
    dumped = what_if(JsonlSource(tmp_path / "rollouts"), [Strategy("difffilter", presets.block("difffilter"))])
    for step, total in ours.steps.items():
        assert dumped.tallies[0].steps[step].plain() == total.plain()


def block_of(names, effect=None, apply=True, log=True, loss=None, folder=None) -> dict[str, Any]:
    plugins = {label: settings for name in names for label, settings in presets.block(name)["plugins"].items()}
    for label, given in (effect or {}).items():
        plugins[label] = {**plugins[label], "effect": given}
    return {"plugins": plugins, "apply": apply, "log_decisions": log, "log_dir": str(folder)}


def run_logged(live, stored, block: dict[str, Any], loss: dict[str, Any], step: int = 1):
    """One update with the log on; the trainer builds its log at start, and the live one has started long ago."""
    trainer = live.trainer
    hooks = HookManager.from_config(block, estimator="grpo", has_groups=True, rollout_n=8, response_length=6)
    config = copy.deepcopy(live.config)
    with open_dict(config):
        config.dataflex = block
        config.actor_rollout_ref.actor.update(loss)
    trainer.log = open_log(config, hooks, check_loss(config, "weights"), ["a plan"])
    try:
        outcome = live.update(stored, block, loss=loss, step=step)
        trainer.log.end_of_step()
        trainer.log.wait()
    finally:
        trainer.log = None
    return outcome


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_rows_are_what_the_trainer_applied_and_a_replay_gives_them_again(live, stored, tmp_path: Path, stack) -> None:
    given = STACKS[stack]
    block = block_of(**{key: value for key, value in given.items() if key != "loss"}, folder=tmp_path / "log")
    loss = {"loss_agg_mode": given["loss"]} if "loss" in given else {}
    outcome = run_logged(live, stored, block, loss)
    rows = pq.read_table(tmp_path / "log").to_pylist()
    assert len(rows) == len(stored.keys)
    by_key = {f"{row['uid']}_{row['session']}_{row['output']}": row for row in rows}
    masks, applies = outcome.of("response_mask"), given.get("apply", True)
    weighed = outcome.of("rollout_is_weights") if "rollout_is_weights" in outcome.fields else {}
    assert bool(weighed) == (applies and stack != "gfpo dropped")
    if applies:
        assert {key for key, row in by_key.items() if row["state"] != "dropped"} == set(masks)
    else:
        assert {row["state"] for row in rows} == {"trained", "masked"} and len({row["weight"] for row in rows}) > 1
    for key in masks if applies else ():
        row, weights = by_key[key], weighed.get(key, torch.ones(len(masks[key])))[masks[key].bool()]
        mean = weights.double().mean().float() if given.get("log") == "tokens" else weights[0]
        weight = np.float32(row["weight"]) * np.float32(1.0 if row["fill"] is None else row["fill"])
        assert weight == np.float32(float(mean)), key
        assert row["loss_tokens"] == len(weights)
        # A reweighter may give 0 to a rollout that every plugin keeps.
        assert row["state"] == "trained" if weights.any() else row["weight"] == 0
        assert row["state"] == "masked" if row["why"] else row["state"] == "trained"
    rewards = {key: float(value.sum()) for key, value in outcome.of("rm_scores").items()}
    assert all(by_key[key]["reward"] == reward for key, reward in rewards.items())

    strategy = Strategy("run", OmegaConf.to_container(OmegaConf.create(block)))  # type: ignore[arg-type]
    source = LogSource(DecisionLog.open(tmp_path / "log"))
    result = what_if(source, [strategy, Strategy(LOGGED)])
    assert result.difference is not None and result.difference.identical == len(rows) == result.rollouts
    other = what_if(source, [Strategy("failed", presets.block("failed")), Strategy(LOGGED)])
    assert other.difference is not None and other.difference.identical < len(rows)


def test_the_log_changes_no_bit_of_the_update(live, stored, tmp_path: Path) -> None:
    block = block_of(["difffilter", "ar"], log="tokens", folder=tmp_path / "log")
    logged = run_logged(live, stored, block, {})
    state = live.state()
    plain = live.update(stored, {**block, "log_decisions": False})
    assert live.same_state(state) and plain.grad_norm == logged.grad_norm > 0
    assert plain.metrics["dataflex/kept_frac"] == logged.metrics["dataflex/kept_frac"]
    live.update(stored, {"plugins": presets.block("topk")["plugins"]})
    assert not live.same_state(state)


def test_without_tokens_a_token_preset_is_refused_and_the_field_named(live, stored, tmp_path: Path) -> None:
    run_logged(live, stored, block_of(["difffilter"], folder=tmp_path / "log"), {})
    source = LogSource(DecisionLog.open(tmp_path / "log"))
    with pytest.raises(CannotReplay, match="'ar' reads old_log_probs, which this log does not have"):
        what_if(source, [Strategy("ar", presets.block("ar"))])


def test_tokens_are_those_of_the_batch(live, stored, tmp_path: Path) -> None:
    outcome = run_logged(live, stored, block_of(["ar"], log="tokens", folder=tmp_path / "log"), {})
    advantages, masks = outcome.of("advantages"), outcome.of("response_mask")
    for row in pq.read_table(tmp_path / "log").to_pylist():
        key = f"{row['uid']}_{row['session']}_{row['output']}"
        assert torch.equal(torch.tensor(row["advantages"]), advantages[key])
        assert row["response_mask"] == masks[key].tolist()
        assert len(row["old_log_probs"]) == len(row["entropy"]) == row["response_tokens"]
