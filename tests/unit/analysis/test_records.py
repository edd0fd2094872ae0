from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflex_verl.analysis.records import UnreadableRun, read_run
from tests.unit.analysis.conftest import Write, metrics_of


def test_a_run_is_read_as_it_was_logged(write_run: Write) -> None:
    run = read_run(write_run("a", metrics_of(steps=3), plan=["1 plugin(s)"]))
    assert (run.name, run.steps, run.last_step, run.notes) == ("a", (1, 2, 3), 3, ())
    assert run.values("critic/score/mean").tolist() == pytest.approx([0.51, 0.52, 0.53])
    assert run.at("val-core/add/acc/mean@2", 0) == 0.2
    assert run.at("val-core/add/acc/mean@2", 3) == 0.5
    assert run.at("val-core/add/acc/mean@2", 2) is None and run.at("nothing", 1) is None
    assert run.plan == ("1 plugin(s)",)


def test_a_line_that_is_cut_off_is_left_out_and_noted(write_run: Write) -> None:
    run = read_run(write_run("a", metrics_of(steps=3), cut=10))
    assert run.steps == (1, 2)
    assert run.notes == ("the last line is cut off and left out",)


def test_a_whole_last_line_without_its_newline_counts(write_run: Write) -> None:
    run = read_run(write_run("a", metrics_of(steps=3), cut=1))
    assert run.steps == (1, 2, 3) and run.notes == ()


def test_lines_that_are_no_records_are_left_out_and_noted(write_run: Write) -> None:
    folder = write_run("a", metrics_of(steps=2))
    path = folder / "metrics.jsonl"
    path.write_text('{"loss": 1}\nhello\n' + path.read_text() + '{"step": 1.5, "data": {}}\n[]\n3\n')
    run = read_run(folder)
    assert run.steps == (1, 2)
    assert run.notes == ("not a record of verl's file logger, left out: line 1, 2, 6 and 2 more",)


@pytest.mark.parametrize(
    "line",
    ['{"step": 9, "data": null}', '{"step": 9, "data": [1]}', '{"step": Infinity, "data": {}}', '{"step": 9, "data": 1']
    + ['{"step": 9, "data": {"x": 1' + "0" * 400 + "}}"],
)
def test_a_record_of_another_shape_is_left_out_and_noted(write_run: Write, line: str) -> None:
    folder = write_run("a", metrics_of(steps=2))
    path = folder / "metrics.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    run = read_run(folder)
    assert run.steps == (1, 2) and run.notes == ("not a record of verl's file logger, left out: line 1",)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    name = "val-core/a\u2028b/acc/mean@2"
    (tmp_path / "run.jsonl").write_text(json.dumps({"step": 1, "data": {name: 0.5}}, ensure_ascii=False) + "\n")
    run = read_run(tmp_path / "run.jsonl")
    assert run.at(name, 1) == 0.5 and run.notes == ()


def test_values_that_are_no_finite_numbers_are_gaps(tmp_path: Path) -> None:
    lines = [
        {"step": step, "data": {"x": value, "y": 1.0}}
        for step, value in enumerate([0.5, None, float("nan"), float("inf"), "a", True, [1]], start=1)
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read_run(tmp_path / "run.jsonl")
    assert run.name == "run"
    assert run.values("x").tolist() == [0.5] and len(run.values("y")) == 7


def test_a_step_logged_twice_counts_once_and_is_noted(write_run: Write) -> None:
    folder = write_run("a", metrics_of(steps=3) + metrics_of(steps=3, reward=0.7)[2:])
    run = read_run(folder)
    assert run.steps == (1, 2, 3)
    assert run.values("critic/score/mean").tolist() == pytest.approx([0.51, 0.72, 0.73])
    assert run.notes == ("logged more than once, the last counts: step 2, 3",)


def test_validation_logged_in_a_line_of_its_own_is_no_repetition(write_run: Write) -> None:
    records = metrics_of(steps=2)
    final = {"val-core/add/acc/mean@2": records[-1]["data"].pop("val-core/add/acc/mean@2")}
    run = read_run(write_run("a", [*records, {"step": 2, "data": final}]))
    assert run.notes == () and run.at("val-core/add/acc/mean@2", 2) == 0.5


def test_steps_that_are_missing_are_noted(write_run: Write) -> None:
    records = metrics_of(steps=5)
    run = read_run(write_run("a", [*records[:2], *records[4:]]))
    assert run.notes == ("not logged: step 2, 3",)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "no metrics.jsonl in it"),
        ({"metrics.jsonl": ""}, "the file is empty"),
        ({"metrics.jsonl": '{"a": 1}\n'}, "no line that verl's file logger writes"),
        ({"a.jsonl": "", "b.jsonl": ""}, "several files, name one: a.jsonl, b.jsonl"),
    ],
)
def test_what_is_no_run_is_said(tmp_path: Path, files: dict[str, str], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UnreadableRun, match=text):
        read_run(tmp_path)
    with pytest.raises(UnreadableRun, match="there is nothing here"):
        read_run(tmp_path / "absent")
