"""A comparison run elsewhere: one ordinary verl command an arm and seed, and what their runs left gathered."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dataflex_verl.analysis.conditions import SettingDifference
from dataflex_verl.analysis.outcomes import RunOutcome, failed_outcome, read_outcome
from dataflex_verl.analysis.records import METRICS_FILE, UnreadableRun, read_run
from dataflex_verl.commands.compare_design import Design, merged
from dataflex_verl.commands.compare_jobs import SEEDS, Job
from dataflex_verl.commands.compare_run import FINISHED, RUN_FAILED, STARTED, folder_overrides, read_json
from dataflex_verl.commands.demo_plan import METRICS_VARIABLE, NO_STRATEGY, BadOption
from dataflex_verl.commands.train import VERL_MAIN, add_local_overrides
from dataflex_verl.local.settings import local_environment, override_key

_SEED = re.compile(r"seed-(\d+)")


def print_commands(design: Design, jobs: Sequence[Job]) -> None:
    """Print a command a line, each writing verl's JSONL to the folder of its arm and seed."""
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        typer.echo(command(job, design.local or not design.own_task))


def command(job: Job, local: bool) -> str:
    """A run as a shell command. The file's place goes to Ray's workers too: one of them writes it."""
    metrics = job.folder / METRICS_FILE
    overrides = [*job.overrides, *folder_overrides(job)]
    if local:
        overrides = add_local_overrides(overrides)
    overrides.append(f"+ray_kwargs.ray_init.runtime_env.env_vars.{METRICS_VARIABLE}={_hydra(str(metrics))}")
    environment = {**(local_environment() if local else {}), METRICS_VARIABLE: str(metrics)}
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    return " ".join([*words, "python", "-m", VERL_MAIN, *map(shlex.quote, overrides)])


@dataclass(frozen=True)
class Collected:
    """What ``--collect`` found: arms, the baseline first, seeds and steps, and where they come from.

    ``wanted`` has by arm the overrides that the plan gives it; nothing without a plan. ``differs`` are by arm the other
    settings outside ``dataflex``, None where the plan does not have them.
    """

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    rollouts: int | None
    metric: str | None
    alike: tuple[tuple[str, str], ...]
    versions: dict[str, str]
    wanted: dict[str, tuple[str, ...]]
    differs: dict[str, tuple[SettingDifference, ...]] | None = None


def find_collected(directory: Path, plan_file: str, baseline: str | None, metric: str | None) -> Collected:
    """Read the plan of a comparison, or make one of the folders ``ARM/seed-N`` that are there.

    Raises:
        BadOption: there is neither, no telling the baseline, or a plan that cannot be read.
    """
    if not directory.is_dir():
        raise BadOption(f"--collect: got {str(directory)!r}; accepted: a directory of runs, ARM/seed-N/{METRICS_FILE}")
    plan = read_json(directory / plan_file)
    if (directory / plan_file).exists() and not _is_plan(plan):
        raise BadOption(
            f"--collect: {directory / plan_file} is no plan that can be read; accepted: the file as dataflex compare "
            "wrote it, or none"
        )
    if plan is not None:
        overrides = {arm["name"]: arm["overrides"] for arm in plan["arms"]}
        arms, seeds, steps = list(overrides), plan["seeds"], int(plan["steps"])
        rollouts, metric, versions = plan.get("rollouts"), metric or plan.get("metric"), plan.get("versions") or {}
    else:
        overrides, rollouts, versions = {}, None, {}
        folders = [path for path in sorted(directory.glob("*/seed-*")) if _SEED.fullmatch(path.name) and path.is_dir()]
        arms = list(dict.fromkeys(path.parent.name for path in folders))
        seeds = sorted({int(path.name.removeprefix("seed-")) for path in folders})
        steps = max((_last_step(path) for path in folders), default=0)
    if len(arms) < 2 or not steps:
        raise BadOption(
            f"--collect: {directory} has runs of {len(arms)} arm(s); accepted: a directory with {plan_file}, or runs "
            f"of two arms or more as ARM/seed-N/{METRICS_FILE}"
        )
    first = baseline or (arms[0] if plan is not None else NO_STRATEGY)
    if first not in arms:
        raise BadOption(f"--baseline: got {baseline!r}; accepted: one of {', '.join(arms)}")
    arms.sort(key=lambda arm: arm != first)
    alike = [
        (one, other)
        for index, one in enumerate(arms)
        for other in arms[index + 1 :]
        if overrides and overrides[one] == overrides[other]
    ]
    common = () if plan is None else plan.get("common") or ()
    # On a task of the user's own these replace what was given.
    ours = (*SEEDS, "trainer.resume_mode", "trainer.total_training_steps", "trainer.total_epochs")
    given = [text for text in common if override_key(text) not in ours]
    wanted = {arm: tuple(merged(given, added)) for arm, added in overrides.items()}
    noted = None if plan is None or first != plan["arms"][0]["name"] else plan.get("differs")
    differs = None if noted is None else {arm: tuple(SettingDifference(**one) for one in noted[arm]) for arm in noted}
    return Collected(tuple(arms), tuple(seeds), steps, rollouts, metric, tuple(alike), dict(versions), wanted, differs)


def _is_plan(plan: dict[str, Any] | None) -> bool:
    arms, seeds = (plan or {}).get("arms"), (plan or {}).get("seeds")
    named = isinstance(arms, list) and all(
        isinstance(arm, dict) and {"name", "overrides"} <= arm.keys() for arm in arms
    )
    return plan is not None and named and isinstance(seeds, list) and isinstance(plan.get("steps"), int)


def _last_step(folder: Path) -> int:
    try:
        return read_run(folder).last_step
    except UnreadableRun:
        return 0


def collect_outcomes(directory: Path, found: Collected) -> list[RunOutcome]:
    """Read the run of every arm and seed."""
    runs = []
    for seed in found.seeds:
        for arm in found.arms:
            folder = directory / arm / f"seed-{seed}"
            finished, failure = read_json(folder / FINISHED), read_json(folder / RUN_FAILED)
            if failure is not None and finished is None:
                runs.append(failed_outcome(arm, seed, folder, str(failure.get("reason"))))
                continue
            started = read_json(folder / STARTED)
            if started is not None and (lacks := _lacking(started, found.wanted.get(arm, ()))):
                reason = f"made with other settings than the plan's: without {', '.join(lacks)}"
                runs.append(RunOutcome(arm, seed, "left out", reason))
                continue
            seconds = (finished or {}).get("seconds")
            runs.append(read_outcome(arm, seed, folder, found.steps, found.metric, seconds))
    return runs


def _lacking(started: Mapping[str, Any], wanted: Sequence[str]) -> list[str]:
    """Overrides of the plan with which a run was not started."""
    used = started.get("overrides")
    return [text for text in wanted if text not in used] if isinstance(used, list) else []


def _hydra(text: str) -> str:
    return "'" + text.replace("'", "\\'") + "'"
