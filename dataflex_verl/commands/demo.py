"""``dataflex demo``: make model and data, train with verl in a child process, show what came of it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from dataflex_verl.commands.demo_plan import LEARNING_RATE, STEPS, BadOption, DemoPlan, choose_strategies
from dataflex_verl.commands.demo_report import STARTING, DemoProgress, show_summary
from dataflex_verl.commands.demo_run import RunFailed, RunResult, run_environment, train_in_child
from dataflex_verl.commands.demo_summary import summarize
from dataflex_verl.commands.train import REFUSED, set_local_environment

if TYPE_CHECKING:
    from dataflex_verl.demo.build import DemoFiles

FAILED = 1


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command, as given."""

    steps: int = STEPS
    seed: int = 0
    strategies: tuple[str, ...] = ()
    out: Path | None = None
    learning_rate: float | None = None
    cache: Path | None = None


def demo(options: DemoOptions, as_json: bool = False) -> int:
    """Run the demo. Progress goes to stderr; stdout gets the tables, or with ``as_json`` one JSON object.

    Returns:
        0, 2 when an option cannot be used, 1 when the training failed.
    """
    try:
        strategies = choose_strategies(options.strategies)
        _refuse_used_directory(options.out)
    except BadOption as error:
        typer.echo(f"dataflex: {error}", err=True)
        return REFUSED
    try:
        plan, result = _train(options, strategies, Console(stderr=True, quiet=as_json))
    except RunFailed as error:
        typer.echo("\n".join([*error.tail, f"dataflex: {error}; the whole log: {error.log}"]), err=True)
        return FAILED
    summary = summarize(result)
    figures = {"strategies": list(strategies), "seed": plan.seed, "learning_rate": plan.learning_rate}
    report = json.dumps({**figures, **asdict(summary), "command": plan.stock_command()}, indent=2)
    if options.out is not None:
        (options.out / "summary.json").write_text(f"{report}\n")
    if as_json:
        typer.echo(report)
        return 0
    console = Console()
    show_summary(console, summary, strategies)
    console.print("\nThe same run with verl's own entry point:\n")
    # Plain, so that a terminal's width cannot break what is meant to be copied.
    typer.echo(plan.stock_command())
    if options.out is not None:
        typer.echo(f"\nModel, data, metrics, log, command and summary: {options.out}")
    return 0


def _train(options: DemoOptions, strategies: tuple[str, ...], console: Console) -> tuple[DemoPlan, RunResult]:
    rate = LEARNING_RATE if options.learning_rate is None else options.learning_rate
    with DemoProgress(console, options.steps) as progress, _run_directory(options.out) as directory:
        # Started now, the workers' modules load while the model is made. The fork server serves processes of the
        # environment it was started in, so the training's variables are set before.
        os.environ.update(run_environment(directory))
        set_local_environment()
        progress.stage("making model and data, kept for the next run")
        files = _files(options, directory)
        plan = DemoPlan(files, options.steps, options.seed, strategies, rate)
        if options.out is not None:
            (directory / "command.sh").write_text(f"{plan.stock_command()}\n")
        progress.stage(STARTING)
        return plan, train_in_child(plan.overrides(), directory, progress.record)


def cache_directory() -> Path:
    """Where model and data are kept between runs: ``dataflex`` under the XDG cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dataflex"


def _files(options: DemoOptions, directory: Path) -> DemoFiles:
    """Make model and data, or find them; with ``--out``, a copy in the run's own directory."""
    from dataflex_verl.demo.build import DemoFiles, build_demo

    built = build_demo(options.cache or cache_directory(), options.seed)
    if options.out is None:
        return built
    shutil.copytree(built.model_dir, directory / "model")
    copies = (
        Path(shutil.copy(path, directory)) for path in (built.train_parquet, built.val_parquet, built.reward_path)
    )
    return DemoFiles(directory / "model", *copies)


def _refuse_used_directory(out: Path | None) -> None:
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadOption(f"--out: got {str(out)!r}; accepted: a new or empty directory")


@contextmanager
def _run_directory(out: Path | None) -> Iterator[Path]:
    """``out``, or a temporary directory that stays only when the run fails: its log is there."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out.resolve()
        return
    directory = Path(tempfile.mkdtemp(prefix="dataflex-demo-"))
    failed = False
    try:
        yield directory
    except RunFailed:
        failed = True
        raise
    finally:
        if not failed:
            shutil.rmtree(directory, ignore_errors=True)
