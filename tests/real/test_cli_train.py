"""``dataflex train --local`` and ``dataflex demo`` as their users start them: processes of their own."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dataflex_verl.demo.build import DemoFiles
from tests.real.conftest import CACHE

pytestmark = pytest.mark.real

SHORT_FORM = """
trainer.v1.trainer_mode=dataflex_sync +dataflex.mechanism=select
+dataflex.scorer.name=group_solve_rate +dataflex.scorer.params.success_threshold=0.5
+dataflex.actuator.name=threshold_band +dataflex.actuator.params.low=0.2 +dataflex.actuator.params.high=0.8
+dataflex.warmup_step=0 algorithm.adv_estimator=grpo
""".split()


def dataflex(*arguments: str, directory: Path, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dataflex_verl.cli", *arguments],
        cwd=directory,
        env={**os.environ, "VERL_FILE_LOGGER_PATH": str(directory / "metrics.jsonl")},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kept_share(rollouts: Path) -> float:
    """Share of responses whose prompt has a pass rate inside the band, from the rows that verl itself wrote down."""
    scores = defaultdict(list)
    for row in records(rollouts):
        scores[row["uid"].rsplit("_", 2)[0]].append(row["score"])
    return fmean(0.2 < fmean(s > 0.5 for s in group) < 0.8 for group in scores.values())


@pytest.mark.nightly
def test_train_local_runs_the_published_short_form(demo: DemoFiles, tmp_path: Path) -> None:
    # Paths relative to where the command is called, as its help shows.
    shutil.copytree(demo.model_dir.parent, tmp_path / "demo")
    own = [
        f"data.train_files=demo/{demo.train_parquet.name}",
        f"data.val_files=demo/{demo.val_parquet.name}",
        f"actor_rollout_ref.model.path=./demo/{demo.model_dir.name}",
        f"reward.custom_reward_function.path=demo/{demo.reward_path.name}",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
    ]
    done = dataflex("train", "--local", *own, *SHORT_FORM, directory=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    trained = [record for record in records(tmp_path / "metrics.jsonl") if record["step"] > 0]
    assert [record["step"] for record in trained] == [1, 2]
    for record in trained:
        metrics = record["data"]
        assert metrics["dataflex/kept_frac"] == pytest.approx(kept_share(tmp_path / f"rollouts/{record['step']}.jsonl"))
        # Under token-mean every token counts the same, so a mask alone has the moments of a coin.
        mean = metrics["dataflex/kept_tokens_frac"]
        assert 0.0 < mean < 1.0
        assert metrics["dataflex/weight_mean"] == pytest.approx(mean, abs=1e-6)
        assert metrics["dataflex/weight_std"] == pytest.approx(math.sqrt(mean * (1.0 - mean)), abs=1e-6)
        assert metrics["dataflex/weight_kept_mean"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["actor/grad_norm"] > 0.0


@pytest.mark.nightly
def test_the_default_demo_learns_from_an_empty_cache(tmp_path: Path, record_property: Any) -> None:
    started = time.perf_counter()
    done = dataflex("demo", "--json", "--cache", str(tmp_path / "cache"), directory=tmp_path)
    seconds = time.perf_counter() - started
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(done.stdout)
    training, validation = (summary[name]["after"] - summary[name]["before"] for name in ("train_reward", "validation"))
    for name, value in (("seconds", seconds), ("training_rise", training), ("validation_rise", validation)):
        record_property(name, round(value, 3))
    record_property("load", [round(value, 1) for value in os.getloadavg()])
    assert (summary["steps"], summary["window"]) == (40, 10)
    assert training > 0.1 and validation > 0.05


def test_demo_trains_two_steps_and_sums_up(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = dataflex("demo", "--steps", "2", "--out", str(out), "--cache", str(CACHE), "--json", directory=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["strategies"] == ["difffilter"]
    assert (summary["steps"], summary["window"]) == (2, 1)
    assert list(summary["domains"]) == ["add", "middle", "sort"]
    logged = records(out / "metrics.jsonl")
    assert [record["step"] for record in logged] == [0, 1, 2]
    kept = [record["data"]["dataflex/kept_frac"] for record in logged[1:]]
    assert summary["kept_frac"] == pytest.approx(fmean(kept))
    rewards = [record["data"]["critic/score/mean"] for record in logged[1:]]
    assert summary["train_reward"] == {"before": pytest.approx(rewards[0]), "after": pytest.approx(rewards[1])}
