"""What-if: a run's own strategy gives the run's decisions again; what a log lacks is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

import dataflex_hooks as dh
from dataflex_hooks.decision_log import files
from dataflex_hooks.decision_log.reader import DecisionLog
from dataflex_hooks.decision_log.schema import STATES
from dataflex_hooks.whatif.jsonl import JsonlSource
from dataflex_hooks.whatif.run import LOGGED, what_if
from dataflex_hooks.whatif.steps import LogSource
from dataflex_hooks.whatif.strategy import CannotReplay, Strategy
from dataflex_verl import presets, state_files
from tests.unit.log.simulated import DOMAINS, SimulatedRun, simulate

TOKEN_PRESETS = ("ar", "ar_paper", "high_entropy")
PER_RESPONSE = [name for name in presets.names() if name not in TOKEN_PRESETS]


def own(run: SimulatedRun, label: str = "run") -> tuple[LogSource, Strategy]:
    source = LogSource(DecisionLog.open(run.folder))
    return source, Strategy(label, OmegaConf.to_container(OmegaConf.create(source.facts.dataflex)))  # type: ignore[arg-type]


def same_as_the_run(run: SimulatedRun) -> int:
    """Replay a run's own strategy, compare with what was applied; returns how many different weights there were."""
    source, strategy = own(run)
    replay, notes = strategy.replay(source)
    assert notes == []
    weights = set()
    seen = 0
    for step in source.steps(replay.tokens):
        for update, decided in zip(step.updates, replay.step(step), strict=True):
            rows, at = update.rows, 0
            for row in range(len(rows)):
                key = f"{rows.uid_names[rows.uid[row]]}_{rows.session[row]}_{rows.output[row]}"
                state, weight, tokens = run.decided[step.step, key]
                assert (state, weight) == (STATES[decided.state[row]], decided.weight[row])
                if decided.weights is not None and tokens is not None:
                    assert (decided.weights[at : at + len(tokens)] == tokens).all()
                    at += len(tokens)
                weights.add((state, weight))
                seen += 1
    assert seen == len(run.decided) > 0
    assert {step for step, _ in replay.proposed} == set(run.proposed)
    assert all((shares == run.proposed[step]).all() for step, shares in replay.proposed)
    difference = what_if(source, [strategy, Strategy(LOGGED)]).difference
    assert difference is not None and difference.identical == seen
    return len(weights)


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("name", PER_RESPONSE)
def test_every_preset_per_response_gives_the_run_again_bit_for_bit(tmp_path: Path, name: str, kind: str) -> None:
    run = simulate(presets.block(name), tmp_path, kind=kind)
    decides = same_as_the_run(run)
    # What can differ from row to row does; all that others decide about is the next prompts, and failed finds nothing.
    assert decides > 1 or run.proposed or name == "failed"


@pytest.mark.parametrize("name", TOKEN_PRESETS)
def test_token_presets_need_a_log_with_tokens_and_then_give_the_run_again(tmp_path: Path, name: str) -> None:
    assert same_as_the_run(simulate(presets.block(name), tmp_path / "tokens", log="tokens")) > 10
    without = simulate(presets.block(name), tmp_path / "without")
    source, strategy = own(without)
    missing = "entropy" if name == "high_entropy" else "old_log_probs"
    with pytest.raises(CannotReplay) as caught:
        what_if(source, [strategy])
    assert str(caught.value) == (
        f"strategy 'run' cannot be run over {without.folder}: '{name}' reads {missing}, which this log does not have: "
        f"it was written without tokens, which dataflex.log_decisions=tokens keeps"
    )


