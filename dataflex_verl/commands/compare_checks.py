"""Everything that can be refused before a comparison starts, and the code of plugins that its arms use."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflex_verl.commands.compare_design import Design
from dataflex_verl.commands.compare_jobs import SHORT, Job, rollouts_of
from dataflex_verl.commands.compare_settings import other_settings, refuse_unequal
from dataflex_verl.commands.demo_plan import BadOption
from dataflex_verl.commands.hydra_config import CommandLine

if TYPE_CHECKING:
    from dataflex_hooks import HookManager
    from dataflex_verl.analysis.conditions import SettingDifference

_OURS = ("dataflex_hooks", "dataflex_verl")


@dataclass(frozen=True)
class CheckedJobs:
    """Runs that may start.

    Attributes:
        jobs: with the code of the plugins among their inputs.
        rollouts: how many each of them generates for training; None where that depends on what is filtered out.
        differs: by arm, what it has otherwise than the baseline outside ``dataflex``.
    """

    jobs: list[Job]
    rollouts: int | None
    differs: Mapping[str, tuple[SettingDifference, ...]]


def check_jobs(design: Design, jobs: Sequence[Job]) -> CheckedJobs:
    """Compose and examine each arm's configuration, under the first seed.

    Raises:
        BadOption: an arm cannot run, or the arms differ in what has to be equal.
        VerlMissing: verl is not installed.
    """
    from dataflex_verl.commands.checks import refusal
    from dataflex_verl.commands.look import look_at_line
    from dataflex_verl.commands.train import add_local_overrides

    local = design.local or not design.own_task
    configs, code, refused = {}, {}, []
    for job in jobs:
        if job.seed != design.seeds[0]:
            continue
        line = CommandLine.parse(job.overrides)
        if local:
            line = line.with_overrides(add_local_overrides(line.overrides))
        checked = look_at_line(line, local)
        if checked.findings.problems or checked.composed is None:
            refused.append(f"arm {job.arm.name}: {refusal(checked.findings.problems)}")
            continue
        configs[job.arm.name] = checked.composed.config
        code[job.arm.name] = plugin_code(checked.findings.hooks)
    if refused:
        raise BadOption("\n".join(refused))
    refuse_unequal(configs)
    with_code = [replace(job, inputs={**job.inputs, **code[job.arm.name]}) for job in jobs]
    rollouts = rollouts_of(configs[design.arms[0].name], design.steps)
    return CheckedJobs(with_code, rollouts, other_settings(configs))


def plugin_code(hooks: HookManager | None) -> dict[str, str]:
    """A hash of the code of each package or module, beside this package, that the plugins come from."""
    found: dict[str, str] = {}
    for row in hooks.plan() if hooks is not None else ():
        for name in (row["plugin"], row["scorer"], row["actuator"]):
            for module in _modules(name):
                found[f"plugin code:{module}"] = _hash_of(module)
    return found


def _modules(name: Any) -> Iterator[str]:
    """Top modules that a component's name leads to, other than ours."""
    if not isinstance(name, str):
        return
    points = [EntryPoint("", name, "")] if ":" in name else list(entry_points(group="dataflex_hooks", name=name))
    for point in points:
        top = point.value.split(":")[0].split(".")[0]
        if top not in _OURS:
            yield top


def _hash_of(module: str) -> str:
    spec = find_spec(module)
    if spec is None:
        return "not found"
    places = list(spec.submodule_search_locations or ())
    files = [file for place in places for file in sorted(Path(place).rglob("*.py"))]
    if not places and spec.origin:
        files = [Path(spec.origin)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:SHORT]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities of a run, a line each."""
    lines = []
    old, new = before.get("overrides") or [], now["overrides"]
    lines += [f"was there, is not: {text}" for text in old if text not in new]
    lines += [f"was not there, is: {text}" for text in new if text not in old]
    if not lines and list(old) != list(new):
        lines.append("the order of the overrides")
    for part in ("versions", "inputs"):
        old_part, new_part = before.get(part) or {}, now[part]
        for name in sorted({*old_part, *new_part}):
            if old_part.get(name) != new_part.get(name):
                lines.append(f"{name}: was {old_part.get(name, 'absent')}, is {new_part.get(name, 'absent')}")
    return lines
