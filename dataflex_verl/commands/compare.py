"""``dataflex compare``: arms under the same seeds and the same budget, and what that shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dataflex_verl.analysis.conditions import Conditions
from dataflex_verl.analysis.extra import MissingLibrary, library
from dataflex_verl.commands.compare_checks import CheckedJobs, check_jobs
from dataflex_verl.commands.compare_design import Arm, Design, choose_arms, choose_seeds
from dataflex_verl.commands.compare_jobs import Job, make_jobs, refuse_seeds, run_versions
from dataflex_verl.commands.compare_output import show, warn, write_results
from dataflex_verl.commands.compare_progress import CompareProgress
from dataflex_verl.commands.compare_run import (
    FINISHED,
    RUN_FAILED,
    comparison_locked,
    read_json,
    refuse_changed,
    refuse_foreign,
    run_job,
    state_of,
)
from dataflex_verl.commands.demo_plan import STEPS, BadOption
from dataflex_verl.commands.hydra_config import VerlMissing
from dataflex_verl.commands.train import REFUSED

if TYPE_CHECKING:
    from dataflex_verl.analysis.comparison import Comparison
    from dataflex_verl.demo.build import DemoFiles

FAILED = 1
STOPPED = 130
PLAN_FILE = "compare.json"


@dataclass(frozen=True)
class CompareOptions:
    """The options of the command, as given."""

    arms: tuple[str, ...] = ()
    baseline: str | None = None
    seeds: str = "3"
    steps: int | None = None
    out: Path | None = None
    overrides: tuple[str, ...] = ()
    local: bool = False
    learning_rate: float | None = None
    metric: str | None = None
    cache: Path | None = None
    rerun: bool = False


def compare(options: CompareOptions, as_json: bool = False, only_print: bool = False) -> int:
    """Run what is not finished yet, and write what came of it.

    Args:
        options: as given.
        as_json: print the results as JSON and nothing else.
        only_print: print a verl command an arm and seed, and start nothing.

    Returns:
        0, 1 when a run failed, 2 when an option or a configuration cannot be used, 130 when it was interrupted.
    """
    try:
        for name in () if only_print else ("scipy", "plotly"):
            library(name)
        design = _design(options)
        out = _directory(options)
        with comparison_locked(out):
            checked = _prepare(design, out, options.cache, Console(stderr=True, quiet=as_json))
            if only_print:
                from dataflex_verl.commands.compare_print import print_commands

                _write_plan(design, checked, out)
                print_commands(design, checked.jobs)
                return 0
            refuse_foreign(checked.jobs)
            if not options.rerun:
                refuse_changed(checked.jobs)
            _write_plan(design, checked, out)
            failed = _run_all(design, checked.jobs, Console(stderr=True, quiet=as_json))
            comparison = _evaluate(design, checked, out)
    except (BadOption, MissingLibrary, VerlMissing) as error:
        typer.echo(f"dataflex: {error}", err=True)
        return REFUSED
    except KeyboardInterrupt:
        typer.echo("dataflex: stopped; the same command goes on from here", err=True)
        return STOPPED
    write_results(comparison, out, run_versions())
    show(comparison, out, as_json)
    return FAILED if failed else 0


def collect(directory: Path, baseline: str | None, metric: str | None, as_json: bool = False) -> int:
    """Evaluate runs that were made elsewhere, from verl's own files, and write the results beside them.

    Returns:
        0, or 2 when there is nothing to evaluate, or runs without a plan say themselves that they cannot be compared.
    """
    from dataflex_verl.analysis.comparison import compare_outcomes
    from dataflex_verl.commands.compare_print import collect_outcomes, find_collected
    from dataflex_verl.commands.compare_records import (
        check_unplanned,
        conditions_of,
        read_record,
        rollouts_recorded,
        versions_of,
    )

    try:
        for name in ("scipy", "plotly"):
            library(name)
        directory = directory.expanduser().resolve()
        found = find_collected(directory, PLAN_FILE, baseline, metric)
        runs = collect_outcomes(directory, found)
        counted = [(run.arm, run.seed) for run in runs if run.state == "finished"]
        records = {(arm, seed): read_record(directory / arm / f"seed-{seed}") for arm, seed in counted}
        if not found.wanted:
            check_unplanned(records)
            rollouts = rollouts_recorded(records, found.steps)
            found = replace(found, rollouts=rollouts, versions=versions_of(records))
        conditions = conditions_of(records, found.arms, found.wanted, found.differs)
        comparison = compare_outcomes(
            runs, found.arms, found.steps, found.rollouts, found.metric, found.alike, conditions
        )
    except (BadOption, MissingLibrary) as error:
        typer.echo(f"dataflex: {error}", err=True)
        return REFUSED
    write_results(comparison, directory, found.versions)
    show(comparison, directory, as_json)
    return 0


def _design(options: CompareOptions) -> Design:
    arms = choose_arms(options.arms, options.baseline, options.overrides)
    design = Design(
        arms,
        choose_seeds(options.seeds),
        options.steps or STEPS,
        options.overrides,
        options.local,
        options.learning_rate,
        options.metric,
    )
    refuse_seeds(design)
    if design.own_task and options.steps is None:
        raise BadOption("--steps: got nothing; accepted: the number of training steps of every run, with data of yours")
    if design.own_task and options.learning_rate is not None:
        raise BadOption("--lr: accepted for the demo task; with data of yours write the override")
    return design


def _directory(options: CompareOptions) -> Path:
    if options.out is None:
        raise BadOption("--out: got nothing; accepted: a directory for the runs, new or of this comparison")
    out = options.out.expanduser().resolve()
    if out.exists() and not out.is_dir():
        raise BadOption(f"--out: got {str(options.out)!r}; accepted: a directory")
    return out


def _prepare(design: Design, out: Path, cache: Path | None, console: Console) -> CheckedJobs:
    """Make the demo's files and check every arm before anything starts."""
    files: Mapping[int, DemoFiles] = {}
    if not design.own_task:
        from dataflex_verl.commands.demo import cache_directory
        from dataflex_verl.demo.build import build_demo

        with console.status("making model and data of each seed, kept for the next time"):
            files = {seed: build_demo(cache or cache_directory(), seed) for seed in design.seeds}
    with console.status("checking every arm"):
        checked = check_jobs(design, make_jobs(design, out, files))
    if not console.quiet:
        warn(Conditions(checked.differs).said(design.arms[0].name))
    return checked


