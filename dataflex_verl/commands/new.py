"""``dataflex new``: a package of a plugin to begin with."""

from __future__ import annotations

from pathlib import Path

import typer

from dataflex_verl.commands.check import REFUSED
from dataflex_verl.commands.lazy_torch import postpone_torch


def new(name: str, kind: str, with_preset: bool, out: Path | None) -> int:
    """Write the package and say what to do next.

    Args:
        name: of the distribution.
        kind: one of the scaffold's kinds.
        with_preset: whether it brings a preset of its name.
        out: directory to write to; None takes the name.

    Returns:
        0, or 2 with one line on what is wrong; nothing is written then.
    """
    postpone_torch()
    from dataflex_hooks.errors import Problem, did_you_mean, one_of
    from dataflex_verl.scaffold.names import Names, name_problem, place_problem
    from dataflex_verl.scaffold.write import KINDS, package_files, write_package

    place = Path(name) if out is None else out
    problem = name_problem(name)
    if kind not in KINDS:
        problem = problem or Problem("--kind", kind, one_of(KINDS), did_you_mean(kind, KINDS))
    files: dict[str, str] = {}
    try:
        problem = problem or place_problem(place)
        if problem is None:
            files = package_files(Names.of(name), kind, with_preset)
            write_package(place, files)
    except OSError as error:
        problem = Problem("--out", str(place), f"a directory that can be written: {error}")
    if problem is not None:
        typer.echo(f"dataflex new: {problem}", err=True)
        return REFUSED
    shown = place if place.is_absolute() else f"./{place.as_posix()}"
    typer.echo(f"Wrote {place.as_posix()}: {', '.join(files)}")
    typer.echo(f"Next: pip install {shown} && python -m pytest {place.as_posix()}")
    return 0
