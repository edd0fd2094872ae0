"""The part of the catalogue of errors about ``dataflex new``."""

from __future__ import annotations

NEW = """\
## Writing a package

Said by `dataflex new`, which writes nothing then; exit status 2.
"""
NEW_ENTRIES: tuple[tuple[str, str, str, str], ...] = (
    (
        "A name that no package can have",
        "Keep Short",
        "The name becomes that of the distribution, the module, the plugin and its class.",
        "Take lower-case letters, digits and hyphens.",
    ),
    (
        "A name that is taken",
        "token_prob",
        "A plugin, component, preset, module or installed package of that name is there; configurations, Python or pip "
        "could not tell them apart. A preset counts: `+dataflex=<preset>` configures the label of its name.",
        "Take another; `dataflex plugins --all` and `dataflex presets` list the names.",
    ),
    (
        "A directory with something in it",
        "--out /",
        "Nothing that is there is written over.",
        "Name another directory with `--out`, or remove what is in this one.",
    ),
)


def new_message(case: str) -> str:
    """What the command says in one of the cases of NEW_ENTRIES."""
    from pathlib import Path

    from dataflex_verl.scaffold.names import name_problem, place_problem

    if case.startswith("--out "):
        problem = place_problem(Path(case.removeprefix("--out ")))
    else:
        problem = name_problem(case)
    return f"dataflex new: {problem}"
