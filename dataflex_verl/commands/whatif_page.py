"""The page of ``dataflex whatif --page``: one HTML file without scripts, readable offline and on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dataflex_verl.commands.whatif_text import MEASURES, number

# Okabe and Ito: told apart by colour-blind readers too.
COLOURS = ("#0072b2", "#d55e00")
_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 180, 46, 22
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } svg { width: 100%; height: auto; }
.note { background: #fff6df; padding: .5rem .8rem; } .key { margin-right: 1.2rem; }
"""
_CURVES = (
    ("Share of rollouts trained on", "trained_frac"),
    ("Reward of the rollouts trained on", "reward_trained"),
    ("Effective sample share: 1 when all weigh alike", "ess_frac"),
)


def page(data: Mapping[str, Any]) -> str:
    """Lay out what ``--json`` prints as HTML."""
    strategies = data["strategies"]
    names = [strategy["name"] for strategy in strategies]
    parts = [
        f"<p>{data['rollouts']} rollouts in {data['steps']} steps of {escape(data['source'])}</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in data["notes"]),
        _keys(names),
        _table(["rollouts", *names], [[title, *(s[key] for s in strategies)] for title, key in MEASURES]),
    ]
    reasons = list(dict.fromkeys(reason for strategy in strategies for reason in strategy["reasons"]))
    if reasons:
        rows = [[reason, *(s["reasons"].get(reason) for s in strategies)] for reason in reasons]
        parts += ["<h2>Not kept by</h2>", _table(["plugin and reason", *names], rows)]
    for title, key in _CURVES:
        parts += [
            f"<h2>{escape(title)}</h2>",
            _lines([[(s["step"], s[key]) for s in one["steps"]] for one in strategies]),
        ]
    parts += _domains(strategies, names) + _proportions(strategies)
    if data["difference"]:
        parts += _difference(data["difference"], names)
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>What if: {escape(' and '.join(names))}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>What if: {escape(' and '.join(names))}</h1>\n{body}\n</body></html>\n"
    )


def _keys(names: Sequence[str]) -> str:
    keys = (
        f'<span class="key"><svg style="width:1em;height:1em" viewBox="0 0 10 10"><rect width="10" height="10" '
        f'fill="{colour}"/></svg> {escape(name)}</span>'
        for name, colour in zip(names, COLOURS, strict=False)
    )
    return f"<p>{''.join(keys)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        return escape(value if isinstance(value, str) else number(value))

    heads = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _lines(series: Sequence[Sequence[tuple[int, float | None]]]) -> str:
    """A line a strategy over the steps; steps without a value are gaps."""
    points = [(step, value) for line in series for step, value in line if value is not None]
    if not points:
        return "<p>Nothing to show.</p>"
    low, high = min(0.0, *(value for _, value in points)), max(value for _, value in points) or 1.0
    first, last = min(step for step, _ in points), max(step for step, _ in points)

    def x(step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - 8) * (step - first) / max(1, last - first)

    def y(value: float) -> float:
        return 8 + (_HEIGHT - _BELOW - 8) * (high - value) / (high - low or 1.0)

    drawn = []
    for line, colour in zip(series, COLOURS, strict=False):
        for run in _unbroken(line):
            path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)
            drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            if len(run) == 1:
                drawn.append(f'<circle cx="{x(run[0][0]):.1f}" cy="{y(run[0][1]):.1f}" r="3" fill="{colour}"/>')
    marks = "".join(
        f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end" font-size="11">{number(value)}</text>'
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
        for value in (low, high)
    )
    ends = "".join(
        f'<text x="{x(step):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}" font-size="11">step {step}</text>'
        for step, anchor in ((first, "start"), (last, "end"))
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{marks}{ends}{"".join(drawn)}</svg>'


def _unbroken(line: Sequence[tuple[int, float | None]]) -> list[list[tuple[int, float]]]:
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in line:
        if value is None or (runs[-1] and step != runs[-1][-1][0] + 1):
            runs.append([])
        if value is not None:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _domains(strategies: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    first = strategies[0]["domains"]
    if not first:
        return []
    rows = [
        [
            name,
            total["rollouts"],
            total["reward_all"],
            *(s["domains"].get(name, {}).get("trained_frac") for s in strategies),
        ]
        for name, total in first.items()
    ]
    head = ["domain", "rollouts", "reward", *(f"{name}: share trained on" for name in names)]
    return ["<h2>Domains</h2>", _table(head, rows)]


def _proportions(strategies: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = []
    for strategy in strategies:
        if strategy["proposed"]:
            last = strategy["proposed"][-1]
            rows = [[name, share] for name, share in last.items() if name != "step"]
            title = f"Proportions that {strategy['name']} decided on, last after step {last['step']}"
            parts += [f"<h2>{escape(title)}</h2>", _table(["domain", "share"], rows)]
    return parts


def _difference(difference: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    first, second = names
    rows = [
        ["trained on by both", difference["trained_by_both"]],
        ["by neither", difference["trained_by_neither"]],
        [f"by {first} only", difference["trained_by_first_only"]],
        [f"by {second} only", difference["trained_by_second_only"]],
        ["share on which they agree", difference["agreement"]],
        ["mean difference of weights", difference["weight_gap_mean"]],
        ["same decision and weight, bit for bit", difference["identical"]],
    ]
    parts = ["<h2>Where they differ</h2>", _table(["rollouts", ""], rows)]
    if difference["prompts"]:
        keys = ("uid", "step", "domain", "rollouts", "reward", "first", "second")
        prompts = [
            [prompt[key] if prompt[key] is not None else "-" for key in keys] for prompt in difference["prompts"]
        ]
        head = ["prompt", "step", "domain", "rollouts", "reward", *(f"{name} trains on" for name in names)]
        parts += ["<h2>Prompts that they disagree on most</h2>", _table(head, prompts)]
    return parts
