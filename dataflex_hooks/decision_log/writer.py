"""Writes a decision log: a file a step, merged now and then, never a step twice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataflex_hooks._version import __version__
from dataflex_hooks.decision_log import files
from dataflex_hooks.decision_log.files import LogFile
from dataflex_hooks.decision_log.schema import FACTS_KEY, STEPS_KEY, VERSION, Facts
from dataflex_hooks.whole_files import written_whole

ROWS_PER_FILE = 1 << 16
BYTES_PER_FILE = 1 << 26
STEPS_PER_FILE = 64
# Beyond this share of distinct values a dictionary costs more than it saves.
_DISTINCT = 0.4


class LogWriter:
    """Writes steps in rising order into a folder.

    The first step that it is given supersedes itself and all later ones in the folder: those of a run that went on
    beyond the checkpoint from which this one resumed, or of another run. They are set aside, not removed.

    Args:
        folder: made if it is not there.
        facts: stand in the metadata of every file.
        rows_per_file, bytes_per_file, steps_per_file: files of single steps are merged when they have so many together.
    """

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        rows_per_file: int = ROWS_PER_FILE,
        bytes_per_file: int = BYTES_PER_FILE,
        steps_per_file: int = STEPS_PER_FILE,
    ) -> None:
        self.folder, self.facts = folder, facts
        self._limits = (rows_per_file, bytes_per_file, steps_per_file)
        self._single: list[tuple[LogFile, int]] = []
        self._begun = False

    def write(self, step: int, tables: Sequence[Any], info: Mapping[str, Any]) -> Path:
        """Write one step.

        Args:
            step: global step, above that of the last call.
            tables: one an update, of one schema.
            info: what is known of the step as a whole, in plain values.

        Returns:
            The file; it is on the disk.
        """
        if not self._begun:
            self._begin(step)
        whole = pa.concat_tables(tables)
        path = self.folder / files.step_name(step)
        _write(path, whole, self.facts, [{"step": step, **info}])
        self._single.append((LogFile(path, step, step), whole.num_rows))
        if self._is_enough():
            self.merge()
        return path

    def merge(self) -> None:
        """Make one file out of those of single steps; a few large ones are left alone."""
        single, self._single = [file for file, _ in self._single], []
        if len(single) < max(2, self._limits[2] // 4):
            return
        parts = [pq.ParquetFile(file.path) for file in single]
        infos = [info for part in parts for info in _infos(part)]
        path = self.folder / files.merged_name(single[0].first, single[-1].last)
        _write(path, pa.concat_tables([part.read() for part in parts]), self.facts, infos)
        for file in single:
            file.path.unlink()

    def _is_enough(self) -> bool:
        rows, size, steps = self._limits
        written = sum(file.path.stat().st_size for file, _ in self._single)
        return sum(count for _, count in self._single) >= rows or written >= size or len(self._single) >= steps

    def _begin(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        later = [file for file in files.tidy(self.folder) if file.last >= step]
        for file in later:
            if file.first < step:
                _cut(file, step)
        files.set_aside(self.folder, later)
        self._begun = True


def _cut(file: LogFile, step: int) -> None:
    """Write the part of a file before ``step`` beside it."""
    part = pq.ParquetFile(file.path)
    before = part.read()
    before = before.filter(pc.less(before["step"], step))
    infos = [info for info in _infos(part) if info["step"] < step]
    facts = json.loads(part.metadata.metadata[FACTS_KEY])
    _write(file.path.with_name(files.merged_name(file.first, step - 1)), before, facts, infos)


def _infos(part: Any) -> list[dict[str, Any]]:
    infos: list[dict[str, Any]] = json.loads(part.metadata.metadata[STEPS_KEY])
    return infos


def _write(path: Path, table: Any, facts: Facts | Mapping[str, Any], infos: Sequence[Any]) -> None:
    """Write a table as a file that is there whole or not at all."""
    if isinstance(facts, Facts):
        facts = {"version": VERSION, "written_by": f"dataflex-verl {__version__}", **asdict(facts)}
    metadata = {FACTS_KEY: json.dumps(facts, default=str), STEPS_KEY: json.dumps(list(infos))}
    kind = table.schema.remove_metadata()
    coded = [field.name for field in kind if _repeats(table[field.name], field.type)]
    with written_whole(path, path.with_name(f".{path.name}.tmp")) as sink:
        with pq.ParquetWriter(
            sink, kind, compression="zstd", use_dictionary=coded, write_statistics=["step"], store_schema=False
        ) as writer:
            writer.write_table(table.replace_schema_metadata(None), row_group_size=ROWS_PER_FILE)
            writer.add_key_value_metadata(metadata)


def _repeats(values: Any, kind: Any) -> bool:
    if pa.types.is_list(kind):
        return True
    return bool(pc.count_distinct(values).as_py() <= _DISTINCT * len(values))
