"""What a comparison leaves behind: JSON, a Markdown table, a page, and what is printed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import typer

from dataflex_verl.analysis.comparison import Comparison
from dataflex_verl.analysis.comparison_data import as_data
from dataflex_verl.analysis.comparison_page import comparison_page
from dataflex_verl.analysis.comparison_text import main_table, markdown
from dataflex_verl.analysis.verdicts import verdict

RESULTS, TABLE, PAGE = "results.json", "results.md", "report.html"


def write_results(comparison: Comparison, out: Path, versions: Mapping[str, str]) -> None:
    """Write the results as JSON, as a Markdown table and as a page."""
    data = {**as_data(comparison), "versions": dict(versions), "cores": os.cpu_count()}
    (out / RESULTS).write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
    (out / TABLE).write_text(markdown(comparison, versions), encoding="utf-8")
    (out / PAGE).write_text(comparison_page(comparison, versions), encoding="utf-8")


def warn(sentences: Iterable[str]) -> None:
    """Print what makes a comparison less than it seems, a line each, beside the output."""
    for sentence in sentences:
        typer.echo(f"warning: {sentence}", err=True)


def show(comparison: Comparison, out: Path, as_json: bool) -> None:
    """Print the sentences and the table, or the JSON."""
    if as_json:
        typer.echo((out / RESULTS).read_text(encoding="utf-8").rstrip())
        return
    typer.echo("\n".join(main_table(comparison)) + "\n")
    warn(comparison.warnings)
    for arm in comparison.arms:
        typer.echo(verdict(comparison, arm))
    for arm in comparison.arms:
        for gap in arm.gaps:
            typer.echo(f"{arm.name}, {gap}", err=True)
    for note in comparison.notes:
        typer.echo(f"{note}.")
    typer.echo("\n" + "\n".join(str(out / name) for name in (PAGE, TABLE, RESULTS)))
