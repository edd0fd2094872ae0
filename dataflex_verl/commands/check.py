"""``dataflex check``: is this configuration good, and what would run? Starts nothing and imports no verl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from dataflex_verl.commands.checks import Findings, examine, refusal
from dataflex_verl.commands.hydra_config import (
    CommandLine,
    Composed,
    CompositionError,
    VerlMissing,
    compose_with_presets,
)

if TYPE_CHECKING:
    from dataflex_hooks import Problem

REFUSED = 2
NOTHING = "dataflex: nothing of ours in this configuration; the run is verl's own"


@dataclass(frozen=True)
class Checked:
    """A command line that was looked at.

    Attributes:
        composed: its configuration; where there are problems, as it was probably meant, or None.
        findings: what is wrong, or what will run.
    """

    composed: Composed | None
    findings: Findings


def check(arguments: Sequence[str], local: bool = False, as_json: bool = False) -> int:
    """Print the resolved plan, or everything that is wrong.

    Args:
        arguments: Hydra overrides and options, as verl's entry point takes them.
        local: check as ``dataflex train --local`` does.
        as_json: print one JSON object: ``ok``, ``problems``, ``plan``.

    Returns:
        0, or 2 when something is wrong.
    """
    try:
        checked = look_at(arguments, local)
    except VerlMissing as error:
        typer.echo(f"dataflex: {error}", err=True)
        return REFUSED
    problems = checked.findings.problems
    if as_json:
        plan = None if problems else _plan(checked)
        listed = [_plain(problem) for problem in problems]
        typer.echo(json.dumps({"ok": not problems, "problems": listed, "plan": plan}, indent=1, default=str))
    elif problems:
        typer.echo(refusal(problems), err=True)
    else:
        plan = _plan(checked)
        typer.echo("\n".join(plan["lines"]) if plan else NOTHING)
    return REFUSED if problems else 0


def look_at(arguments: Sequence[str], local: bool = False) -> Checked:
    """Compose the configuration that verl would compose, and examine it.

    Raises:
        VerlMissing: its configuration files are not here.
    """
    line = CommandLine.parse(arguments)
    if local:
        from dataflex_verl.commands.train import add_local_overrides

        line = line.with_overrides(add_local_overrides(line.overrides))
    try:
        composed: Composed | None = compose_with_presets(line)
        problems: list[Problem] = []
    except CompositionError as error:
        from dataflex_verl.commands.diagnose import diagnose

        composed, problems = diagnose(line)
        problems = problems or [_unexplained(error)]
    problems += _preset_problems(line, composed)
    findings = examine(composed.config, local) if composed is not None else Findings([])
    return Checked(composed, Findings(problems + findings.problems, findings.hooks, findings.coefficients))


def _preset_problems(line: CommandLine, composed: Composed | None) -> list[Problem]:
    if composed is None or not composed.presets:
        return []
    from dataflex_verl.preset_checks import preset_problems

    return preset_problems(line.overrides, composed.presets)


def _unexplained(error: CompositionError) -> Problem:
    from dataflex_hooks import Problem
    from dataflex_hooks.errors import Described

    return Problem("hydra", Described("this configuration"), "what Hydra can compose", str(error))


def _plan(checked: Checked) -> dict[str, Any] | None:
    from dataflex_verl.plan import plan_data

    found = checked.findings
    if found.hooks is None or found.coefficients is None or checked.composed is None:
        return None
    return plan_data(found.hooks, found.coefficients, checked.composed.config)


def _plain(problem: Problem) -> dict[str, Any]:
    return {
        "setting": problem.setting,
        "given": str(problem.given) if isinstance(problem.given, str) else problem.given,
        "accepted": problem.accepted,
        "hint": problem.hint,
        "text": str(problem),
    }
