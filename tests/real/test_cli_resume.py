"""A run whose every process is killed, and the run that takes up its checkpoint in another Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.real.conftest import base_overrides

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
MARK = "DATAFLEX_TEST_RUN"
PLUGIN = "+dataflex.plugins.memory.plugin=tests.real.plugins:Remember"


@contextmanager
def started(directory: Path, overrides: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``dataflex train --local`` with a Ray of its own; on leaving it is killed with all it started."""
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        MARK: mark,
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="dfray-", dir="/tmp"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with (directory / f"{mark}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dataflex_verl.cli", "train", "--local", *overrides],
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process, mark
        finally:
            kill_tree(mark)
            process.wait()


def kill_tree(mark: str) -> int:
    """Kill -9 every process that carries ``mark`` in its environment; returns how many there were."""
    killed = 0
    while found := [process for process in psutil.process_iter() if carries(process, mark)]:
        for process in found:
            process.kill()
        psutil.wait_procs(found, timeout=10)
        killed += len(found)
    return killed


def carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:
        return False


def records(path: Path) -> dict[int, dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["step"]: record for record in map(json.loads, lines)}


def wait_for(step: int, path: Path, process: subprocess.Popen[bytes], log: Path, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while step not in records(path):
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.2)


@pytest.mark.nightly
def test_a_killed_run_resumes_with_the_decisions_of_one_that_was_not(demo, tmp_path):
    overrides = [
        *(text for text in base_overrides(demo) if not text.startswith("trainer.resume_mode")),
        "trainer.v1.trainer_mode=dataflex_sync",
        "trainer.resume_mode=auto",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        PLUGIN,
    ]
    # It goes on past its checkpoint, uninterrupted, and is killed in step 4.
    first = tmp_path / "first.jsonl"
    own = [f"+dataflex.plugins.memory.record={first}", "+dataflex.plugins.memory.wait_at=4"]
    with started(tmp_path, [*overrides, *own]) as (process, mark):
        wait_for(4, first, process, tmp_path / f"{mark}.log")
        assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
        assert kill_tree(mark) > 3
        assert process.poll() is not None
    again = tmp_path / "again.jsonl"
    with started(tmp_path, [*overrides, f"+dataflex.plugins.memory.record={again}"]) as (process, mark):
        status = process.wait(timeout=300)
        assert status == 0, (tmp_path / f"{mark}.log").read_text()[-3000:]

    uninterrupted, resumed = records(first), records(again)
    assert sorted(uninterrupted) == [1, 2, 3, 4] and sorted(resumed) == [3, 4]
    for step in (3, 4):
        for part in uninterrupted[step]:
            assert resumed[step][part] == uninterrupted[step][part], (step, part)
    # What was remembered matters: a plugin that starts afresh decides otherwise.
    assert resumed[3]["rewards"] != uninterrupted[1]["rewards"]
    assert "critic/score/mean" in resumed[3]["last_metrics"] and "actor/grad_norm" in resumed[3]["last_metrics"]