STACKS: dict[str, dict[str, Any]] = {
    "stacked": {"names": ["difffilter", "per", "dump_ucb"]},
    "dropped early": {"names": ["difffilter", "softmax"], "drop": ["difffilter"]},
    "dropped late": {"names": ["topk", "per"], "drop": ["topk"], "min_keep": 0.9, "fallback": "keep_best"},
    "lone rows": {"names": ["gfpo", "per"], "drop": ["gfpo"], "k": 1},
    "shadow": {"names": ["dapo", "per", "tscl"], "apply": False},
    "mask_scale": {"names": ["maxvar", "curve"], "mask_scale": "kept"},
    "tokens and rows": {"names": ["ar", "difffilter", "high_entropy"], "log": "tokens"},
}


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_stacks_drops_shadow_mode_and_rules_give_the_run_again(tmp_path: Path, stack: str) -> None:
    given = dict(STACKS[stack])
    plugins = {label: dict(s) for name in given.pop("names") for label, s in presets.block(name)["plugins"].items()}
    for label in given.pop("drop", []):
        plugins[label]["effect"] = "drop"
    if "k" in given:
        plugins["gfpo"]["actuator"] = {"name": "gfpo", "params": {"k": given.pop("k")}}
    log = given.pop("log", True)
    assert same_as_the_run(simulate({"plugins": plugins, **given}, tmp_path, log=log)) > 2


def test_a_signal_of_the_reward_function_is_replayed_and_a_missing_one_named(tmp_path: Path) -> None:
    def block(signal: str) -> dict[str, Any]:
        scorer = {"name": "group_solve_rate", "params": {"signal": signal}}
        return {"plugins": {"acc": {"plugin": "select", "scorer": scorer, "actuator": "threshold_band"}}}

    run = simulate(block("acc"), tmp_path)
    same_as_the_run(run)
    with pytest.raises(CannotReplay, match="'acc' reads no signal 'f1'.*there is: acc"):
        what_if(own(run)[0], [Strategy("other", block("f1"))])


class Sum:
    """Reads values of tokens, and says so in a way that nobody can check before."""

    requires = {"post_advantage": ("advantages",)}
    provides = {"weights"}

    @dh.hookimpl
    def post_advantage(self, batch, ctx):
        return dh.UpdateDecision(weights=batch.sum_over_tokens(batch.values("advantages").abs()) + 1)


def test_what_is_read_in_passing_is_found_in_the_first_step_and_all_of_it_named(tmp_path: Path) -> None:
    block = {"plugins": {"sum": {"plugin": f"{__name__}:Sum"}, "more": {"plugin": f"{__name__}:Sum"}}}
    run = simulate(presets.block("per"), tmp_path / "rows")
    with pytest.raises(CannotReplay) as caught:
        what_if(own(run)[0], [Strategy("sum", block)])
    text = str(caught.value)
    assert "'sum' reads no token field 'advantages'" in text and "'more' reads no token field 'advantages'" in text
    tokens = simulate(presets.block("per"), tmp_path / "tokens", log="tokens")
    assert what_if(own(tokens)[0], [Strategy("sum", block)]).rollouts == 96


class Fails:
    provides = {"mask"}

    @dh.hookimpl
    def post_reward(self, batch, ctx):
        if ctx.step == 3:
            raise ValueError("it broke")

    @dh.hookimpl
    def post_advantage(self, batch, ctx):
        return dh.UpdateDecision(mask=batch.rewards > 0)


@pytest.mark.parametrize("place", ["block", "plugin"])
def test_on_error_hides_no_missing_field_and_a_plugin_that_failed_is_said(tmp_path: Path, place: str) -> None:
    def block_of(plugin: type) -> dict[str, Any]:
        own = {"plugin": f"{__name__}:{plugin.__name__}"}
        if place == "plugin":
            return {"plugins": {"it": {**own, "on_error": "disable"}}}
        return {"plugins": {"it": own}, "on_error": "disable"}

    source, strategy = own(simulate(block_of(Fails), tmp_path))
    with pytest.raises(CannotReplay, match="'it' reads no token field 'advantages'"):
        what_if(source, [Strategy("sum", block_of(Sum))])
    result = what_if(source, [strategy, Strategy(LOGGED)])
    assert result.difference is not None and result.difference.identical == result.rollouts == 96
    assert [bool(step.states["masked"]) for step in result.tallies[0].steps.values()] == [True, True, False, False]
    assert result.notes == [
        "strategy 'run': it failed in the replay and, by on_error: disable, decided nothing from there on"
    ]


