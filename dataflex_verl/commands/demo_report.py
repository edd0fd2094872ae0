"""What the demo shows: progress while it trains, tables at the end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dataflex_verl.commands.demo_run import Record
from dataflex_verl.commands.demo_summary import Change, Summary, step_status

STARTING = "starting Ray and verl"
VALIDATED = "first training step"
_LINE_EVERY = 10


class DemoProgress:
    """A spinner until the first training step, then a bar with the reward of the last step."""

    def __init__(self, console: Console, steps: int) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._console = console
        self._steps = steps
        self._task = self._progress.add_task(STARTING, total=None, status="")

    def __enter__(self) -> DemoProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def stage(self, description: str) -> None:
        self._progress.update(self._task, description=description)

    def record(self, record: Record) -> None:
        step = int(record["step"])
        if step == 0:
            self.stage(VALIDATED)
            return
        status = step_status(record, self._steps)
        description = "closing" if step >= self._steps else "training"
        self._progress.update(self._task, description=description, total=self._steps, completed=step, status=status)
        # A file or a pipe shows no bar; it gets a line now and then.
        if not self._console.is_terminal and (step % _LINE_EVERY == 0 or step >= self._steps):
            self._console.print(status)


def show_summary(console: Console, summary: Summary, strategies: Sequence[str]) -> None:
    """Print the result tables."""
    name = " + ".join(strategies) if strategies else "none (verl's own sync trainer)"
    console.print(f"\nStrategy: {name}\n")
    console.print(_rewards(summary))
    console.print(_figures(summary))


def _rewards(summary: Summary) -> Table:
    table = Table()
    table.add_column("mean reward, 1 is a right answer")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    _add_change(table, f"training, first and last {_count(summary.window, 'step')}", summary.train_reward)
    _add_change(table, "validation, all domains", summary.validation)
    for domain, change in summary.domains.items():
        _add_change(table, f"  validation, {domain}", change)
    return table


def _add_change(table: Table, label: str, change: Change | None) -> None:
    if change is None:
        table.add_row(label, "-", "-", "-")
        return
    style = "green" if change.rise > 0 else "red" if change.rise < 0 else ""
    table.add_row(label, f"{change.before:.3f}", f"{change.after:.3f}", f"{change.rise:+.3f}", style=style)


def _figures(summary: Summary) -> Table:
    table = Table(show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    rows = (
        ("responses kept for the update, mean over steps", _percent(summary.kept_frac)),
        ("weight in the loss, mean and spread", _pair(summary.weight_mean, summary.weight_std)),
        ("a training step, median", _seconds(summary.step_seconds)),
        ("start to first training step, first validation included", _seconds(summary.start_seconds)),
        (f"whole run of {_count(summary.steps, 'step')}", _seconds(summary.total_seconds)),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _pair(mean: float | None, spread: float | None) -> str:
    return "-" if mean is None or spread is None else f"{mean:.3f} ± {spread:.3f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
