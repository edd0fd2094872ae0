"""What ``dataflex whatif`` prints for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

MEASURES = (
    ("trained on", "trained"),
    ("masked", "masked"),
    ("dropped", "dropped"),
    ("share trained on", "trained_frac"),
    ("reward, all", "reward_all"),
    ("reward, trained on", "reward_trained"),
    ("mean weight", "weight_mean"),
    ("largest weight", "weight_largest"),
    ("effective sample share", "ess_frac"),
)
_PROMPTS = 5


def show(data: Mapping[str, Any]) -> None:
    """Print tables; ``data`` is what ``--json`` prints."""
    # A width of its own: piped output is not cut to that of a terminal that is not there.
    console = Console(width=110, highlight=False, soft_wrap=False)
    strategies = data["strategies"]
    names = [strategy["name"] for strategy in strategies]
    typer.echo(f"{data['rollouts']} rollouts in {data['steps']} steps of {data['source']}")
    console.print(_measures(strategies))
    if any(strategy["reasons"] for strategy in strategies):
        console.print(_reasons(strategies))
    if any(strategy["domains"] for strategy in strategies):
        console.print(_domains(strategies))
    for strategy in strategies:
        if strategy["proposed"]:
            last = strategy["proposed"][-1]
            shares = ", ".join(f"{name} {share:.3f}" for name, share in last.items() if name != "step")
            typer.echo(f"{strategy['name']}: proportions after step {last['step']}: {shares}")
        if skipped := strategy["skipped_steps"]:
            typer.echo(f"{strategy['name']}: no update in {len(skipped)} step(s): {_few(skipped)}")
    if data["difference"]:
        _difference(console, data["difference"], names)
    for note in data["notes"]:
        typer.echo(f"Note: {note}")


def _measures(strategies: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("rollouts", *(_column(strategy["name"]) for strategy in strategies))
    for title, key in MEASURES:
        table.add_row(title, *(number(strategy[key]) for strategy in strategies))
    return table


def _reasons(strategies: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("not kept by", *(_column(strategy["name"]) for strategy in strategies))
    for reason in dict.fromkeys(reason for strategy in strategies for reason in strategy["reasons"]):
        table.add_row(reason, *(number(strategy["reasons"].get(reason)) for strategy in strategies))
    return table


def _domains(strategies: Sequence[Mapping[str, Any]]) -> Table:
    heads = [f"{strategy['name']}: share trained on" for strategy in strategies]
    table = Table("domain", "rollouts", "reward", *(_column(head) for head in heads))
    first = strategies[0]["domains"]
    for name, total in first.items():
        shares = [number(strategy["domains"].get(name, {}).get("trained_frac")) for strategy in strategies]
        table.add_row(name, number(total["rollouts"]), number(total["reward_all"]), *shares)
    return table


def _difference(console: Console, difference: Mapping[str, Any], names: Sequence[str]) -> None:
    n = difference["rollouts"]
    first, second = names
    if difference["identical"] == n:
        typer.echo(f"{first} and {second}: the same decisions and weights, bit for bit, for all {n} rollouts.")
        return
    typer.echo(
        f"{first} and {second} agree on {number(difference['agreement'])} of the rollouts: "
        f"{difference['trained_by_both']} trained on by both, {difference['trained_by_neither']} by neither, "
        f"{difference['trained_by_first_only']} by {first} only, {difference['trained_by_second_only']} by {second} "
        f"only. Weights differ by {number(difference['weight_gap_mean'])} on average."
    )
    if not difference["prompts"]:
        return
    table = Table("step", "prompt", "domain", "rollouts", "reward", *(_column(f"{name} trains on") for name in names))
    for prompt in difference["prompts"][:_PROMPTS]:
        known = [str(prompt["step"]), prompt["uid"][:12], prompt["domain"] or "-", str(prompt["rollouts"])]
        table.add_row(*known, number(prompt["reward"]), str(prompt["first"]), str(prompt["second"]))
    typer.echo("Where they differ most:")
    console.print(table)


def number(value: float | None) -> str:
    """A count as it is, other numbers with four digits; a dash for what is not there."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _column(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")


def _few(steps: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:10])
    return shown if len(steps) <= 10 else f"{shown}, ..."
