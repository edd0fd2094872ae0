"""What a comparison shows while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dataflex_verl.commands.demo_run import Record
from dataflex_verl.commands.demo_summary import step_status

if TYPE_CHECKING:
    from dataflex_verl.commands.compare_jobs import Job

_START = 0.3
"""Share of a run that starting takes, for the bar."""


class CompareProgress:
    """A bar over all runs and one for the run that is on; where there is no terminal, a line a run."""

    def __init__(self, console: Console, runs: int, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._done = 0
        self._runs = runs
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
        )
        self._all = self._progress.add_task("all runs", total=runs, status=f"0/{runs}")
        self._one = self._progress.add_task("", total=steps, status="", visible=False)

    def __enter__(self) -> CompareProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def skipped(self, job: Job) -> None:
        self._ended(job, "finished before")

    def started(self, job: Job) -> None:
        self._progress.reset(self._one, description=_name(job), total=self._steps, status="starting", visible=True)

    def record(self, record: Record) -> None:
        step = int(record["step"])
        self._progress.update(self._one, completed=step, status=step_status(record, self._steps))
        inside = _START + (1 - _START) * step / self._steps
        self._progress.update(self._all, completed=self._done + min(inside, 0.99))

    def ended(self, job: Job, reason: str | None) -> None:
        self._progress.update(self._one, visible=False)
        self._ended(job, "finished" if reason is None else f"failed: {reason}")

    def _ended(self, job: Job, how: str) -> None:
        self._done += 1
        self._progress.update(self._all, completed=self._done, status=f"{self._done}/{self._runs}")
        # markup=False: an error's text may have brackets.
        self._console.print(f"{self._done}/{self._runs} {_name(job)}: {how}", markup=False, highlight=False)


def _name(job: Job) -> str:
    return f"{job.arm.name}, seed {job.seed}"
