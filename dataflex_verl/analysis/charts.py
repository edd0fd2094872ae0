"""The charts of a report, as plotly figures in plain values: built in milliseconds and checked by tests.

A trace of more than :data:`MOST_POINTS` values shows means over equal stretches of steps; :func:`stretch` says of how
many.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflex_verl.analysis.colours import colour, dash
from dataflex_verl.analysis.domains import domain_parts, shown_domain
from dataflex_verl.analysis.logged import LoggedWeights
from dataflex_verl.analysis.outcomes import reward_series, validation_by_domain
from dataflex_verl.analysis.records import Floats, RunLog, Series

MOST_POINTS = 400
_PARTS = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "ref_log_prob",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
)
_SHARE_NAMES = {"prop": "target", "generated": "generated", "trained": "trained"}
_SHARE_LINE = {
    "generated": {"dash": "solid", "width": 1.5},
    "trained": {"dash": "dot", "width": 1.5},
    "prop": {"dash": "solid", "width": 3},
}
_SHARE_COLOUR = {"generated": 4, "trained": 5, "prop": 6}
Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        section: heading under which it stands.
        title: what it shows.
        traces: plotly traces.
        layout: what differs from the layout that all charts share.
        note: a sentence below it.
        small: whether it takes half of the width where there is room.
    """

    section: str
    title: str
    traces: list[Trace]
    layout: Mapping[str, Any]
    note: str = ""
    small: bool = False


def charts(logs: Sequence[RunLog], logged: Sequence[LoggedWeights | None] = ()) -> list[Chart]:
    """Every chart that the runs have something for.

    Args:
        logs: the runs.
        logged: of each run what its decision log says, or None; nothing for all runs alike.
    """
    found = [*_rewards(logs), *_validation(logs), *_kept(logs), *_weights(logs), *_spread(logs, logged)]
    return [chart for chart in [*found, *_domains(logs), *_times(logs)] if chart.traces]


def trace(series: Series | None, name: str, index: int = 0, **given: Any) -> list[Trace]:
    """A line, or nothing where there are no values."""
    if series is None or not len(series.steps):
        return []
    steps, values = thinned(series.steps, series.values)
    mode = "lines+markers" if len(steps) < 3 else "lines"
    line = {"color": colour(index), "width": 2, **given.pop("line", {})}
    return [{"type": "scatter", "mode": mode, "name": name, "y": packed(values), **axis(steps), "line": line, **given}]


def thinned(steps: Any, values: Floats) -> tuple[Any, Floats]:
    """Means over equal numbers of values where there are more than can be seen; the last value stays as it is."""
    size = stretch(len(steps))
    if size <= 1:
        return steps, values
    starts = np.arange(0, len(steps), size)
    counts = np.diff(np.append(starts, len(steps)))
    return steps[starts + counts - 1], np.add.reduceat(values, starts) / counts


