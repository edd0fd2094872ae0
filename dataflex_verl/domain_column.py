"""Which domain each dataset row belongs to, and which dataset it is."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks import ConfigError, Problem
from dataflex_hooks.errors import Described, did_you_mean

DEFAULT_KEYS = ("domain", "data_source")
_SAMPLED = 256


@dataclass(frozen=True)
class DomainRows:
    """Rows by domain.

    Attributes:
        key: the column that names the domains.
        domains: (K,) names.
        rows: per domain its dataset rows, ascending, int32 (int64 for 2**31 rows and more).
        left_out: rows of domains that were not listed.
        fingerprint: what the dataset is recognised by.
    """

    key: str
    domains: tuple[str, ...]
    rows: tuple[NDArray[Any], ...]
    left_out: int
    fingerprint: str


def read_domains(dataset: Any, key: str | None, listed: Sequence[str] | None) -> DomainRows:
    """Group the rows of a dataset by domain.

    Args:
        dataset: verl's training dataset; one with a ``dataframe`` is read by column, another row by row.
        key: ``dataflex.domain_key``; None takes ``domain``, or else ``data_source``.
        listed: ``dataflex.domains``; None takes all there are, sorted by name.

    Raises:
        ConfigError: no such column, rows without a domain, a listed domain without rows, a name listed twice.
    """
    columns = column_names(dataset)
    found = next((name for name in ([key] if key else DEFAULT_KEYS) if name in columns), None)
    if found is None:
        wanted = key or " or ".join(DEFAULT_KEYS)
        hint = did_you_mean(wanted, columns)
        given = Described(f"{wanted!r}, which the training data does not have")
        raise ConfigError([Problem("dataflex.domain_key", given, f"one of its columns: {', '.join(columns)}", hint)])
    names, code = encode(column(dataset, found))
    without = np.flatnonzero(code < 0)
    if len(without):
        given = Described(f"column {found!r}, empty in {len(without)} rows, first in row {without[0]}")
        raise ConfigError([Problem("dataflex.domain_key", given, "a column that names a domain in every row")])
    count = np.bincount(code, minlength=len(names))
    there = {name: index for index, name in enumerate(names)}
    present = sorted(name for name, index in there.items() if count[index])
    domains = tuple(present if listed is None else listed)
    problems = _list_problems(domains, present, found, listed is not None)
    if problems:
        raise ConfigError(problems)
    index_type = np.int32 if len(code) < 2**31 else np.int64
    order = np.argsort(code, kind="stable").astype(index_type)
    ends = np.cumsum(count)
    rows = tuple(order[ends[there[name]] - count[there[name]] : ends[there[name]]] for name in domains)
    if len(rows) < len(names):
        rows = tuple(part.copy() for part in rows)  # lets go of the rows that are left out
    left_out = len(code) - sum(len(part) for part in rows)
    return DomainRows(found, domains, rows, left_out, fingerprint(dataset, names, code))


def _list_problems(domains: Sequence[str], present: Sequence[str], key: str, is_listed: bool) -> list[Problem]:
    setting, there = "dataflex.domains", ", ".join(present) or "none"
    if not domains:
        given = [] if is_listed else Described(f"no domain in column {key!r}")
        return [Problem(setting, given, "at least one domain")]
    problems = []
    for name in dict.fromkeys(domains):
        if name not in present:
            given = Described(f"{name!r}, of which the training data has no row")
            accepted = f"domains in column {key!r}: {there}"
            problems.append(Problem(setting, given, accepted, did_you_mean(name, present)))
    if len(set(domains)) < len(domains):
        problems.append(Problem(setting, list(domains), "each domain once"))
    return problems


def column_names(dataset: Any) -> list[str]:
    """Return the names of a dataset's columns."""
    frame = getattr(dataset, "dataframe", None)
    names = getattr(frame, "column_names", None)
    if names is None:
        names = getattr(frame, "columns", None)
    if names is None:
        names = list(dataset[0]) if len(dataset) else []
    return [str(name) for name in names]


def column(dataset: Any, name: str) -> Any:
    """Return one column: an Arrow array where the dataset is stored so, else a sequence."""
    frame = getattr(dataset, "dataframe", None)
    if hasattr(frame, "select_columns") and hasattr(frame, "with_format"):
        return frame.select_columns([name]).with_format("arrow")[:].column(name)
    if frame is not None:
        return frame[name]
    return [dataset[row][name] for row in range(len(dataset))]


def encode(values: Any) -> tuple[list[str], NDArray[np.int64]]:
    """Return the distinct values as text and, per row, which one it has, -1 for none: (N,) int64."""
    if hasattr(values, "combine_chunks"):
        import pyarrow.compute

        encoded = pyarrow.compute.dictionary_encode(values.combine_chunks())
        if hasattr(encoded, "combine_chunks"):
            encoded = encoded.combine_chunks()
        indices = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return [str(name) for name in encoded.dictionary.to_pylist()], indices
    items = list(values)
    names: dict[str, int] = {}
    code = np.empty(len(items), dtype=np.int64)
    for row, item in enumerate(items):
        code[row] = -1 if item is None else names.setdefault(str(item), len(names))
    return list(names), code


def fingerprint(dataset: Any, names: Sequence[str], code: NDArray[np.int64]) -> str:
    """Return what a dataset is recognised by: rows, columns, domains of all rows, some rows' content, file sizes.

    Files count by size and not by name, so that a copy elsewhere is the same dataset.
    """
    digest = hashlib.sha256()
    n = len(code)
    sizes = sorted(os.path.getsize(path) for path in _files(dataset))
    digest.update(json.dumps([n, sorted(column_names(dataset)), list(names), sizes]).encode())
    digest.update(code.astype("<i4").tobytes())
    frame = getattr(dataset, "dataframe", None)
    source = dataset if frame is None or not hasattr(frame, "with_format") else frame.with_format("arrow")
    for row in np.unique(np.linspace(0, n - 1, min(n, _SAMPLED)).astype(np.int64)).tolist():
        item = source[row]
        content = item.to_pylist() if hasattr(item, "to_pylist") else _plain(item)
        digest.update(json.dumps(content, sort_keys=True, default=_described).encode())
    return f"{n} rows, {digest.hexdigest()[:16]}"


def _files(dataset: Any) -> list[str]:
    given = getattr(dataset, "data_files", None) or []
    paths = [given] if isinstance(given, str) else list(given)
    return [str(path) for path in paths if os.path.isfile(str(path))]


def _plain(item: Any) -> Any:
    # Counters and tensors that a dataset adds to its rows are not content.
    return {key: value for key, value in item.items() if isinstance(value, (str, int, float, list, dict))}


def _described(value: Any) -> str:
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return type(value).__name__ if not isinstance(value, (str, int, float)) else str(value)
