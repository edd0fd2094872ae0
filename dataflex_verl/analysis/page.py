"""A report as one HTML file: everything in it, nothing loaded from elsewhere, readable on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from dataflex_verl.analysis.charts import Chart
from dataflex_verl.analysis.extra import library

_LAYOUT = {
    "height": 320,
    "margin": {"l": 48, "r": 12, "t": 8, "b": 40},
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "hovermode": "x unified",
    "xaxis": {"title": {"text": "step", "standoff": 4}, "gridcolor": "#eee", "zeroline": False},
    "yaxis": {"gridcolor": "#e4e4e4", "zeroline": False},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
}


def page(title: str, head: str, charts: Sequence[Chart], tail: str = "") -> str:
    """Compose a page.

    Args:
        title: of the page.
        head: HTML above the charts.
        charts: in order; a heading stands before the first of each section.
        tail: HTML below them.

    Raises:
        MissingLibrary: plotly is not installed.
    """
    script = library("plotly.offline").get_plotlyjs()
    folder = files("dataflex_verl.analysis")
    figures = [{"data": chart.traces, "layout": layout(chart)} for chart in charts]
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(title)}</title>\n",
            f"<style>{(folder / 'page.css').read_text(encoding='utf-8')}</style>\n</head><body>\n",
            f"<main><h1>{escape(title)}</h1>\n{head}\n",
            *_chart_places(charts),
            f"{tail}</main>\n",
            f'<script type="application/json" id="figures">{in_script(figures)}</script>\n',
            f"<script>{script}</script>\n",
            f"<script>{(folder / 'page.js').read_text(encoding='utf-8')}</script>\n</body></html>\n",
        ]
    )


def layout(chart: Chart) -> dict[str, Any]:
    """The layout of a chart: what all share, and its own."""
    merged: dict[str, Any] = {**_LAYOUT, "showlegend": len([t for t in chart.traces if t.get("showlegend", True)]) > 1}
    for key, value in chart.layout.items():
        merged[key] = (
            {**merged[key], **value} if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
        )
    return merged


def in_script(value: Any) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of plain text; the first column is a heading."""
    top = "".join(f"<th scope=col>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>{''.join(f'<td>{escape(text)}</td>' for text in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>\n'


def paragraphs(texts: Sequence[str], kind: str = "") -> str:
    """Plain text, a paragraph each."""
    return "".join(f'<p class="{kind}">{escape(text)}</p>\n' if kind else f"<p>{escape(text)}</p>\n" for text in texts)


def _chart_places(charts: Sequence[Chart]) -> Iterator[str]:
    section = None
    for number, chart in enumerate(charts):
        if chart.section != section:
            yield "</section>\n" if section is not None else ""
            section = chart.section
            yield f'<section class="charts"><h2>{escape(section)}</h2>\n'
        size = "chart small" if chart.small else "chart"
        note = f"<p class=note>{escape(chart.note)}</p>" if chart.note else ""
        yield f'<figure class="{size}"><figcaption>{escape(chart.title)}</figcaption>'
        height = layout(chart)["height"]
        yield f'<div class="plot" data-figure="{number}" style="min-height:{height}px"></div>{note}</figure>\n'
    yield "</section>\n" if section is not None else ""
