"""Reads a decision log step by step, whatever state its folder was left in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dataflex_hooks.decision_log import files
from dataflex_hooks.decision_log.files import FOLDER, LogError, LogFile
from dataflex_hooks.decision_log.schema import FACTS_KEY, STEPS_KEY, VERSION, Facts

_SETTINGS = ("dataflex", "estimator", "coefficients", "rollouts", "seed", "domains", "fingerprint")
_CODED = ("uid", "domain", "state", "why")


@dataclass(frozen=True)
class LoggedStep:
    """One step of a log.

    Attributes:
        step: global step.
        table: its rows, all updates of it, as a ``pyarrow.Table``.
        info: what is known of the step as a whole.
    """

    step: int
    table: Any
    info: dict[str, Any]


@dataclass
class DecisionLog:
    """A folder of a decision log.

    Attributes:
        folder: where the files are.
        facts: of the run, from its last file.
        columns: names of the columns that every readable file has.
        damaged: what could not be read, and why, and where the run's settings changed; filled while files are opened.
    """

    folder: Path
    facts: Facts
    columns: frozenset[str]
    damaged: list[str] = field(default_factory=list)
    _files: list[LogFile] = field(default_factory=list)

    @classmethod
    def open(cls, source: Path) -> DecisionLog:
        """Open a folder, or a run's folder that has one named ``decisions``.

        Raises:
            LogError: there is no log, no file of it can be read, or a newer version wrote it.
        """
        folder = source if files.listing(source) or not (source / FOLDER).is_dir() else source / FOLDER
        found = files.listing(folder)
        if not found:
            raise LogError(
                f"{source}: no decision log here; one is a folder with files such as {files.step_name(1)}, which a run "
                f"with +dataflex.log_decisions=true writes"
            )
        damaged: list[str] = []
        changed: list[str] = []
        good: list[LogFile] = []
        facts: dict[str, Any] = {}
        columns: set[str] | None = None
        for file in found:
            try:
                before, opened = facts, pq.ParquetFile(file.path)
                facts = json.loads(opened.metadata.metadata[FACTS_KEY])
            except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
                damaged.append(f"{file.path.name} cannot be read and is left out ({_first_line(error)})")
                continue
            _check_version(file.path, facts)
            if before and (parts := [name for name in _SETTINGS if before.get(name) != facts.get(name)]):
                changed.append(f"from step {file.first} on the run had other settings ({', '.join(parts)})")
            there = set(opened.schema_arrow.names)
            columns = there if columns is None else columns & there
            good.append(file)
        if columns is None:
            raise LogError(f"{folder}: none of its files can be read: {'; '.join(damaged)}")
        if changed:
            changed.append("'run' stands for its settings at the end")
        return cls(folder, _facts(facts), frozenset(columns), [*changed, *damaged], good)

    def steps(self, columns: Sequence[str]) -> Iterator[LoggedStep]:
        """Yield the steps in order, each once.

        Args:
            columns: names to read; those that a file lacks are left out. ``step`` comes in any case.
        """
        seen: set[int] = set()
        for file in self._files:
            try:
                opened = pq.ParquetFile(file.path, read_dictionary=[name for name in _CODED if name in self.columns])
                infos = {info["step"]: info for info in json.loads(opened.metadata.metadata[STEPS_KEY])}
                names = [name for name in opened.schema_arrow.names if name in {*columns, "step"}]
                groups = [opened.read_row_group(group, columns=names) for group in range(opened.num_row_groups)]
            except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                note = f"{file.path.name} cannot be read and is left out ({_first_line(error)})"
                self.damaged += [] if note in self.damaged else [note]
                continue
            # A step may begin in one row group and end in the next.
            yield from _by_step(groups[0] if len(groups) == 1 else pa.concat_tables(groups), infos, seen)


def _by_step(table: Any, infos: dict[int, dict[str, Any]], seen: set[int]) -> Iterator[LoggedStep]:
    steps = table["step"].to_numpy()
    start = 0
    while start < len(steps):
        step = int(steps[start])
        end = int(steps.searchsorted(step, side="right"))
        if step not in seen:
            seen.add(step)
            yield LoggedStep(step, table.slice(start, end - start), infos.get(step, {}))
        start = end


def _check_version(path: Path, facts: dict[str, Any]) -> None:
    if int(facts.get("version", 0)) > VERSION:
        raise LogError(
            f"{path}: a decision log of version {facts['version']}, written by {facts.get('written_by')}; this one "
            f"reads up to version {VERSION}: install the newer one"
        )


def _facts(given: dict[str, Any]) -> Facts:
    known = {part.name: given[part.name] for part in fields(Facts) if part.name in given}
    for name in ("plan", "domains"):
        known[name] = tuple(known.get(name) or ())
    return Facts(**known)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
