"""What collected runs recorded of themselves: how it is read, and what it makes of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflex_verl.commands.compare_records import (
    RunRecord,
    check_unplanned,
    conditions_of,
    read_record,
    rollouts_recorded,
)
from dataflex_verl.commands.compare_settings import other_overrides, values_of
from dataflex_verl.commands.demo_plan import BadOption


def record(*overrides: str) -> RunRecord:
    return RunRecord(overrides, values_of(overrides), {"verl": "1"}, {"data.val_files:a": "h"})


@pytest.mark.parametrize(
    ("setting", "one", "other", "third"),
    [
        ("algorithm.filter_groups.enable", "True", "true", "false"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "1", "1.0", "1.5"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p", "1e-3", "0.001", "0.01"),
        ("data.val_files", "[a.parquet,b.parquet]", "['a.parquet', b.parquet]", "[a.parquet]"),
        ("data.val_files", "'${base}/a.parquet'", "${base}/a.parquet", "${base}/b.parquet"),
        ("reward.custom_reward_function.path", "null", "Null", "none.py"),
    ],
)
def test_one_value_written_in_two_ways_is_no_difference(setting: str, one: str, other: str, third: str) -> None:
    first, same, differs = (record(f"{setting}={text}") for text in (one, other, third))
    records = {("a", 0): first, ("b", 0): same}
    check_unplanned(records)
    assert conditions_of(records, ["a", "b"], {}).said("a") == []
    assert other_overrides(first.overrides, same.overrides) == ()
    with pytest.raises(BadOption, match=f"{setting} is "):
        check_unplanned({("a", 0): first, ("b", 0): differs})
    assert [found.setting for found in other_overrides(first.overrides, differs.overrides)] == [setting]


def test_what_one_seed_alone_has_otherwise_is_listed_too() -> None:
    rates = {("a", 0): "1e-6", ("b", 0): "1e-6", ("a", 1): "1e-6", ("b", 1): "2e-6"}
    records = {run: record(f"actor_rollout_ref.actor.optim.lr={rate}") for run, rate in rates.items()}
    (difference,) = conditions_of(records, ["a", "b"], {}).differs["b"]
    assert (difference.value, difference.baseline) == ("2e-6", "1e-6")
    # What both arms of a seed have is of the seed.
    rates[("a", 1)] = "2e-6"
    records = {run: record(f"actor_rollout_ref.actor.optim.lr={rate}") for run, rate in rates.items()}
    assert conditions_of(records, ["a", "b"], {}).differs == {"b": ()}


def test_a_record_of_another_form_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"overrides": 5, "versions": ["1"], "inputs": "abc"}))
    odd = read_record(tmp_path)
    assert (odd.overrides, odd.versions, odd.inputs) == (None, None, None)
    (text,) = conditions_of({("a", 0): odd, ("b", 0): record()}, ["a", "b"], {}).unchecked
    assert text.startswith("not recorded by a (seed 0), and so not checked to be equal: batch size")
    settings = ("data.train_batch_size=²", "actor_rollout_ref.rollout.n=2")
    assert rollouts_recorded({("a", 0): record(*settings)}, 3) is None
    settings = ("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2")
    assert rollouts_recorded({("a", 0): record(*settings)}, 3) == 24
