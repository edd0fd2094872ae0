"""``dataflex presets``: the ready-made strategies of all installed packages, a line each."""

from __future__ import annotations

import json

import typer

from dataflex_verl.commands.tables import table
from dataflex_verl.presets.providers import Preset, all_presets


def presets(as_json: bool = False) -> int:
    """Print name, description and source of each preset, and what is wrong with a package that brings some.

    Returns:
        0; a broken package disturbs only the runs that name it.
    """
    found, broken = all_presets()
    if as_json:
        listed = [{"name": p.name, "description": p.description(), "source": p.source} for p in found]
        errors = [{"name": b.name, "source": b.source, "error": b.error} for b in broken]
        typer.echo(json.dumps({"presets": listed, "broken": errors}, indent=1))
        return 0
    typer.echo(table(("preset", "what it does", "from"), [_row(preset) for preset in found]))
    for provider in broken:
        typer.echo(f"{provider.name} of {provider.source} is broken: {provider.error}", err=True)
    typer.echo("\nOne: +dataflex=difffilter   Stacked: +dataflex=[difffilter,per]")
    typer.echo("A value changed: ++dataflex.plugins.difffilter.actuator.params.low=0.1")
    return 0


def _row(preset: Preset) -> tuple[str, str, str]:
    return preset.name, preset.description(), preset.source
