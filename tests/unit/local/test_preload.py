from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dataflex_verl.local.preload import EARLY_PRELOAD, Job


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.delenv("RAY_JOB_ID", raising=False)
    monkeypatch.setenv("RAY_RAYLET_PID", "")
    return Job(())


def test_first_worker_gives_the_server_its_ray_variables(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert job.admits({"RAY_JOB_ID": "01", "RAY_RAYLET_PID": "7", "OTHER": "x"})
    assert (os.environ["RAY_JOB_ID"], os.environ["RAY_RAYLET_PID"]) == ("01", "7")
    assert "OTHER" not in os.environ


def test_worker_of_another_job_is_not_forked(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert job.admits({"RAY_JOB_ID": "01"})
    assert job.admits({"RAY_JOB_ID": "01", "RANK": "1"})
    assert not job.admits({"RAY_JOB_ID": "02"})


def test_early_preload_leaves_ray_unloaded() -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {EARLY_PRELOAD}: importlib.import_module(name)\n"
        "print(sorted({'ray', 'verl'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
