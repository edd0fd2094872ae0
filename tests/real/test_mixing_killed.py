"""Runs with domains whose every process is killed, and the runs that take up their checkpoints in another Ray."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from tests.real.pausing import fetched
from tests.real.prompts import CHEAP, mixing, overrides
from tests.real.test_cli_resume import kill_tree, started

pytestmark = pytest.mark.real

TRACKER = "latest_checkpointed_iteration.txt"
A_STEP = 4


def arguments(demo: Any, folder: Path, steps: int, save_freq: int, *more: str) -> list[str]:
    given = overrides(
        demo,
        # Its window and its averages are both state, and its shares move in every step.
        *mixing("{name:dads,params:{decay:ewma,temperature:0.3,floor:0.05,window:3}}", "reward_difficulty"),
        "+dataflex.plugins.script.plugin=tests.real.pausing:Witness",
        *CHEAP,
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={save_freq}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        *more,
    )
    return [*(text for text in given if not text.startswith("trainer.resume_mode")), "trainer.resume_mode=auto"]


def run_to_the_end(folder: Path, given: list[str], name: str) -> Path:
    record = folder / f"{name}.jsonl"
    with started(folder, [*given, f"+dataflex.plugins.script.record={record}"]) as (process, mark):
        assert process.wait(timeout=400) == 0, (folder / f"{mark}.log").read_text()[-3000:]
    return record


def run_and_kill(folder: Path, given: list[str], name: str, wait: str, at: int) -> Path:
    """Start a run, and kill all its processes at once where it waits."""
    record = folder / f"{name}.jsonl"
    own = {"record": record, "wait": wait, "at": at}
    given = [*given, *(f"+dataflex.plugins.script.{key}={value}" for key, value in own.items())]
    end = time.monotonic() + 400
    with started(folder, given) as (process, mark):
        while not Path(f"{record}.waits").exists():
            log = (folder / f"{mark}.log").read_text()
            assert process.poll() is None and time.monotonic() < end, log[-3000:]
            time.sleep(0.2)
        assert kill_tree(mark) > 3
        assert process.poll() is not None
    return record


def saved(checkpoint: Path) -> tuple[Any, str]:
    """Windows and the mixer's state, and the digest of their tensors, as they stand in the files."""
    record = json.loads((checkpoint / "dataflex" / "state.json").read_text())
    assert record["plugins"]["mix"]["state"] and record["tensors"]
    return record["plugins"], record["tensors"]["sha256"]


def prompts_of(steps: range) -> list[int]:
    return [place for step in steps for place in range(A_STEP * (step - 1), A_STEP * step)]


@pytest.mark.nightly
def test_a_run_killed_before_verls_tracker_resumes_with_the_same_prompts(demo, tmp_path):
    """Killed when our files of step 6 are there and verl's tracker still names step 3: steps 4, 5 and 6 come again."""
    given = arguments(demo, tmp_path, 6, 3)
    first = fetched(run_and_kill(tmp_path, given, "first", "before_tracker", at=6))
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / TRACKER).read_text() == "3"
    uninterrupted = saved(checkpoints / "global_step_6")
    assert sorted(first) == prompts_of(range(1, 7))

    again = fetched(run_to_the_end(tmp_path, given, "again"))
    assert (checkpoints / TRACKER).read_text() == "6"
    assert again == {place: first[place] for place in prompts_of(range(4, 7))}
    assert saved(checkpoints / "global_step_6") == uninterrupted != saved(checkpoints / "global_step_3")
    # Shares moved, so that going on with those of the start would show.
    assert len({shares for _, _, shares in first.values()}) >= 5


@pytest.fixture(scope="module")
def small(demo, tmp_path_factory):
    """Three prompts a domain: several epochs in a few steps."""
    table = pyarrow.parquet.read_table(demo.train_parquet)
    domain = np.array(table.column("domain").to_pylist())
    rows = np.sort(np.concatenate([np.flatnonzero(domain == name)[:3] for name in np.unique(domain)]))
    path = tmp_path_factory.mktemp("small") / "train.parquet"
    pyarrow.parquet.write_table(table.take(rows), path)
    return f"data.train_files={path}"


STEPS = 13


@pytest.fixture(scope="module")
def uninterrupted(demo, small, tmp_path_factory):
    """What a run that nobody kills fetches, and where its checkpoints are."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    record = run_to_the_end(folder, arguments(demo, folder, STEPS, 1, small), "whole")
    return fetched(record), folder / "checkpoints"


def epoch_ends(whole: dict[int, tuple[int, int, tuple[float, ...]]]) -> list[int]:
    """Steps at whose end a domain has had each of its three prompts equally often."""
    domains = [whole[place][1] for place in sorted(whole)]
    ends = []
    for step in range(1, STEPS + 1):
        counts = np.bincount(domains[: A_STEP * step], minlength=3)
        if ((counts > 0) & (counts % 3 == 0)).any():
            ends.append(step)
    return ends


@pytest.mark.nightly
@pytest.mark.parametrize("point", ["between_checkpoint_and_next_step", "at_an_epochs_end", "before_verls_tracker"])
def test_ten_steps_after_a_kill_are_those_of_a_run_that_was_not_killed(demo, small, uninterrupted, tmp_path, point):
    whole, expected = uninterrupted
    end = next(step for step in epoch_ends(whole) if step > 1)
    assert end <= STEPS - 10
    step = {"between_checkpoint_and_next_step": 5 - end, "at_an_epochs_end": end, "before_verls_tracker": 4}[point]
    wait = "before_tracker" if point == "before_verls_tracker" else "after_checkpoint"
    resumed = step - 1 if wait == "before_tracker" else step
    given = arguments(demo, tmp_path, STEPS, 1, small)
    first = fetched(run_and_kill(tmp_path, given, "first", wait, step))
    assert first == {place: whole[place] for place in prompts_of(range(1, step + 1))}
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / TRACKER).read_text() == str(resumed)

    again = fetched(run_to_the_end(tmp_path, given, "again"))
    assert again == {place: whole[place] for place in prompts_of(range(resumed + 1, STEPS + 1))}
    assert STEPS - resumed >= 10
    for later in (resumed + 1, STEPS):
        assert saved(checkpoints / f"global_step_{later}") == saved(expected / f"global_step_{later}")
        here, there = (
            torch.load(where / f"global_step_{later}" / "data.pt", weights_only=False)
            for where in (checkpoints, expected)
        )
        assert repr(here) == repr(there)
    # Domains began their rows anew on the way.
    assert max(np.bincount([row for row, _, _ in whole.values()])) >= 3