def test_settings_that_changed_when_a_run_was_resumed_are_said(tmp_path: Path) -> None:
    simulate(presets.block("difffilter"), tmp_path, steps=2)
    source, strategy = own(simulate(presets.block("dapo"), tmp_path, steps=2, first=3))
    result = what_if(source, [strategy, Strategy(LOGGED)])
    assert result.notes == [
        "from step 3 on the run had other settings (dataflex)",
        "'run' stands for its settings at the end",
    ]
    assert result.difference is not None and 48 <= result.difference.identical < result.rollouts == 96


def test_rollouts_that_the_run_dropped_early_have_no_advantage_and_are_not_guessed(tmp_path: Path) -> None:
    plugins = presets.block("difffilter")["plugins"]
    plugins["difffilter"]["effect"] = "drop"
    source, _ = own(simulate({"plugins": plugins}, tmp_path))
    with pytest.raises(CannotReplay, match=r"'per' reads advantages: \d+ of 24 rollouts have none in this log"):
        what_if(source, [Strategy("per", presets.block("per"))])
    assert what_if(source, [Strategy("dapo", presets.block("dapo"))]).rollouts == 96


def test_stateful_plugins_begin_with_the_logged_state_where_the_log_begins_later(tmp_path: Path) -> None:
    block = {**presets.block("curve")}
    whole = simulate(block, tmp_path / "whole", steps=8)
    early = simulate(block, tmp_path / "early", steps=4)
    later = simulate(block, tmp_path / "later", steps=4, first=5, hooks=early.hooks)
    late = {key: value for key, value in whole.decided.items() if key[0] > 4}
    assert later.decided.keys() == late.keys()
    assert all(later.decided[key][:2] == late[key][:2] for key in late)
    source, strategy = own(later)
    fresh = what_if(source, [strategy, Strategy(LOGGED)])
    assert fresh.notes == ["strategy 'run': curve remembers nothing of what came before step 5, the log's first"]
    assert fresh.difference is not None and fresh.difference.identical < 96

    assert early.hooks is not None
    again = simulate(block, tmp_path / "again", steps=4)
    assert again.log is not None and again.hooks is not None
    again.log.resumed(4)
    saved = state_files.read(files.state_folder(again.folder, 4))
    assert saved is not None and saved.step == 4
    known = what_if(source, [strategy, Strategy(LOGGED)], saved.plugins)
    assert known.notes == [] and known.difference is not None and known.difference.identical == 96


def test_a_gap_and_a_damaged_file_are_said(tmp_path: Path) -> None:
    run = simulate(presets.block("difffilter"), tmp_path, steps=6)
    (run.folder / files.step_name(2)).unlink()
    (run.folder / files.step_name(4)).write_bytes(b"PAR1")
    source, strategy = own(run)
    result = what_if(source, [strategy, Strategy(LOGGED)])
    assert result.steps == 4 and result.difference is not None and result.difference.identical == 4 * 24
    assert sorted(result.notes) == [
        "step 2 missing in the log: what plugins remember of it is missing too",
        "step 4 missing in the log: what plugins remember of it is missing too",
        "step-00000004.parquet cannot be read and is left out (Parquet file size is 4 bytes, smaller than the minimum "
        "file footer (8 bytes))",
    ]


def test_the_difference_counts_and_says_who_differs_where(tmp_path: Path) -> None:
    run = simulate(presets.block("difffilter"), tmp_path)
    source, strategy = own(run)
    result = what_if(source, [Strategy("none"), strategy]).plain()
    kept = sum(state == "trained" for state, _, _ in run.decided.values())
    difference = result["difference"]
    assert 0 < kept < 96
    assert difference["trained_by_both"] == kept and difference["trained_by_first_only"] == 96 - kept
    assert difference["trained_by_second_only"] == difference["trained_by_neither"] == 0
    assert difference["agreement"] == kept / 96
    assert set(difference["domains"]) == set(DOMAINS)
    assert sum(of["first_only"] for of in difference["domains"].values()) == 96 - kept
    assert {(prompt["first"], prompt["second"]) for prompt in difference["prompts"]} == {(4, 0)}
    (none, ours) = result["strategies"]
    assert none["trained"] == 96 and ours["masked"] == 96 - kept
    assert ours["reasons"] == {"difffilter: group_solve_rate/threshold_band": 96 - kept}
    rewards = [row for step in source.steps() for update in step.updates for row in update.rows.reward]
    assert none["reward_all"] == pytest.approx(np.mean(rewards))
    assert len(ours["steps"]) == 4 and sum(step["trained"] for step in ours["steps"]) == kept


