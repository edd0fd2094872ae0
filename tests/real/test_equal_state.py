"""Whole runs that take up a checkpoint: ours with the plugins' state, verl's own without, ours after verl's own.

verl gives placement groups fixed names, so these run before the trainer that stays alive (``test_reach.py``) starts.
"""

from __future__ import annotations

import json
import logging

import pytest

from tests.real.conftest import base_overrides
from tests.real.harness import compose_config
from tests.real.runs import train

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("equal_state")]  # one uninterrupted run serves both tests


@pytest.fixture(scope="module")
def run(ray_session, demo, tmp_path_factory):
    """Train up to step ``last`` and return the trainer and the records of the stateful plugin, a dict a step."""
    directory = tmp_path_factory.mktemp("state")

    def build(name, last, start=None, mode="dataflex_sync", plugin=True, *more):
        record = directory / f"{name}.jsonl"
        overrides = [
            *(text for text in base_overrides(demo) if not text.startswith("trainer.resume_mode")),
            f"trainer.v1.trainer_mode={mode}",
            f"trainer.total_training_steps={last}",
            "trainer.save_freq=2",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            f"trainer.default_local_dir={directory / 'checkpoints'}",
            *(["trainer.resume_mode=disable"] if start is None else ["trainer.resume_mode=resume_path"]),
            *(
                []
                if start is None
                else [f"trainer.resume_from_path={directory / 'checkpoints' / f'global_step_{start}'}"]
            ),
            *more,
        ]
        if plugin:
            overrides += [
                "+dataflex.plugins.memory.plugin=tests.real.plugins:Remember",
                f"+dataflex.plugins.memory.record={record}",
            ]
        trained = train(compose_config(overrides))
        lines = record.read_text().splitlines() if record.exists() else []
        return trained, {line["step"]: line for line in map(json.loads, lines)}

    build.directory = directory / "checkpoints"
    return build


@pytest.fixture(scope="module")
def uninterrupted(run):
    return run("uninterrupted", 4)


def test_a_resumed_run_decides_as_one_that_went_on(run, uninterrupted):
    _, expected = uninterrupted
    _, resumed = run("resumed", 4, start=2)
    assert sorted(expected) == [1, 2, 3, 4] and sorted(resumed) == [3, 4]
    for step in (3, 4):
        for part in expected[step]:
            assert resumed[step][part] == expected[step][part], (step, part)
    # What was remembered matters: a plugin that starts afresh scripts the rewards of step 1 again.
    assert resumed[3]["rewards"] != expected[1]["rewards"]
    assert {"critic/score/mean", "actor/grad_norm"} <= resumed[3]["last_metrics"].keys()


def test_verls_own_trainer_resumes_our_checkpoint_and_ours_adopts_verls(run, uninterrupted, caplog):
    _, expected = uninterrupted
    assert (run.directory / "global_step_4" / "dataflex" / "state.json").is_file()
    plain, _ = run("plain", 5, start=4, mode="sync", plugin=False)
    assert plain.trainer.global_steps == 6 and len(plain.metrics) == 1
    checkpoint = run.directory / "global_step_5"
    assert (checkpoint / "data.pt").is_file() and not (checkpoint / "dataflex").exists()

    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        adopting, records = run("adopting", 6, start=5)
    assert "global_step_5 has no dataflex folder: all plugins start afresh" in caplog.text
    assert adopting.trainer.global_steps == 7 and sorted(records) == [6]
    assert records[6]["rewards"] == expected[1]["rewards"] and records[6]["last_metrics"] == {}
