"""The page over a comparison: a sentence an arm, differences with their intervals, and the runs' curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from dataflex_verl.analysis.charts import Chart, axis, packed
from dataflex_verl.analysis.colours import colour, dash
from dataflex_verl.analysis.comparison import ArmResult, Comparison
from dataflex_verl.analysis.comparison_text import GAP, main_rows, outcome_rows, run_rows
from dataflex_verl.analysis.outcomes import reward_series
from dataflex_verl.analysis.page import page, paragraphs, table
from dataflex_verl.analysis.records import Floats, RunLog
from dataflex_verl.analysis.verdicts import verdict


def comparison_page(comparison: Comparison, versions: Mapping[str, str]) -> str:
    """Compose the page.

    Raises:
        MissingLibrary: plotly is not installed.
    """
    title = f"{len(comparison.arms)} arms, {len(comparison.seeds)} paired seeds, {comparison.steps} steps each"
    return page(title, "".join(_head(comparison)), _charts(comparison), "".join(_tail(comparison, versions)))


def _head(comparison: Comparison) -> Iterator[str]:
    rollouts = "" if comparison.rollouts is None else f", {comparison.rollouts:,} generated rollouts"
    yield paragraphs(
        [
            f"Every run: {comparison.steps} steps{rollouts}. Compared with {comparison.baseline}, seed by seed, in "
            f"{comparison.main} after the last step."
        ]
    )
    yield table(*main_rows(comparison))
    yield paragraphs(
        [
            "Difference: mean of the paired differences ± its standard error. Interval: paired t. Adjusted p: Holm, "
            "over the arms. Detectable: the true difference that this many seeds find four times in five, adjusted "
            "likewise."
        ],
        "note",
    )
    yield "<h2>In words</h2>\n"
    yield paragraphs([verdict(comparison, arm) for arm in comparison.arms], "said")
    yield paragraphs([f"{note}." for note in comparison.notes], "said")
    for warning in comparison.warnings:
        yield f'<p class="finding warning">{escape(warning)}.</p>\n'
    for arm in comparison.arms:
        for gap in arm.gaps:
            yield f'<p class="finding warning"><b>{escape(arm.name)}</b>{escape(gap)}</p>\n'


def _charts(comparison: Comparison) -> list[Chart]:
    found = [*_differences(comparison), _curves(comparison)]
    return [chart for chart in found if chart.traces]


def _differences(comparison: Comparison) -> Iterator[Chart]:
    for index, name in enumerate(comparison.outcomes):
        arms = [arm for arm in comparison.arms[1:] if arm.against[name].difference is not None]
        title = f"Difference to {comparison.baseline}: {name}"
        layout = {
            "height": 110 + 30 * len(arms),
            "margin": {"l": 110, "t": 8, "b": 36, "r": 12},
            "hovermode": "closest",
            "xaxis": {"title": {"text": "difference"}, "zeroline": True, "zerolinecolor": "#222"},
            "yaxis": {"autorange": "reversed"},
        }
        note = "Dot: mean. Line: 95 % interval, paired t. Small marks: the seeds." if index == 0 else ""
        yield Chart("Differences", title, _forest(arms, name), layout, note, small=index > 0)


def _forest(arms: Sequence[ArmResult], name: str) -> list[dict[str, object]]:
    seeds_x, seeds_y = [], []
    lines_x: list[float | None] = []
    lines_y: list[str | None] = []
    means_x, means_y = [], []
    for arm in arms:
        against = arm.against[name]
        found = against.difference
        if found is None:
            continue
        seeds_x += list(against.differences)
        seeds_y += [arm.name] * len(against.differences)
        means_x.append(found.mean)
        means_y.append(arm.name)
        if found.low is not None:
            lines_x += [found.low, found.high, None]
            lines_y += [arm.name, arm.name, None]
    if not means_x:
        return []
    points = {"type": "scatter", "mode": "markers"}
    line = {"color": colour(0), "width": 3}
    return [
        {"type": "scatter", "mode": "lines", "name": "95 % interval", "x": lines_x, "y": lines_y, "line": line},
        {**points, "name": "seed", "x": seeds_x, "y": seeds_y, "marker": {"symbol": "line-ns-open", "color": "#444"}},
        {**points, "name": "mean", "x": means_x, "y": means_y, "marker": {"size": 10, "color": colour(5)}},
    ]


def _curves(comparison: Comparison) -> Chart:
    traces = []
    for index, arm in enumerate(comparison.arms):
        logs = [run.log for run in comparison.runs if run.arm == arm.name and run.state == "finished" and run.log]
        curve = _mean_curve(logs)
        if curve is not None:
            steps, values = curve
            line = {"color": colour(index), "dash": dash(index // 8), "width": 2}
            line_of = {"type": "scatter", "mode": "lines", "name": arm.name, "line": line}
            traces.append({**line_of, "y": packed(values), **axis(steps)})
    note = "Mean over the seeds, of all rollouts; under a mixer the prompts are others."
    return Chart("Training", "Reward of a step", traces, {"height": 420}, note)


def _mean_curve(logs: Sequence[RunLog]) -> tuple[list[int], Floats] | None:
    rows = [log.values(name) for log in logs if (name := reward_series(log)) is not None]
    return (list(logs[0].steps), np.mean(rows, axis=0)) if rows and len(rows) == len(logs) else None


def _tail(comparison: Comparison, versions: Mapping[str, str]) -> Iterator[str]:
    yield "<section><h2>By outcome</h2>\n"
    yield table(*outcome_rows(comparison))
    note = (
        "Mean, and difference with its 95 % interval, not adjusted for the number of outcomes: to look at, not to test."
    )
    yield paragraphs([note], "note")
    yield "<h2>Runs</h2>\n"
    yield table(*run_rows(comparison))
    shown = ", ".join(f"{name} {version}" for name, version in versions.items()) or GAP
    yield paragraphs([f"Versions: {shown}."], "note")
    yield "</section>\n"
