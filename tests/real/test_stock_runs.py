"""Stock ``python -m verl.trainer.main_ppo``, nothing else: the same run with ``dataflex.apply`` false and true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dataflex_verl import presets
from dataflex_verl.local.settings import local_environment, local_overrides
from tests.real.conftest import base_overrides

pytestmark = pytest.mark.real

STRATEGIES = ("difffilter", "topk", "softmax", "per", "ar")


@dataclass(frozen=True)
class StockRun:
    """What a finished run left: its plan, its first batch and its first gradient."""

    plan: list[str]
    batch: list[tuple[str, str, float]]
    metrics: dict[str, float]


def stock_run(directory: Path, overrides: list[str]) -> StockRun:
    """One training step of verl's own entry point in a process of its own."""
    directory.mkdir(parents=True)
    overrides = [
        *overrides,
        "trainer.logger=[console,file]",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        f"trainer.rollout_data_dir={directory / 'rollouts'}",
        f"trainer.default_local_dir={directory / 'checkpoints'}",
    ]
    log = directory / "log.txt"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *local_overrides(overrides), *overrides],
            env={**os.environ, **local_environment(), "VERL_FILE_LOGGER_PATH": str(directory / "metrics.jsonl")},
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-3000:]
    plan = [line[line.index("DataFlex plan: ") :] for line in text.splitlines() if "DataFlex plan: " in line]
    rows = [json.loads(line) for line in (directory / "rollouts" / "1.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    metrics = next(record["data"] for record in records if "actor/grad_norm" in record["data"])
    return StockRun(plan, sorted((row["input"], row["output"], row["score"]) for row in rows), metrics)


def check_strategy(name: str, live, stored, demo, directory: Path) -> None:
    overrides = [*base_overrides(demo), "trainer.v1.trainer_mode=dataflex_sync", *presets.overrides([name])]
    shadow = stock_run(directory / "shadow", [*overrides, "+dataflex.apply=false"])
    applied = stock_run(directory / "applied", [*overrides, "+dataflex.apply=true"])

    assert "shadow mode" in shadow.plan[0] and "applied to weights" in applied.plan[0]
    assert shadow.plan[1:] == applied.plan[1:] and len(applied.plan) > 3
    assert f"DataFlex plan: {name} = " in applied.plan[1]
    assert shadow.batch == applied.batch and len(applied.batch) == 64
    assert applied.metrics["actor/grad_norm"] != pytest.approx(shadow.metrics["actor/grad_norm"], rel=1e-3)

    block = presets.block(name)
    assert live.update(stored, block).grad_norm == pytest.approx(applied.metrics["actor/grad_norm"], rel=1e-5)
    assert live.update(stored).grad_norm == pytest.approx(shadow.metrics["actor/grad_norm"], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_changes_the_first_gradient_and_nothing_before(name, live, stored, demo, tmp_path):
    check_strategy(name, live, stored, demo, tmp_path)
