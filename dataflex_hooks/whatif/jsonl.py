"""verl's own dumps, ``trainer.rollout_data_dir``, as a source: texts and scores, one file a step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dataflex_hooks.decision_log.files import LogError
from dataflex_hooks.decision_log.schema import Facts
from dataflex_hooks.errors import DataFlexError
from dataflex_hooks.row_keys import parse_keys
from dataflex_hooks.whatif.logged_batch import LoggedRows
from dataflex_hooks.whatif.steps import LoggedUpdate, ReplayStep

_NEEDED = ("uid", "input", "output", "score")


class JsonlSource:
    """A folder of ``<step>.jsonl`` files; see :class:`~dataflex_hooks.whatif.steps.Source`.

    A dump has prompt, response, score and the row's key, and neither lengths, advantages, domains nor what the run
    decided. Ties are broken by hashes of texts, which is another order than that of a run's tokens.

    Raises:
        LogError: there is no such file, or none that can be read.
    """

    def __init__(self, folder: Path, coefficients: str = "token") -> None:
        self.path = folder
        self.notes: list[str] = []
        found = [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()] if folder.is_dir() else []
        self._files = sorted(found, key=lambda path: int(path.stem))
        if not self._files:
            raise LogError(f"{folder}: no dump of verl's here; one is a folder with files such as 1.jsonl")
        self.has = frozenset({"rm_scores", "response_mask", "prompts", "responses"})
        self.facts = Facts(rollouts=self._rollouts(), coefficients={"kind": coefficients})

    def _rollouts(self) -> int | None:
        """Rollouts of a prompt: the most that one has in the first step that can be read."""
        for step in self.steps():
            uid = step.updates[0].rows.uid
            return int(np.bincount(uid).max(initial=0)) or None
        raise LogError(f"{self.path}: {'; '.join(self.notes)}")

    def steps(self, tokens: bool = False) -> Iterator[ReplayStep]:
        """Yield the steps in order; a file that cannot be read whole is left out and noted."""
        before: int | None = None
        for path in self._files:
            step = int(path.stem)
            try:
                rows = _read(path)
            except _Unreadable as error:
                self._note(f"{path.name} is left out: {error}")
                continue
            if before is not None and step > before + 1:
                self._note(f"between step {before} and step {step} there is nothing: what plugins remember has a gap")
            before = step
            yield ReplayStep(step, (LoggedUpdate(0, rows, None, np.zeros(len(rows), dtype=bool)),), {})

    def domain_counts(self) -> dict[str, int]:
        """Nothing: a dump names no domains."""
        return {}

    def _note(self, text: str) -> None:
        self.notes += [] if text in self.notes else [text]


class _Unreadable(DataFlexError):
    """A dump that cannot be read whole."""


def _read(path: Path) -> LoggedRows:
    # Not splitlines: verl writes responses as they are, and they may hold what it takes for a line end, as U+2028.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = [_record(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise _Unreadable("it is empty")
    try:
        keys = parse_keys([str(record["uid"]) for record in records])
    except ValueError as error:
        raise _Unreadable(str(error)) from None
    names, code = np.unique(keys.uid, return_inverse=True)
    scores = np.array([float(record["score"]) for record in records], dtype=np.float32)
    return LoggedRows(
        uid=code.reshape(-1).astype(np.int64),
        uid_names=names,
        session=keys.session_number,
        output=keys.output_index,
        reward=scores,
        prompt_hash=_hashes([record["input"] for record in records]),
        response_hash=_hashes([record["output"] for record in records]),
    )


def _record(line: str, number: int) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        raise _Unreadable(f"line {number} is cut off or no JSON") from None
    lacking = [name for name in _NEEDED if not isinstance(record, dict) or name not in record]
    if lacking:
        raise _Unreadable(f"line {number} lacks {', '.join(lacking)}")
    if isinstance(record["score"], bool) or not isinstance(record["score"], (int, float)):
        raise _Unreadable(f"the score in line {number} is no number")
    known: Mapping[str, Any] = record
    return known


def _hashes(texts: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    known: dict[str, int] = {}
    for text in texts:
        if text not in known:
            digest = hashlib.blake2b(str(text).encode("utf-8", "surrogatepass"), digest_size=8).digest()
            known[text] = int.from_bytes(digest, "little", signed=True)
    return np.array([known[text] for text in texts], dtype=np.int64)