# ---------------------------------------------------------------- verl's own dumps


def dump(folder: Path, steps: int = 3, groups: int = 6) -> Path:
    """What verl's ``_write_generations`` writes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        lines = []
        for group in range(groups):
            for session in range(4):
                score = float(rng.integers(0, 2))
                lines.append(
                    {
                        "input": f"prompt {group}",
                        "output": f"text {rng.integers(0, 3)}",
                        "gts": None,
                        "score": score,
                        "step": step,
                        "uid": f"{step}-{group}_{session}_0",
                    }
                )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{step}.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_verls_dumps_are_enough_for_what_reads_rewards(tmp_path: Path) -> None:
    source = JsonlSource(dump(tmp_path / "dump"))
    assert source.facts.rollouts == 4
    result = what_if(source, [Strategy("difffilter", presets.block("difffilter"))]).plain()
    expected = 0
    for path in sorted((tmp_path / "dump").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for group in range(6):
            mine = [line["score"] for line in lines if line["uid"].split("_")[0].endswith(f"-{group}")]
            expected += 4 if 0.2 < np.mean(mine) < 0.8 else 0
    assert result["rollouts"] == 72 and 0 < result["strategies"][0]["trained"] == expected < 72


def test_a_response_may_hold_what_other_readers_take_for_a_line_end(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", steps=1)
    lines = [json.loads(line) for line in (folder / "1.jsonl").read_text().splitlines()]
    # As verl writes it: json.dumps(..., ensure_ascii=False).
    text = "".join(json.dumps({**line, "output": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n" for line in lines)
    (folder / "1.jsonl").write_text(text, encoding="utf-8")
    result = what_if(JsonlSource(folder), [Strategy("dapo", presets.block("dapo"))])
    assert result.rollouts == 24 and result.notes == []


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("topk", "'topk' reads advantages, which this log does not have"),
        ("ar", "'ar' reads old_log_probs, which this log does not have"),
        ("dump_ucb", "'dump_ucb' reads advantages, which this log does not have"),
        ("gfpo", "'gfpo' reads response_mask: numbers of valid tokens are not in this log"),
        ("pf_ppo", "merging the weights of 'pf_ppo' needs response_mask: numbers of valid tokens"),
    ],
)
def test_what_verls_dumps_lack_is_named(tmp_path: Path, name: str, missing: str) -> None:
    with pytest.raises(CannotReplay) as caught:
        what_if(JsonlSource(dump(tmp_path / "dump")), [Strategy(name, presets.block(name))])
    assert missing in str(caught.value)


def test_weights_need_no_lengths_where_every_response_counts_alike(tmp_path: Path) -> None:
    source = JsonlSource(dump(tmp_path / "dump"), "sequence")
    result = what_if(source, [Strategy("pf_ppo", presets.block("pf_ppo"))]).plain()["strategies"][0]
    assert result["weight_mean"] == pytest.approx(1.0)


def test_dumps_that_are_cut_off_or_empty_are_left_out_and_said(tmp_path: Path) -> None:
    folder = dump(tmp_path / "dump", steps=4)
    text = (folder / "2.jsonl").read_text()
    (folder / "2.jsonl").write_text(text[: len(text) - 20])
    (folder / "4.jsonl").write_text("")
    result = what_if(JsonlSource(folder), [Strategy("dapo", presets.block("dapo"))])
    assert result.steps == 2 and result.rollouts == 48
    assert result.notes == [
        "2.jsonl is left out: line 24 is cut off or no JSON",
        "between step 1 and step 3 there is nothing: what plugins remember has a gap",
        "4.jsonl is left out: it is empty",
    ]
    for path in folder.iterdir():
        path.write_text("{}\n")
    with pytest.raises(files.LogError, match="1.jsonl is left out: line 1 lacks uid, input, output, score"):
        JsonlSource(folder)
    shutil.rmtree(folder)
    with pytest.raises(files.LogError, match="no dump of verl's here"):
        JsonlSource(folder)
