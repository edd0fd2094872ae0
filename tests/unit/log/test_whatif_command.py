"""``dataflex whatif`` as a command."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from dataflex_verl import presets
from tests.unit.docs.snippets import ROOT, blocks
from tests.unit.log.simulated import simulate
from tests.unit.log.test_whatif import dump

BLOCK = {"plugins": {**presets.block("difffilter")["plugins"], **presets.block("per")["plugins"]}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    """A directory with what the documents name: a run's folder, dumps, a strategy in a file."""
    simulate(BLOCK, tmp_path / "checkpoints" / "project" / "run")
    dump(tmp_path / "rollouts")
    (tmp_path / "mine.yaml").write_text(blocks("docs/whatif.md", "yaml")[0].text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_runs(dataflex, here: Path) -> None:
    commands = [
        shlex.split(line)
        for block in blocks("docs/whatif.md", "bash")
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.startswith("dataflex whatif")
    ]
    assert len(commands) >= 6
    for words in commands:
        result = dataflex(*words[1:])
        assert result.exit_code == 0, (words, result.output)
        assert " rollouts in " in result.output or '"strategies"' in result.output
    assert "<polyline" in (here / "whatif.html").read_text(encoding="utf-8")


def test_the_runs_own_strategy_is_the_default_and_equals_what_it_did(dataflex, here: Path) -> None:
    result = dataflex("whatif", "checkpoints/project/run")
    assert result.exit_code == 0
    assert "run and logged: the same decisions and weights, bit for bit, for all 96 rollouts." in result.output
    changed = dataflex("whatif", "checkpoints/project/run", "++dataflex.plugins.difffilter.actuator.params.low=0.6")
    assert "bit for bit" not in changed.output and "agree on" in changed.output


def test_presets_files_and_overrides_stack(dataflex, here: Path) -> None:
    (here / "lines.txt").write_text("+dataflex=difffilter\n+dataflex.mask_scale=kept\n")
    given = {
        "preset": ["--strategy", "difffilter", "+dataflex.mask_scale=kept"],
        "lines": ["--strategy", "lines.txt"],
        "block": ["--strategy", "block.yaml"],
    }
    (here / "block.yaml").write_text(
        "dataflex:\n  mask_scale: kept\n  plugins:\n    difffilter:\n      plugin: select\n"
        "      scorer: group_solve_rate\n      actuator: {name: threshold_band, params: {low: 0.2, high: 0.8}}\n"
    )
    found = []
    for arguments in given.values():
        data = json.loads(dataflex("whatif", "checkpoints/project/run", *arguments, "--json").output)
        found.append({key: value for key, value in data["strategies"][0].items() if key != "name"})
    assert found[0] == found[1] == found[2] and found[0]["weight_largest"] > 1
    stacked = json.loads(dataflex("whatif", "checkpoints/project/run", "--strategy", "difffilter+per", "--json").output)
    assert stacked["difference"]["identical"] == 96


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--strategy", "difffiltr"], "--strategy: got 'difffiltr'; accepted: .*did you mean 'difffilter'"),
        (["--strategy", "per,per"], "--strategy: got 'per'; accepted: each label once: per is there already"),
        (["--strategy", "per", "--against", "logged,per"], "--against: got 'logged.per'; accepted: logged alone"),
        (["--strategy", "absent.yaml"], "--strategy: got 'absent.yaml'; accepted: a YAML file"),
        (["--strategy", "per", "data.seed=3"], "--strategy: got 'data.seed=3'; accepted: overrides of dataflex"),
        (["--strategy", "per", "--loss", "tokens"], "--loss: got 'tokens'; accepted: token or sequence; did you mean"),
        (["--strategy", "per", "--state", "nowhere"], "--state: got 'nowhere'; accepted: a checkpoint folder"),
        (["--strategy", "ar"], "'ar' reads old_log_probs, which this log does not have"),
        (["--strategy", "per", "+dataflex.plugins.per.actuator.params.alfa=1"], "alfa.*did you mean 'alpha'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_is_one_clear_message(dataflex, here: Path, arguments: list[str], text: str) -> None:
    result = dataflex("whatif", "checkpoints/project/run", *arguments)
    assert result.exit_code == 2
    assert re.search(text, result.output, re.DOTALL), result.output
    assert "Traceback" not in result.output


def test_no_log_there_is_said(dataflex, here: Path) -> None:
    result = dataflex("whatif", "elsewhere", "--strategy", "per")
    assert result.exit_code == 2 and "elsewhere: no decision log here" in result.output
    result = dataflex("whatif", "rollouts", "--strategy", "dapo", "--against", "logged")
    assert result.exit_code == 2 and "verl's dumps do not say what the run decided" in result.output


def test_without_pyarrow_a_decision_log_is_refused_and_dumps_are_read(dataflex, here: Path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = dataflex("whatif", "checkpoints/project/run", "--strategy", "per")
    assert result.exit_code == 2 and "pip install 'dataflex-verl[analysis]'" in result.output
    assert dataflex("whatif", "rollouts", "--strategy", "dapo").exit_code == 0


def test_the_page_is_whole_and_asks_for_nothing_from_elsewhere(dataflex, here: Path) -> None:
    dataflex("whatif", "checkpoints/project/run", "--strategy", "topk", "--page", "page.html")
    text = (here / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.count("<svg") >= 4
    assert "http" not in text and "<script" not in text and 'name="viewport"' in text
    assert "topk" in text and "logged" in text


def test_the_pages_are_there() -> None:
    for name in ("decision_log.md", "whatif.md"):
        assert (ROOT / "docs" / name).is_file()
