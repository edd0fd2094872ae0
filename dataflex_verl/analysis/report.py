"""The page over runs: what they came to, what to look at, every chart, their plans and versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from dataflex_verl.analysis.charts import charts, stretch
from dataflex_verl.analysis.colours import colour
from dataflex_verl.analysis.logged import LoggedWeights
from dataflex_verl.analysis.page import page, table
from dataflex_verl.analysis.records import RunLog
from dataflex_verl.analysis.summary import summarize_run

GAP = "—"


def report_page(
    logs: Sequence[RunLog],
    summaries: Sequence[dict[str, Any]] | None = None,
    logged: Sequence[LoggedWeights | None] = (),
) -> str:
    """Compose the report.

    Args:
        logs: runs, drawn over one another.
        summaries: of :func:`summarize_run`, if they are there already.
        logged: of each run what its decision log says, or None; nothing for all runs alike.

    Raises:
        MissingLibrary: plotly is not installed.
    """
    summaries = summaries or [summarize_run(log) for log in logs]
    title = logs[0].name if len(logs) == 1 else f"{len(logs)} runs: {', '.join(log.name for log in logs)}"
    head = "".join([figures_table(summaries), *_findings(summaries), *_thinning(logs)])
    return page(title, head, charts(logs, logged), "".join(_plans(summaries)))


def figures_table(summaries: Sequence[dict[str, Any]]) -> str:
    """The first table: a run a row."""
    head = ("run", "steps", "reward, first → last", "validation", "kept", "effective sample", "step", "tokens")
    return table(head, [_row(summary) for summary in summaries])


def _row(summary: dict[str, Any]) -> list[str]:
    tokens, seconds = summary["tokens"], summary["step_seconds"]
    return [
        summary["name"],
        str(summary["steps"]),
        _change(summary["reward"]),
        _change(summary["validation"]),
        _percent(summary["kept_frac"]),
        _percent(summary["ess_frac"]),
        GAP if seconds is None else f"{seconds:.2f} s",
        GAP if tokens is None else f"{tokens:,.0f}",
    ]


def _findings(summaries: Sequence[dict[str, Any]]) -> Iterator[str]:
    found = [(summary, finding) for summary in summaries for finding in summary["findings"]]
    yield "<h2>What to look at</h2>\n"
    if not any(finding["level"] == "warning" for _, finding in found):
        yield '<p class="finding note">No warning: no starved domain, no near-empty selection, no concentrated '
        yield "weights, no decision without effect was found in what was logged.</p>\n"
    for index, (summary, finding) in enumerate(found):
        name = f"<b>{escape(summary['name'])}</b>" if len(summaries) > 1 else ""
        word = "Warning: " if finding["level"] == "warning" else ""
        level = escape(finding["level"])
        yield f'<p class="finding {level}" id="finding-{index}">{name}{word}{escape(finding["text"])}</p>\n'


def _thinning(logs: Sequence[RunLog]) -> Iterator[str]:
    longest = max(len(log.steps) for log in logs)
    if (size := stretch(longest)) > 1:
        yield f"<p class=note>A point of a curve is the mean over {size} steps where a run has many.</p>\n"


def _plans(summaries: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "<section><h2>Plans and versions</h2>\n"
    for index, summary in enumerate(summaries):
        mark = f'<span style="color:{colour(index)}">&#9632;</span> ' if len(summaries) > 1 else ""
        versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
        lines = list(summary["plan"]) or ["no plan beside the metrics: a run without DataFlex, or its file is missing"]
        lines += ["", f"versions: {versions or 'not recorded beside this run'}", f"metrics: {summary['file']}"]
        is_open = " open" if len(summaries) == 1 else ""
        yield f"<details{is_open}><summary>{mark}{escape(summary['name'])}</summary>"
        yield f"<pre>{escape(chr(10).join(lines))}</pre></details>\n"
    yield "</section>\n"


def _change(pair: Sequence[float | None] | None) -> str:
    ends = [f"{value:.3f}" for value in pair or () if value is not None]
    return " → ".join(ends) or GAP


def _percent(value: float | None) -> str:
    return GAP if value is None else f"{value:.0%}"
