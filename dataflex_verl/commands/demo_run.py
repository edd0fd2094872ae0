"""One training run in a child process, followed through verl's own metrics file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflex_verl.commands.demo_plan import METRICS_VARIABLE

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 20.0
Record = Mapping[str, Any]
"""A line of verl's file logger: ``step`` and ``data``, a mapping of metric names to numbers."""


class RunFailed(RuntimeError):
    """The training process ended with an error. ``tail`` holds the end of its log."""

    def __init__(self, status: int, log: Path, tail: list[str]) -> None:
        super().__init__(f"training ended with status {status}")
        self.status = status
        self.log = log
        self.tail = tail


@dataclass
class RunResult:
    """What a run logged and how long it took.

    Attributes:
        records: the lines of the metrics file, in order.
        arrival: seconds from the start of the process to each of them.
        total_seconds: seconds from start to end of the process.
    """

    records: list[Record] = field(default_factory=list)
    arrival: list[float] = field(default_factory=list)
    total_seconds: float = 0.0


def train_in_child(
    overrides: Sequence[str],
    directory: Path,
    on_record: Callable[[Record], None],
    *,
    local: bool = True,
    cwd: Path | None = None,
    keep_open: Sequence[int] = (),
) -> RunResult:
    """Run ``dataflex train`` with ``overrides`` in ``directory``.

    Its output goes to ``verl.log`` there, verl's metrics to ``metrics.jsonl``.

    Args:
        overrides: Hydra overrides of the run.
        directory: working directory of the run, there already.
        on_record: called with every new line of the metrics file.
        local: on this machine's CPU backend.
        cwd: another working directory than ``directory``.
        keep_open: file descriptors that the process inherits.

    Raises:
        RunFailed: the process ended with an error.
    """
    log_path = directory / "verl.log"
    environment = {**os.environ, **run_environment(directory)}
    command = [sys.executable, "-m", "dataflex_verl.cli", "train", *(["--local"] if local else []), *overrides]
    result = RunResult()
    started = time.monotonic()
    with log_path.open("wb") as log, _termination_noted() as received:
        process = subprocess.Popen(
            command,
            cwd=cwd or directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(keep_open),
        )
        try:
            reader = MetricsReader(Path(environment[METRICS_VARIABLE]))
            running = True
            while running and not received:
                running = process.poll() is None
                for record in reader.new_records():
                    result.records.append(record)
                    result.arrival.append(time.monotonic() - started)
                    on_record(record)
                if running:
                    time.sleep(_POLL_SECONDS)
        finally:
            _end(process)
    if received:
        sys.exit(128 + received[0])
    result.total_seconds = time.monotonic() - started
    if process.returncode != 0:
        raise RunFailed(process.returncode, log_path, last_lines(log_path))
    return result


def run_environment(directory: Path) -> dict[str, str]:
    """What the training process gets beside the environment of this one."""
    return {METRICS_VARIABLE: str(directory / "metrics.jsonl"), "PYTHONUNBUFFERED": "1"}


class MetricsReader:
    """Reads a file of JSON lines that grows; a line counts once its end is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_records(self) -> list[Record]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]


def last_lines(path: Path, count: int = 20, width: int = 200) -> list[str]:
    """The last lines of a log that say something, shortened."""
    lines = path.read_text(errors="replace").splitlines()
    return [line[:width] for line in lines if line.strip()][-count:]


@contextmanager
def _termination_noted() -> Iterator[list[int]]:
    """Note SIGTERM and go on, so that the training process can be ended first, wherever its start stands."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let an interrupted run close Ray in its own way before it is stopped."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
