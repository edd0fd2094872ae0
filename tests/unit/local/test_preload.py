from __future__ import annotations

import os

import pytest

from dataflex_verl.local.preload import Job


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
