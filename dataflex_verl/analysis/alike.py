"""Runs of a comparison that were not what the others were; they are left out, and it is said why."""

from __future__ import annotations

from dataclasses import replace

from dataflex_verl.analysis.outcomes import RunOutcome


def planned_alike(runs: list[RunOutcome]) -> list[RunOutcome]:
    """Leave out arms whose runs, by the plan files that they left, were not the same thing under every seed."""
    plans: dict[str, dict[tuple[str, ...], list[int]]] = {}
    for run in runs:
        if run.state == "finished" and run.log is not None:
            plans.setdefault(run.arm, {}).setdefault(run.log.plan, []).append(run.seed)
    for arm, found in plans.items():
        if len(found) > 1:
            groups = " and ".join(f"seed {', '.join(map(str, seeds))}" for seeds in found.values())
            reason = f"the arm's runs followed different plans ({groups}); see their .plan.json files"
            runs = [_left_out(run, reason) if run.arm == arm and run.state == "finished" else run for run in runs]
    return runs


def measured_alike(runs: list[RunOutcome]) -> list[RunOutcome]:
    """Leave out runs that validated something else than most: other domains, or another number of samples."""
    counted: dict[tuple[str, ...], int] = {}
    for run in runs:
        if run.state == "finished" and run.measured:
            counted[run.measured] = counted.get(run.measured, 0) + 1
    if len(counted) < 2:
        return runs
    usual = max(counted, key=lambda measured: counted[measured])
    checked = []
    for run in runs:
        if run.state == "finished" and run.measured and run.measured != usual:
            other = sorted(set(run.measured) ^ set(usual))
            run = _left_out(run, f"validated otherwise than the others: {', '.join(other[:4])}")
        checked.append(run)
    return checked


def _left_out(run: RunOutcome, reason: str) -> RunOutcome:
    return replace(run, state="left out", reason=reason, values={}, measured=())
