"""Logged steps as arrays: what replaying them and comparing what was decided needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dataflex_hooks.decision_log.schema import Facts
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, ROW_COLUMN
from dataflex_hooks.whatif.logged_batch import Array, LoggedRows

if TYPE_CHECKING:
    from dataflex_hooks.decision_log.reader import DecisionLog, LoggedStep

TOKENS = ("response_mask", "advantages", "old_log_probs", "entropy")
_ROWS = ("uid", "session", "output", "domain", "reward", "advantage", "abs_advantage", "response_tokens")
_MORE = ("valid_tokens", "loss_tokens", "prompt_hash", "response_hash", "dataset_row")
_DECIDED = ("update", "state", "weight", "skip_update", "why")


@dataclass(frozen=True)
class LoggedUpdate:
    """One update of a run.

    Attributes:
        update: its number within the step.
        rows: the rollouts, with the rewards that they came with.
        loss_tokens: (bs,) int64, valid tokens at the update; None where the log has no such column.
        has_advantage: (bs,) bool.
        evicted: rollouts that verl's filter evicted before, None without any.
        state: (bs,) int8 index into :data:`dataflex_hooks.decision_log.schema.STATES`; None where nothing was logged.
        weight: (bs,) float32, NaN where there was none; None likewise.
        skip_update: whether the run skipped the update.
        why: (bs,) int64 index into ``reasons``, -1 where every plugin kept the rollout; None likewise.
        tokens: values of tokens by field, and which rows have them.
    """

    update: int
    rows: LoggedRows
    loss_tokens: NDArray[np.int64] | None
    has_advantage: NDArray[np.bool_]
    evicted: LoggedRows | None = None
    state: NDArray[np.int8] | None = None
    weight: NDArray[np.float32] | None = None
    skip_update: bool = False
    why: NDArray[np.int64] | None = None
    reasons: Array = field(default_factory=lambda: np.zeros(0, dtype=object))
    tokens: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplayStep:
    """One step: its updates, and what is known of it as a whole (proportions in force, ...)."""

    step: int
    updates: tuple[LoggedUpdate, ...]
    info: Mapping[str, Any]


class Source(Protocol):
    """Where logged rollouts come from.

    Attributes:
        path: of the folder.
        facts: of the run.
        has: names of what there is, as plugins name fields.
        notes: what a reader has to know: gaps, files left out; complete after the last step.
    """

    path: Path
    facts: Facts
    has: frozenset[str]
    notes: list[str]

    def steps(self, tokens: bool = False) -> Iterator[ReplayStep]:
        """Yield the steps in order; with values of tokens if asked for."""

    def domain_counts(self) -> dict[str, int]:
        """Count the rollouts of each domain."""


class LogSource:
    """Our own decision log; see :class:`Source`."""

    def __init__(self, log: DecisionLog) -> None:
        self.path, self.facts, self.log = log.folder, log.facts, log
        self.notes: list[str] = log.damaged
        columns = log.columns
        self._signals = tuple(sorted(name for name in columns if name.startswith("signal_")))
        has = {"rm_scores", "response_mask", "prompts", "responses", DOMAIN_COLUMN, "domain", ROW_COLUMN, "advantages"}
        has |= {"extra_fields"} if self._signals else set()
        self.has = frozenset(has | (columns & {"old_log_probs", "entropy"}))

    def steps(self, tokens: bool = False) -> Iterator[ReplayStep]:
        """Yield the steps in order."""
        wanted = (*_ROWS, *_MORE, *_DECIDED, *self._signals, *(TOKENS if tokens else ()))
        before: int | None = None
        for logged in self.log.steps(wanted):
            if before is not None and logged.step > before + 1:
                gap = f"{before + 1}" if logged.step == before + 2 else f"{before + 1} to {logged.step - 1}"
                note = f"step {gap} missing in the log: what plugins remember of it is missing too"
                self.notes += [] if note in self.notes else [note]
            before = logged.step
            yield _read(logged, self._signals)

    def domain_counts(self) -> dict[str, int]:
        """Count the rollouts of each domain."""
        counts: dict[str, int] = {}
        for logged in self.log.steps(("domain",)):
            code, names = coded(logged.table["domain"])
            for index, count in enumerate(np.bincount(code[code >= 0], minlength=len(names)).tolist()):
                counts[str(names[index])] = counts.get(str(names[index]), 0) + count
        return {name: count for name, count in sorted(counts.items()) if count}


def _read(logged: LoggedStep, signals: Sequence[str]) -> ReplayStep:
    table = logged.table
    update = numbers(table, "update")
    code, names = coded(table["state"])
    known = np.array([STATE_CODE.get(str(name), -1) for name in names], dtype=np.int8)
    state = known[code]
    rows = _rows(table, signals)
    why, reasons = coded(table["why"])
    loss = numbers(table, "loss_tokens")
    advantage = rows.abs_advantage if rows.abs_advantage is not None else np.full(len(rows), np.nan, dtype=np.float32)
    weight, skipped = numbers(table, "weight"), numbers(table, "skip_update")
    tokens = {name: table[name].combine_chunks() for name in TOKENS if name in table.column_names}
    updates = []
    for number in range(int(update.max(initial=0)) + 1):
        mine = np.flatnonzero((update == number) & (state <= _LAST_OF_ROLLOUT))
        out = np.flatnonzero((update == number) & (state == STATE_CODE["evicted"]))
        # Mostly all rows are of one update, and then nothing needs to be copied.
        whole = len(mine) == len(state)
        part: Any = slice(None) if whole else mine
        updates.append(
            LoggedUpdate(
                update=number,
                rows=rows if whole else rows.take(mine),
                loss_tokens=np.where(np.isnan(loss), -1, loss).astype(np.int64)[part],
                has_advantage=~np.isnan(advantage)[part],
                evicted=rows.take(out) if len(out) else None,
                state=state[part],
                weight=weight[part].astype(np.float32),
                skip_update=bool(skipped[part].any()),
                why=why[part],
                reasons=reasons,
                tokens={name: values if whole else values.take(_indices(mine)) for name, values in tokens.items()},
            )
        )
    return ReplayStep(logged.step, tuple(updates), logged.info)


STATE_CODE: Mapping[str, int] = {"trained": 0, "masked": 1, "dropped": 2, "evicted": 3, "added": 4}
_LAST_OF_ROLLOUT = STATE_CODE["dropped"]


def _rows(table: Any, signals: Sequence[str]) -> LoggedRows:
    code, names = coded(table["uid"])
    order = np.argsort(names.astype(str), kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    columns: dict[str, Array] = {}
    domain, domains = coded(table["domain"])
    if len(domain) and (domain >= 0).all():
        columns[DOMAIN_COLUMN] = columns["domain"] = domains[domain]
    if table["dataset_row"].null_count == 0:
        columns[ROW_COLUMN] = table["dataset_row"].to_numpy()
    without = table["response_hash"].null_count > 0
    return LoggedRows(
        uid=rank[code],
        uid_names=names[order],
        session=numbers(table, "session").astype(np.int64),
        output=numbers(table, "output").astype(np.int64),
        reward=numbers(table, "reward").astype(np.float32),
        lengths=_whole(table, "response_tokens"),
        valid=_whole(table, "valid_tokens"),
        advantage=_floats(table, "advantage"),
        abs_advantage=_floats(table, "abs_advantage"),
        prompt_hash=None if without else table["prompt_hash"].to_numpy(),
        response_hash=None if without else table["response_hash"].to_numpy(),
        columns=columns,
        domain_code=domain if columns.get(DOMAIN_COLUMN) is not None else None,
        domain_names=domains,
        signals={name.removeprefix("signal_"): numbers(table, name) for name in signals if name in table.column_names},
    )


def token_fields(update: LoggedUpdate, rows: NDArray[np.int64]) -> dict[str, Any]:
    """Jagged values of tokens of some rows, as far as all of them have them."""
    fields: dict[str, Any] = {}
    for name, values in update.tokens.items():
        part = values.take(_indices(rows))
        if part.null_count or not len(part):
            continue
        array = np.array(part.flatten().to_numpy(zero_copy_only=False))
        fields[name] = torch.from_numpy(array.astype(np.int64) if name == "response_mask" else array)
    return fields


def coded(column: Any) -> tuple[NDArray[np.int64], Array]:
    """A text column as (n,) indices, -1 for null, and the (k,) texts, as objects."""
    whole = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if hasattr(whole, "chunks"):
        whole = whole.unify_dictionaries().combine_chunks()
    if not hasattr(whole, "dictionary"):
        whole = whole.dictionary_encode()
    code = whole.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return code, np.array([*whole.dictionary.to_pylist(), None], dtype=object)[:-1]


def numbers(table: Any, name: str) -> Array:
    """A column of numbers; NaN for null."""
    values: Array = table[name].to_numpy()
    return values


def _floats(table: Any, name: str) -> Any:
    return numbers(table, name).astype(np.float32)


def _whole(table: Any, name: str) -> NDArray[np.int64] | None:
    column = table[name]
    return column.fill_null(0).to_numpy().astype(np.int64) if column.null_count < len(column) else None


def _indices(rows: NDArray[np.int64]) -> Any:
    import pyarrow as pa

    return pa.array(rows)