def _run_all(design: Design, jobs: Sequence[Job], console: Console) -> list[Job]:
    """Run what is not finished, one after another; return the runs that failed."""
    local = design.local or not design.own_task
    failed = []
    with CompareProgress(console, len(jobs), design.steps) as progress:
        for job in jobs:
            if state_of(job) == "finished":
                progress.skipped(job)
                continue
            progress.started(job)
            cwd = Path.cwd() if design.own_task else job.folder
            reason = run_job(job, local, cwd, progress.record)
            progress.ended(job, reason)
            if reason is not None:
                failed.append(job)
    return failed


def _evaluate(design: Design, checked: CheckedJobs, out: Path) -> Comparison:
    from dataflex_verl.analysis.comparison import compare_outcomes
    from dataflex_verl.analysis.outcomes import failed_outcome, read_outcome

    runs = []
    for job in checked.jobs:
        finished = read_json(job.folder / FINISHED)
        if state_of(job) == "finished" and finished is not None:
            seconds = finished.get("seconds")
            runs.append(read_outcome(job.arm.name, job.seed, job.folder, design.steps, design.metric, seconds))
            continue
        failure = read_json(job.folder / RUN_FAILED) or {"reason": "ended before it was finished"}
        runs.append(failed_outcome(job.arm.name, job.seed, job.folder, str(failure.get("reason"))))
    return compare_outcomes(
        runs,
        [arm.name for arm in design.arms],
        design.steps,
        checked.rollouts,
        design.metric,
        _alike(design.arms),
        Conditions(checked.differs),
    )


def _alike(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    return [
        (one.name, other.name)
        for index, one in enumerate(arms)
        for other in arms[index + 1 :]
        if one.overrides == other.overrides
    ]


def _write_plan(design: Design, checked: CheckedJobs, out: Path) -> None:
    """What was compared, for ``--collect`` and for readers."""
    differs = {arm: [asdict(one) for one in given] for arm, given in checked.differs.items()}
    plan: dict[str, Any] = {
        **asdict(design),
        "rollouts": checked.rollouts,
        "versions": run_versions(),
        "differs": differs,
    }
    (out / PLAN_FILE).write_text(json.dumps(plan, indent=1, default=str) + "\n", encoding="utf-8")
