"""The files of a decision log: which steps each holds, and how the folder stays whole whenever the process is killed.

A step is written as a file of its own, ``step-00000012.parquet``, under another name first, and renamed when all of it
is on the disk. From time to time such files are merged into ``steps-00000001-00000050.parquet``. A name says all steps
that a file may hold, so it is clear what is there twice after a kill between a merge and the removal of what was
merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dataflex_hooks.errors import DataFlexError
from dataflex_hooks.whole_files import sync

FOLDER = "decisions"
"""Name of a log's folder below ``trainer.default_local_dir``."""
SUFFIX = ".parquet"
SUPERSEDED = "_superseded"
"""What is in folders with _ in front is no part of the log: pandas and pyarrow, which look into folders, skip them."""
_NAME = re.compile(r"step(?:s-(\d+))?-(\d+)\.parquet")


class LogError(DataFlexError):
    """A log that cannot be read: none there, damaged, or of a newer version."""


@dataclass(frozen=True)
class LogFile:
    """A file and the steps that it may hold, ``first`` to ``last``."""

    path: Path
    first: int
    last: int

    @property
    def merged(self) -> bool:
        """Whether it was made out of several."""
        return self.path.name.startswith("steps-")


def step_name(step: int) -> str:
    """Name of the file of one step."""
    return f"step-{step:08d}{SUFFIX}"


def state_folder(folder: Path, step: int) -> Path:
    """Where a log keeps the state of the plugins with which a run went on after ``step``."""
    return folder / f"_state_{step}"


def merged_name(first: int, last: int) -> str:
    """Name of a file of several steps."""
    return f"steps-{first:08d}-{last:08d}{SUFFIX}"


def listing(folder: Path) -> list[LogFile]:
    """The files of a log in order of their steps; of two that begin with the same step the longer one first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            last = int(match[2])
            found.append(LogFile(path, int(match[1] or last), last))
    return sorted(found, key=lambda file: (file.first, -file.last))


def tidy(folder: Path) -> list[LogFile]:
    """Remove what a kill left behind: unfinished files, and files that have been merged; return the others."""
    for path in folder.glob(f".*{SUFFIX}.tmp"):
        path.unlink(missing_ok=True)
    kept: list[LogFile] = []
    for file in listing(folder):
        # A merged file inside another is what was cut off that one before it could be set aside.
        if any(other.merged and other.first <= file.first and file.last <= other.last for other in kept):
            file.path.unlink(missing_ok=True)
        else:
            kept.append(file)
    return kept


def set_aside(folder: Path, files: Iterable[LogFile]) -> None:
    """Move files into ``_superseded/1``, ``_superseded/2``, ...: each time into a new one."""
    files = list(files)
    if not files:
        return
    place = folder / SUPERSEDED
    place.mkdir(exist_ok=True)
    number = 1 + max((int(path.name) for path in place.iterdir() if path.name.isdecimal()), default=0)
    target = place / str(number)
    target.mkdir()
    for file in files:
        file.path.replace(target / file.path.name)
    sync(folder)
