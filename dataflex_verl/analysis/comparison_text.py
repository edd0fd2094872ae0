"""A comparison as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dataflex_verl.analysis.comparison import Against, ArmResult, Comparison
from dataflex_verl.analysis.outcomes import REWARD
from dataflex_verl.analysis.verdicts import figure, verdict

GAP = "—"


def markdown(comparison: Comparison, versions: Mapping[str, str]) -> str:
    """The tables and sentences of a comparison."""
    return "\n".join(_lines(comparison, versions)) + "\n"


def _lines(comparison: Comparison, versions: Mapping[str, str]) -> Iterator[str]:
    seeds = ", ".join(map(str, comparison.seeds))
    budget = f"{comparison.steps} steps"
    if comparison.rollouts is not None:
        budget += f", {comparison.rollouts:,} generated rollouts"
    others = len(comparison.arms) - 1
    yield f"# {others} {'arm' if others == 1 else 'arms'} against {comparison.baseline}"
    yield ""
    yield f"Every run: {budget}. Seeds: {seeds}. Main outcome: {comparison.main}, after the last step."
    yield ""
    for arm in comparison.arms:
        yield f"- {verdict(comparison, arm)}"
    for note in comparison.notes:
        yield f"- {note}."
    for warning in comparison.warnings:
        yield f"- Warning: {warning}."
    yield ""
    yield from main_table(comparison)
    yield ""
    yield "Difference: mean of the paired differences, seed by seed, with its standard error. Interval: paired t, 95 %."
    yield "Adjusted p: Holm, over the arms. Detectable: true difference found four times in five at this spread,"
    yield "adjusted likewise."
    yield from _bootstraps(comparison)
    yield ""
    yield "## By outcome"
    yield ""
    yield "Mean difference and 95 % interval, not adjusted for the number of outcomes: to look at, not to test."
    yield f"The {REWARD}, is over the prompts that each arm trained on; a mixer changes which those are."
    yield ""
    yield from _table(*outcome_rows(comparison))
    yield ""
    yield "## Runs"
    yield ""
    yield from _table(*run_rows(comparison))
    yield ""
    yield "Tokens in updates: prompts and responses that reached the update; what a plugin drops is not among them."
    yield ""
    yield "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."


def main_table(comparison: Comparison) -> Iterator[str]:
    """The lines of the first table."""
    yield from _table(*main_rows(comparison))


def main_rows(comparison: Comparison) -> tuple[Sequence[str], list[list[str]]]:
    """Head and rows of the first table: each arm in the main outcome."""
    head = ("arm", "runs", "mean", "difference", "95 % interval", "adjusted p", "detectable")
    return head, [_main_row(comparison, arm) for arm in comparison.arms]


def _main_row(comparison: Comparison, arm: ArmResult) -> list[str]:
    mean = arm.means.get(comparison.main)
    start = [arm.name, f"{arm.runs} of {len(comparison.seeds)}", GAP if mean is None else figure(mean)]
    if arm.name == comparison.baseline:
        return [*start, "baseline", "", "", ""]
    against = arm.against[comparison.main]
    found = against.difference
    if found is None:
        return [*start, GAP, GAP, GAP, GAP]
    if found.exact:
        return [*start, "0 exactly", GAP, GAP, GAP]
    difference = figure(found.mean, "+") + (f" ± {figure(found.se)}" if found.se is not None else "")
    p = GAP if against.adjusted is None else f"{against.adjusted:.3f}"
    detectable = GAP if found.detectable is None else figure(found.detectable)
    return [*start, difference, interval(against), p, detectable]


def interval(against: Against) -> str:
    """The t interval of an arm in an outcome, or a gap."""
    found = against.difference
    return (
        GAP
        if found is None or found.low is None or found.high is None or found.exact
        else f"{figure(found.low, '+')} to {figure(found.high, '+')}"
    )


def _bootstraps(comparison: Comparison) -> Iterator[str]:
    for arm in comparison.arms[1:]:
        found = arm.against[comparison.main].difference
        if found is not None and (boot := found.bootstrap) is not None:
            yield (
                f"Bootstrap (BCa) for {arm.name}: {figure(boot.low, '+')} to {figure(boot.high, '+')}; such intervals "
                f"cover the true mean in {boot.coverage:.1%} of {boot.simulations:,} simulated samples of {found.n}."
            )


def outcome_rows(comparison: Comparison) -> tuple[Sequence[str], list[list[str]]]:
    """Head and rows: each arm in every outcome."""
    rows = []
    for arm in comparison.arms:
        row = [arm.name]
        for name in comparison.outcomes:
            mean = arm.means.get(name)
            text = GAP if mean is None else figure(mean)
            if arm.against and (found := arm.against[name].difference) is not None:
                spread = interval(arm.against[name])
                text += f" ({figure(found.mean, '+')}" + ("" if spread == GAP else f"; {spread}") + ")"
            row.append(text)
        rows.append(row)
    return ("arm", *comparison.outcomes), rows


def run_rows(comparison: Comparison) -> tuple[Sequence[str], list[list[str]]]:
    """Head and rows: every run, with what it took."""
    head = ("arm", "seed", "state", comparison.main, "tokens in updates", "steps' time", "whole run")
    rows = []
    for run in comparison.runs:
        value = run.values.get(comparison.main)
        rows.append(
            [
                run.arm,
                str(run.seed),
                f"{run.state}: {run.reason}" if run.reason else run.state,
                GAP if value is None else figure(value),
                GAP if run.tokens is None else f"{run.tokens:,.0f}",
                GAP if run.step_seconds is None else f"{run.step_seconds:.1f} s",
                GAP if run.seconds is None else f"{run.seconds:.1f} s",
            ]
        )
    return head, rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in row)} |"
