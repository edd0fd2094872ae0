"""What collected runs recorded of themselves, and whether it makes them comparable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflex_verl.analysis.conditions import Conditions, SettingDifference
from dataflex_verl.analysis.records import METRICS_FILE
from dataflex_verl.commands.compare_run import STARTED, read_json
from dataflex_verl.commands.compare_settings import (
    BUDGET,
    VALIDATION,
    VERLS,
    canonical,
    other_overrides,
    values_of,
)
from dataflex_verl.commands.demo_plan import BadOption

_BATCH, _ROLLOUTS, _, _FILTERED = BUDGET
_TRAINING = "data.train_files"
_IN_PLAN = "verl settings that matter: "

Run = tuple[str, int]
"""Arm and seed."""


@dataclass(frozen=True)
class RunRecord:
    """What a run left beside its metrics.

    Attributes:
        overrides: those that it was started with, None where that is not recorded; all else is verl's default.
        settings: values as text, of the overrides or as far as known without them.
        versions: of packages, and of this package's code; None where not recorded.
        inputs: hashes of files that it read, by setting and file; None where not recorded.
    """

    overrides: tuple[str, ...] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] | None = None
    inputs: Mapping[str, str] | None = None

    def value(self, setting: str) -> str | None:
        """The value of a setting, None where it is not known."""
        return self.settings.get(setting, None if self.overrides is None else VERLS)


def read_record(folder: Path) -> RunRecord:
    """Read what ``dataflex compare`` noted as it started the run, else what Hydra or our trainer left there."""
    started = read_json(folder / STARTED) or {}
    overrides = started.get("overrides", _of_hydra(folder))
    versions, inputs = (_object(started.get(name)) for name in ("versions", "inputs"))
    if not isinstance(overrides, list):
        return RunRecord(settings=_of_plan(folder), versions=versions, inputs=inputs)
    given = tuple(str(text) for text in overrides)
    return RunRecord(given, values_of(given), versions, inputs)


def check_unplanned(records: Mapping[Run, RunRecord]) -> None:
    """Refuse runs of which their own records say that they cannot be compared.

    Raises:
        BadOption: their budgets differ, or what they were measured by; names the setting, the values and the runs.
    """
    for is_budget, name, values in _unlike_settings(records):
        # verl's default may be just what others have written out: that is warned of.
        explicit = {run: value for run, value in values.items() if value != VERLS}
        if _are_several(explicit.values()):
            alike = "generate the same number of rollouts" if is_budget else "are measured alike"
            raise BadOption(f"--collect: {_spread(name, explicit)}; accepted: runs that {alike}")
    for name, values in _unlike_inputs(records, VALIDATION):
        raise BadOption(f"--collect: {_spread(f'contents of {name}', values)}; accepted: runs that are measured alike")


def conditions_of(
    records: Mapping[Run, RunRecord],
    arms: Sequence[str],
    planned: Mapping[str, Sequence[str]],
    differs: Mapping[str, tuple[SettingDifference, ...]] | None = None,
) -> Conditions:
    """What the records say of how alike runs were, and what they do not say.

    Args:
        records: of the runs that count.
        arms: the baseline first.
        planned: overrides by arm of the plan that the runs follow; empty without one.
        differs: by arm, as the plan has it; None to find it out.
    """
    if differs is None:
        differs = {arm: _other_settings(records, arms[0], arm, planned) for arm in arms[1:]}
    warnings = []
    for is_budget, name, values in _unlike_settings(records):
        warnings.append(f"perhaps {'unequal budgets' if is_budget else 'not measured alike'}: {_spread(name, values)}")
    warnings += _unlike_versions(records)
    for name, values in _unlike_inputs(records, (_TRAINING, *VALIDATION)):
        warnings.append(f"other data: {_spread(f'contents of {name}', values)}")
    return Conditions(differs, tuple(warnings), tuple(_unchecked(records, bool(planned))))


def versions_of(records: Mapping[Run, RunRecord]) -> dict[str, str]:
    """The versions that all runs have, empty where one has others or recorded none."""
    found = [record.versions for record in records.values()]
    return dict(found[0]) if found and found[0] and all(one == found[0] for one in found) else {}


def rollouts_recorded(records: Mapping[Run, RunRecord], steps: int) -> int | None:
    """How many rollouts every run generated for training, None where their records leave that open."""
    found = {(record.value(_BATCH), record.value(_ROLLOUTS), record.value(_FILTERED)) for record in records.values()}
    if len(found) != 1:
        return None
    ((batch, rollouts, filtered),) = found
    if batch is None or rollouts is None or filtered not in (VERLS, "False", "false"):
        return None
    return steps * int(batch) * int(rollouts) if batch.isdecimal() and rollouts.isdecimal() else None


def _unlike_settings(records: Mapping[Run, RunRecord]) -> Iterator[tuple[bool, str, dict[Run, str]]]:
    """Settings of BUDGET over all runs and of VALIDATION over those of a seed that have several known values."""
    for setting in BUDGET:
        yield from ((True, setting, values) for values in _several(records, setting))
    for of_seed in _by_seed(records):
        names = sorted({name for record in of_seed.values() for name in record.settings})
        for name in (name for name in names if _is_in(VALIDATION, name)):
            yield from ((False, name, values) for values in _several(of_seed, name))


def _several(records: Mapping[Run, RunRecord], name: str) -> Iterator[dict[Run, str]]:
    values = {run: value for run, record in records.items() if (value := record.value(name)) is not None}
    if _are_several(values.values()):
        yield values


def _are_several(values: Iterable[str]) -> bool:
    return len({canonical(value) for value in values}) > 1


def _is_in(settings: Sequence[str], name: str) -> bool:
    return any(name == setting or name.startswith(f"{setting}.") for setting in settings)


def _unlike_versions(records: Mapping[Run, RunRecord]) -> Iterator[str]:
    versions = {run: record.versions for run, record in records.items() if record.versions is not None}
    for name in sorted({name for found in versions.values() for name in found}):
        values = {run: found.get(name, "not there") for run, found in versions.items()}
        if len(set(values.values())) > 1:
            yield f"other versions: {_spread('this code' if name == 'code' else name, values)}"


def _unlike_inputs(records: Mapping[Run, RunRecord], settings: Sequence[str]) -> Iterator[tuple[str, dict[Run, str]]]:
    """Files below settings whose contents are not the same in all runs of a seed, and the hash in each."""
    for of_seed in _by_seed(records):
        inputs = {run: record.inputs for run, record in of_seed.items() if record.inputs is not None}
        names = sorted({name for found in inputs.values() for name in found})
        for name in (name for name in names if _is_in(settings, name.split(":")[0])):
            values = {run: found.get(name, "not there") for run, found in inputs.items()}
            if len(set(values.values())) > 1:
                yield name, values


def _other_settings(
    records: Mapping[Run, RunRecord], baseline: str, arm: str, planned: Mapping[str, Sequence[str]]
) -> tuple[SettingDifference, ...]:
    pairs = []
    for of_seed in _by_seed(records):
        found = {run[0]: record.overrides for run, record in of_seed.items()}
        base, given = found.get(baseline), found.get(arm)
        if base is not None and given is not None:
            pairs.append((base, given))
    pairs = pairs or [(tuple(planned.get(baseline, ())), tuple(planned.get(arm, ())))]
    different: dict[str, SettingDifference] = {}
    for base, given in reversed(pairs):
        different |= {one.setting: one for one in other_overrides(base, given)}
    return tuple(different[setting] for setting in sorted(different))


def _unchecked(records: Mapping[Run, RunRecord], planned: bool) -> Iterator[str]:
    settings = "that they have the plan's settings" if planned else "batch size, rollouts a prompt and validation"
    lacking = {
        settings: [run for run, record in records.items() if record.overrides is None],
        "versions of verl and of this package": [run for run, record in records.items() if not record.versions],
        "the contents of training and validation data": [run for run, record in records.items() if not record.inputs],
    }
    by_runs: dict[tuple[Run, ...], list[str]] = {}
    for what, runs in lacking.items():
        if runs:
            by_runs.setdefault(tuple(runs), []).append(what)
    for runs, whats in by_runs.items():
        which = "by any run" if len(runs) == len(records) else f"by {_named(runs)}"
        yield f"not recorded {which}, and so not checked to be equal: {', '.join(whats)}"


def _by_seed(records: Mapping[Run, RunRecord]) -> list[dict[Run, RunRecord]]:
    seeds = dict.fromkeys(seed for _, seed in records)
    return [{run: record for run, record in records.items() if run[1] == seed} for seed in seeds]


def _spread(what: str, values: Mapping[Run, str | None]) -> str:
    runs: dict[str, list[Run]] = {}
    for run, value in values.items():
        runs.setdefault(str(value), []).append(run)
    return f"{what} is " + " and ".join(f"{value} in {_named(found)}" for value, found in runs.items())


def _named(runs: Iterable[Run]) -> str:
    seeds: dict[str, list[str]] = {}
    for arm, seed in runs:
        seeds.setdefault(arm, []).append(str(seed))
    return ", ".join(f"{arm} (seed {', '.join(found)})" for arm, found in seeds.items())


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _of_hydra(folder: Path) -> Any:
    """The overrides of the last run whose working directory this was."""
    # It comes with Hydra, and is wanted only here.
    import yaml

    files = [*folder.glob(".hydra/overrides.yaml"), *folder.glob("outputs/*/*/.hydra/overrides.yaml")]
    if not files:
        return None
    try:
        return yaml.safe_load(max(files, key=lambda path: path.stat().st_mtime).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _of_plan(folder: Path) -> dict[str, str]:
    """Settings in the plan that our trainer leaves beside the metrics."""
    try:
        lines = json.loads((folder / METRICS_FILE).with_suffix(".plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    named = [str(line).partition(_IN_PLAN)[2] for line in lines] if isinstance(lines, list) else []
    return values_of([text for line in named for text in line.split(", ") if "=" in text])