def stretch(count: int) -> int:
    """How many of ``count`` values are averaged to a point."""
    return -(-count // MOST_POINTS)


def packed(values: Floats) -> dict[str, str]:
    """Numbers as plotly's typed arrays: a third of their text's size, and read at once."""
    return {"dtype": "f4", "bdata": base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()}


def axis(steps: Any) -> dict[str, Any]:
    """Steps as first and distance where they are even, else one by one."""
    gaps = np.diff(steps)
    if len(gaps) and (gaps == gaps[0]).all():
        return {"x0": int(steps[0]), "dx": int(gaps[0])}
    return {"x": {"dtype": "i4", "bdata": base64.b64encode(np.asarray(steps, dtype="<i4").tobytes()).decode()}}


def _label(logs: Sequence[RunLog], log: RunLog, what: str) -> str:
    """``what``, with the run's name where there are several."""
    if len(logs) == 1:
        return what
    return f"{log.name}: {what}" if what else log.name


def _rewards(logs: Sequence[RunLog]) -> Iterator[Chart]:
    traces: list[Trace] = []
    for index, log in enumerate(logs):
        line = {"dash": dash(index // 8)}
        name = reward_series(log)
        traces += trace(log.series.get(name or ""), _label(logs, log, "all rollouts"), index, line=line)
        kept = log.series.get("dataflex/reward_kept")
        traces += trace(kept, _label(logs, log, "kept rollouts"), index, line={"dash": "dot"}, opacity=0.8)
    yield Chart("Reward", "Mean reward of a step", traces, {}, "Kept: those that entered the update.")


def _validation(logs: Sequence[RunLog]) -> Iterator[Chart]:
    overall: list[Trace] = []
    each: list[Trace] = []
    for index, log in enumerate(logs):
        by_domain = validation_by_domain(log)
        series = [log.series[name] for name in by_domain.values()]
        mean = _mean(series)
        overall += trace(mean, _label(logs, log, "all domains"), index, mode="lines+markers")
        for number, (domain, name) in enumerate(by_domain.items() if len(by_domain) > 1 else ()):
            line = {"dash": dash(index)}
            each += trace(log.series[name], _label(logs, log, domain), number, mode="lines+markers", line=line)
    note = "The mean of the domains' means."
    yield Chart("Validation", "Validation, all domains", overall, {}, note, small=bool(each))
    yield Chart("Validation", "Validation by domain", each, {}, small=True)


def _mean(series: Sequence[Series]) -> Series | None:
    """The mean over series, at the steps that all of them have."""
    if not series:
        return None
    steps = series[0].steps
    for one in series[1:]:
        steps = np.intersect1d(steps, one.steps)
    rows = [one.values[np.searchsorted(one.steps, steps)] for one in series]
    return Series(steps, np.mean(rows, axis=0))


def _kept(logs: Sequence[RunLog]) -> Iterator[Chart]:
    traces: list[Trace] = []
    share = {"yaxis": {"range": [0, 1.02], "tickformat": ".0%"}}
    for index, log in enumerate(logs):
        line = {"dash": dash(index // 8)}
        traces += trace(log.series.get("dataflex/kept_frac"), _label(logs, log, "kept"), index, line=line)
    yield Chart("Selection", "Share of rollouts kept for the update", traces, share)
    for log in logs:
        stack: list[Trace] = []
        for number, name in enumerate(sorted(name for name in log.series if _reason(name))):
            stack += trace(
                log.series[name], _reason(name), number, stackgroup="reasons", mode="lines", line={"width": 0.5}
            )
        note = "Rows a step. A rollout that two plugins refuse counts for both."
        yield Chart("Selection", _label(logs, log, "Why rollouts were taken out"), stack, {}, note)


def _reason(name: str) -> str:
    """The label and reason of a metric that counts rows taken out, or nothing."""
    for kind in ("masked_rows_total", "dropped_rows_total"):
        label, found, reason = name.removeprefix("dataflex/").partition(f"/{kind}/")
        if found and name.startswith("dataflex/"):
            return f"{label}: {reason.replace(':', '/')} ({kind.split('_')[0]})"
    return ""


def _weights(logs: Sequence[RunLog]) -> Iterator[Chart]:
    spread: list[Trace] = []
    sizes: list[Trace] = []
    for index, log in enumerate(logs):
        mean, std = log.series.get("dataflex/weight_mean"), log.series.get("dataflex/weight_std")
        if mean is not None and std is not None and len(mean.steps) == len(std.steps) and len(logs) == 1:
            spread += _band(mean, std, index)
        spread += trace(mean, _label(logs, log, "mean"), index)
        largest = log.series.get("dataflex/weight_largest")
        spread += trace(largest, _label(logs, log, "largest"), index, line={"dash": "dot", "width": 1})
        sizes += trace(log.series.get("dataflex/ess_frac"), _label(logs, log, "all plugins"), index)
        kept = log.series.get("dataflex/kept_frac")
        sizes += trace(kept, _label(logs, log, "kept"), index, line={"dash": "dot", "width": 1})
    note = "Over all tokens; the band is one standard deviation." if len(logs) == 1 else "Over all tokens."
    yield Chart("Weights", "Weight of a token in the loss", spread, {}, note, small=True)
    note = "As many equally weighted rollouts would be as informative. Without weights it is the share kept."
    share = {"yaxis": {"range": [0, 1.02], "tickformat": ".0%"}}
    yield Chart("Weights", "Effective sample size", sizes, share, note, small=True)


def _spread(logs: Sequence[RunLog], logged: Sequence[LoggedWeights | None]) -> Iterator[Chart]:
    for log, weights in zip(logs, logged, strict=bool(logged)):
        if weights is None or not weights.quantiles:
            continue
        lowest, low, median, high, highest = weights.quantiles
        traces = [*_between(lowest, highest, 0), *_between(low, high, 0), *trace(median, "median", 0)]
        note = "From the decision log. Bands: the middle half, and the middle nine tenths of a step's rollouts."
        yield Chart("Weights", _label(logs, log, "Weights of the rollouts in the update"), traces, {}, note)


def _band(mean: Series, std: Series, index: int) -> list[Trace]:
    low = Series(mean.steps, np.maximum(mean.values - std.values, 0.0))
    return _between(low, Series(mean.steps, mean.values + std.values), index)


def _between(low: Series, high: Series, index: int) -> list[Trace]:
    quiet = {"line": {"width": 0}, "showlegend": False, "hoverinfo": "skip", "mode": "lines"}
    red, green, blue = (int(colour(index)[start : start + 2], 16) for start in (1, 3, 5))
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.15)"}
    return [*trace(low, "", index, **quiet), *trace(high, "", index, **quiet, **fill)]


def _domains(logs: Sequence[RunLog]) -> Iterator[Chart]:
    parts = sorted({part for log in logs for part in domain_parts(log)})
    share = {"yaxis": {"rangemode": "tozero", "tickformat": ".0%"}}
    for part in parts:
        traces: list[Trace] = []
        for index, log in enumerate(logs):
            # The target on top: it is what the others scatter around.
            for kind, line in _SHARE_LINE.items():
                name = _label(logs, log, _SHARE_NAMES[kind])
                shown = _SHARE_COLOUR[kind] if len(logs) == 1 else index
                if len(logs) > 1 and kind == "prop":
                    line = {"dash": "dash", "width": 2}
                traces += trace(log.series.get(f"dataflex/{kind}_{part}"), name, shown, line=line)
        note = "" if part != parts[-1] else "Of the prompts: the target in force, those generated, those in the update."
        yield Chart("Domains", f"Share of {shown_domain(part)}", traces, share, note, small=True)
    rewards: list[Trace] = []
    for index, log in enumerate(logs):
        for number, part in enumerate(domain_parts(log)):
            name = _label(logs, log, shown_domain(part))
            rewards += trace(log.series.get(f"dataflex/reward_{part}"), name, number, line={"dash": dash(index)})
    yield Chart("Domains", "Reward by domain", rewards, {}, "All rollouts of a step.")


def _times(logs: Sequence[RunLog]) -> Iterator[Chart]:
    for log in logs:
        step = log.series.get("timing_s/step")
        if step is None:
            continue
        stack: list[Trace] = []
        rest = step.values.copy()
        for part in _PARTS:
            series = log.series.get(f"timing_s/{part}")
            if series is None or not np.array_equal(series.steps, step.steps):
                continue
            rest -= series.values
            stack += trace(series, part, len(stack), stackgroup="time", mode="lines", line={"width": 0.5})
        other = Series(step.steps, np.maximum(rest, 0.0))
        stack += trace(other, "other", 6, stackgroup="time", mode="lines", line={"width": 0.5}, opacity=0.5)
        ours = log.series.get("timing_s/dataflex")
        stack += trace(ours, "of it, hooks", 6, line={"dash": "dot", "width": 1.5})
        layout = {"yaxis": {"rangemode": "tozero", "ticksuffix": " s"}}
        note = "Validation comes on top. The hooks' time is inside the other parts."
        yield Chart("Time", _label(logs, log, "Where a step's time goes"), stack, layout, note)
