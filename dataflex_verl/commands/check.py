"""``dataflex check``: is this configuration good, and what would run? Starts nothing and imports no verl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from dataflex_verl.commands.checks import refusal
from dataflex_verl.commands.hydra_config import VerlMissing
from dataflex_verl.commands.lazy_torch import postpone_torch
from dataflex_verl.commands.look import Checked, look_at

if TYPE_CHECKING:
    from dataflex_hooks import Problem

REFUSED = 2
NOTHING = "dataflex: nothing of ours in this configuration; the run is verl's own"


def check(arguments: Sequence[str], local: bool = False, as_json: bool = False) -> int:
    """Print the resolved plan, or everything that is wrong.

    Args:
        arguments: Hydra overrides and options, as verl's entry point takes them.
        local: check as ``dataflex train --local`` does.
        as_json: print one JSON object: ``ok``, ``problems``, ``plan``.

    Returns:
        0, or 2 when something is wrong.
    """
    postpone_torch()
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
