"""Running a comparison: one run after another, each in its folder, and what is finished is not run again."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from dataflex_verl.analysis.records import METRICS_FILE
from dataflex_verl.commands.compare_checks import differences
from dataflex_verl.commands.compare_jobs import Job
from dataflex_verl.commands.demo_plan import BadOption
from dataflex_verl.commands.demo_run import Record, RunFailed, train_in_child

STARTED, FINISHED, RUN_FAILED = "run.json", "finished.json", "failed.json"
LOCK = ".running"
State = Literal["finished", "changed", "failed", "partial", "new"]
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Refused)\b: ")
_LONGEST_REASON = 300


def state_of(job: Job) -> State:
    """What is in a run's folder.

    ``finished``: this very run, to its end, its metrics as they were then. ``changed``: a run of other settings,
    versions or inputs, finished. ``failed``, ``partial``: not finished, whatever its settings. ``new``: nothing.
    """
    if not job.folder.exists() or not any(path.name != LOCK for path in job.folder.iterdir()):
        return "new"
    finished = read_json(job.folder / FINISHED)
    if finished is None:
        return "failed" if (job.folder / RUN_FAILED).exists() else "partial"
    if finished.get("metrics") != _digest(job.folder / METRICS_FILE):
        return "partial"
    return "finished" if finished.get("key") == job.key else "changed"


def refuse_changed(jobs: Sequence[Job]) -> None:
    """Refuse to count finished runs that were made with something else.

    Raises:
        BadOption: naming the runs, what differs, and what to do.
    """
    changed = [job for job in jobs if state_of(job) == "changed"]
    if not changed:
        return
    lines = []
    for job in changed:
        before = read_json(job.folder / STARTED) or {}
        lines.append(f"{job.arm.name}, seed {job.seed}:")
        lines += [f"  {text}" for text in differences(before, job.identity())[:8]]
    raise BadOption(
        f"--out: {len(changed)} finished run(s) there were made with other settings and cannot be counted:\n"
        + "\n".join(lines[:40])
        + "\naccepted: the same settings as before, another --out, or --rerun to run these anew"
    )


def refuse_foreign(jobs: Sequence[Job]) -> None:
    """Refuse run folders with files that no comparison wrote: they would be removed.

    Raises:
        BadOption: naming the first such folder.
    """
    for job in jobs:
        if state_of(job) != "new" and not (job.folder / STARTED).exists():
            raise BadOption(
                f"--out: {job.folder} has files that no comparison wrote; accepted: a new directory, "
                "or --collect for runs that were started by hand"
            )


def run_job(job: Job, local: bool, cwd: Path, on_record: Callable[[Record], None]) -> str | None:
    """Run one training in its folder, from nothing: what an unfinished run left there is removed.

    Args:
        job: the run.
        local: whether on this machine's CPU backend.
        cwd: directory of the training process, to which relative paths in its overrides are relative.
        on_record: called with every new record of its metrics.

    Returns:
        None when it finished, else what went wrong in a line.

    Raises:
        BadOption: a training process of an earlier, killed comparison still runs in the folder.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with _locked(job) as lock:
        _empty(job.folder)
        _write(job.folder / STARTED, {"key": job.key, "started": _now(), **job.identity()})
        try:
            result = train_in_child(
                [*job.overrides, *folder_overrides(job)],
                job.folder,
                on_record,
                local=local,
                cwd=cwd,
                keep_open=(lock,),
            )
        except RunFailed as error:
            reason = reason_of(error.tail) or str(error)
            _write(
                job.folder / RUN_FAILED, {"key": job.key, "reason": reason, "status": error.status, "failed": _now()}
            )
            return reason
        done = {"key": job.key, "finished": _now(), "seconds": round(result.total_seconds, 3)}
        _write(job.folder / FINISHED, {**done, "metrics": _digest(job.folder / METRICS_FILE)})
        return None


def folder_overrides(job: Job) -> list[str]:
    """Overrides that keep a run's files apart from those of the others."""
    return [
        f"trainer.default_local_dir={job.folder / 'checkpoints'}",
        f"trainer.experiment_name={job.arm.name}-seed-{job.seed}",
    ]


def reason_of(tail: Sequence[str]) -> str:
    """The line of a log's end that says what went wrong."""
    errors = [line for line in tail if _ERROR.search(line)]
    line = (errors or list(tail) or [""])[-1].strip()
    # Ray puts the process's name in front of what it passes on.
    return re.sub(r"^\([^)]*pid=[^)]*\)\s*", "", line)[:_LONGEST_REASON]


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def comparison_locked(out: Path) -> Iterator[None]:
    """Keep a second comparison out of the directory.

    Raises:
        BadOption: another one works there now.
    """
    out.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(out / LOCK)
    if descriptor is None:
        raise BadOption(f"--out: got {str(out)!r}, where another comparison runs now; accepted: another directory")
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _locked(job: Job) -> Iterator[int]:
    """Hold the run's folder; the training process holds it too, so it stays held when this process is killed."""
    descriptor = _lock(job.folder / LOCK)
    if descriptor is None:
        raise BadOption(
            f"{job.folder}: the training process of an earlier comparison still runs there; wait for its end, or end it"
        )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write beside the name, then rename: a marker is there whole or not at all."""
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
