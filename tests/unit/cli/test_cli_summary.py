from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflex_verl.commands.demo_run import MetricsReader, Record, RunResult, last_lines
from dataflex_verl.commands.demo_summary import summarize, train_reward


def step(number: int, **data: float) -> Record:
    return {"step": number, "data": {name.replace("__", "/"): value for name, value in data.items()}}


def validation(number: int, add: float, sort: float, **data: float) -> Record:
    record = step(number, **data)
    record["data"].update({"val-core/add/acc/mean@2": add, "val-core/sort/acc/mean@2": sort})
    record["data"].update({"val-core/add/acc/best@2/mean": 0.9, "val-aux/add/reward/mean@2": 0.8})
    return record


@pytest.fixture
def result() -> RunResult:
    """30 steps whose reward is a hundredth of the step's number, kept fractions alternating."""
    records = [validation(0, add=0.2, sort=0.4)]
    for number in range(1, 31):
        figures = {
            "critic__score__mean": 0.5,
            "dataflex__reward_all": number / 100,
            "dataflex__kept_frac": 0.4 if number % 2 else 0.6,
            "dataflex__weight_mean": 0.5,
            "dataflex__weight_std": 0.25,
            "timing_s__step": 9.0 if number == 1 else 2.0,
        }
        records.append(step(number, **figures))
    records[-1] = validation(30, add=0.5, sort=0.3, **{k.replace("/", "__"): v for k, v in records[-1]["data"].items()})
    return RunResult(records, [20.0, *(30.0 + 2 * i for i in range(30))], total_seconds=95.0)


def test_summary_averages_the_first_and_last_ten_steps(result: RunResult) -> None:
    summary = summarize(result)
    assert (summary.steps, summary.window) == (30, 10)
    assert summary.train_reward is not None
    assert summary.train_reward.before == pytest.approx(0.055)
    assert summary.train_reward.after == pytest.approx(0.255)
    assert summary.train_reward.rise == pytest.approx(0.2)


def test_summary_takes_validation_means_by_domain(result: RunResult) -> None:
    summary = summarize(result)
    assert list(summary.domains) == ["add", "sort"]
    assert (summary.domains["add"].before, summary.domains["add"].after) == (0.2, 0.5)
    assert summary.validation is not None
    assert summary.validation.before == pytest.approx(0.3)
    assert summary.validation.after == pytest.approx(0.4)


def test_summary_of_decisions_and_times(result: RunResult) -> None:
    summary = summarize(result)
    assert summary.kept_frac == pytest.approx(0.5)
    assert (summary.weight_mean, summary.weight_std) == (0.5, 0.25)
    assert summary.step_seconds == 2.0
    assert summary.start_seconds == pytest.approx(21.0)
    assert summary.total_seconds == 95.0


def test_summary_of_a_plain_verl_run_uses_its_reward_and_says_nothing_of_decisions() -> None:
    records = [step(number, critic__score__mean=0.1 * number) for number in (1, 2)]
    summary = summarize(RunResult(records, [1.0, 2.0], 3.0))
    assert summary.window == 1
    assert summary.train_reward is not None
    assert summary.train_reward.rise == pytest.approx(0.1)
    assert summary.kept_frac is None and summary.validation is None


def test_summary_of_a_run_that_logged_nothing() -> None:
    summary = summarize(RunResult([], [], 1.0))
    assert summary.steps == 0
    assert summary.train_reward is None and summary.start_seconds is None


def test_train_reward_is_none_where_nothing_was_logged() -> None:
    assert train_reward(step(1)) is None


def test_reader_leaves_a_line_that_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.new_records() == []
    first, second = json.dumps(step(1)), json.dumps(step(2))
    path.write_text(f"{first}\n{second[:5]}")
    assert [record["step"] for record in reader.new_records()] == [1]
    with path.open("a") as file:
        file.write(f"{second[5:]}\n")
    assert [record["step"] for record in reader.new_records()] == [2]
    assert reader.new_records() == []


def test_last_lines_skips_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(["one", "", "two", "three" * 100, ""]))
    assert last_lines(path, count=2, width=5) == ["two", "three"]
