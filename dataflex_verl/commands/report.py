"""``dataflex report``: one page over one run or several, from verl's own metrics files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from dataflex_verl.analysis.extra import MissingLibrary
from dataflex_verl.analysis.logged import LoggedWeights, log_folder, logged_weights
from dataflex_verl.analysis.records import RunLog, UnreadableRun, read_run
from dataflex_verl.commands.train import REFUSED

DEFAULT_OUT = Path("report.html")


def report(
    sources: Sequence[str], out: Path | None = None, as_json: bool = False, decisions: Path | None = None
) -> int:
    """Write the page, or print the figures.

    Args:
        sources: each ``[NAME=]PATH`` of a run: its directory or metrics file.
        out: the page; without it ``report.html`` here.
        as_json: print figures and findings instead of writing a page, unless ``out`` is given too.
        decisions: the decision log of the run, where there is one run and its log is not beside the metrics.

    Returns:
        0, or 2 when a run cannot be read or a library is missing.
    """
    from dataflex_verl.analysis.summary import summarize_run

    try:
        if decisions is not None and len(sources) > 1:
            raise UnreadableRun("--decisions: accepted with one run; those of several are looked for beside each")
        logs = _named([_read(source) for source in sources])
        summaries = [summarize_run(log) for log in logs]
        if out is not None or not as_json:
            from dataflex_verl.analysis.report import report_page

            logged = [_logged(log, summary, decisions) for log, summary in zip(logs, summaries, strict=True)]
            path = out or DEFAULT_OUT
            _write(path, report_page(logs, summaries, logged))
    except (UnreadableRun, MissingLibrary) as error:
        typer.echo(f"dataflex: {error}", err=True)
        return REFUSED
    if as_json:
        typer.echo(json.dumps({"runs": summaries}, indent=1))
        return 0
    for summary in summaries:
        for finding in summary["findings"]:
            if finding["level"] == "warning":
                typer.echo(f"{summary['name']}: {finding['text']}")
    typer.echo(str(path.resolve()))
    return 0


def _logged(log: RunLog, summary: dict[str, Any], given: Path | None) -> LoggedWeights | None:
    """What the run's decision log says; of one that was not asked for and cannot be read, a note says so."""
    folder = given or log_folder(log)
    if folder is None:
        return None
    try:
        found = logged_weights(folder.expanduser())
    except (UnreadableRun, MissingLibrary) as error:
        if given is not None:
            raise
        summary["findings"].append({"level": "note", "text": f"decision log: {error}"})
        return None
    summary["findings"] += [{"level": "note", "text": note} for note in found.notes]
    return found


def _read(source: str) -> RunLog:
    name, equals, path = source.partition("=")
    if equals and not Path(source).exists():
        return read_run(Path(path).expanduser(), name or None)
    return read_run(Path(source).expanduser())


def _named(logs: Sequence[RunLog]) -> list[RunLog]:
    """Tell runs of the same name apart by as much of their paths as it takes."""
    from dataclasses import replace

    names = [log.name for log in logs]
    if len(set(names)) == len(names):
        return list(logs)
    paths = [log.path.resolve() for log in logs]
    depth = 1
    while len({path.parts[-depth - 1 :] for path in paths}) < len(set(paths)):
        depth += 1
    shown = ["/".join(path.parts[-depth - 1 : -1]) or path.stem for path in paths]
    if len(set(shown)) < len(shown):
        shown = ["/".join(path.parts[-depth - 1 :]) for path in paths]
    # The same file twice stays two runs.
    return [replace(log, name=name) for log, name in zip(logs, shown, strict=True)]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnreadableRun(f"--out: got {str(path)!r}; accepted: a file that can be written ({error})") from error
