"""Demonstrations as they stand in Parquet and JSONL files, every unusable row named by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflex_hooks import ConfigError, Described, Problem, nearest

SHOWN = 5
"""At most so many unusable rows are named one by one."""

_SUFFIXES = (".parquet", ".jsonl", ".ndjson")


@dataclass(frozen=True)
class Columns:
    """Names of the columns, and the domains that are wanted, None for all."""

    prompt: str
    response: str
    domain: str | None
    domains: tuple[str, ...] | None


@dataclass(frozen=True)
class Demonstration:
    """One row: where it stands, a prompt (text, messages or token ids), a response (text or token ids), a domain."""

    place: str
    prompt: Any
    response: Any
    domain: str | None


class BadRow(ValueError):
    """Why a row cannot be used."""


def read(paths: Sequence[str], columns: Columns) -> list[Demonstration]:
    """Read all rows of the wanted domains, in the order of the files.

    Raises:
        ConfigError: a file that is not there or of another kind; rows that cannot be used; no row at all.
    """
    problems: list[Problem] = []
    bad: list[str] = []
    rows: list[Demonstration] = []
    seen: set[str] = set()
    for path in paths:
        try:
            for place, record in _records(Path(path)):
                try:
                    row = _row(place, record, columns)
                except BadRow as error:
                    bad.append(f"{place}: {error}")
                    continue
                if row.domain is not None:
                    seen.add(row.domain)
                if columns.domains is None or row.domain in columns.domains:
                    rows.append(row)
        except (OSError, ValueError) as error:
            problems.append(Problem("data", path, f"a readable file, {', '.join(_SUFFIXES)}", _words(error), error))
    problems += unusable(bad, "rows with a prompt and a response")
    for name in columns.domains or ():
        if not problems and name not in seen:
            hint = f"did you mean {near!r}?" if (near := nearest(name, seen)) else None
            accepted = f"domains of column {columns.domain!r}: {', '.join(sorted(seen)) or 'none'}"
            problems.append(Problem("domains", name, accepted, hint))
    if not rows and not problems:
        problems.append(Problem("data", list(paths), "files with at least one row"))
    if problems:
        raise ConfigError(problems)
    return rows


def unusable(bad: Sequence[str], accepted: str, hint: str | None = None) -> list[Problem]:
    """Problems of the first rows that cannot be used, and how many more there are."""
    problems = [Problem("data", Described(text), accepted, hint) for text in bad[:SHOWN]]
    if len(bad) > SHOWN:
        problems.append(Problem("data", Described(f"{len(bad) - SHOWN} more such rows"), accepted, hint))
    return problems


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _records(path: Path) -> Iterator[tuple[str, object]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        number = 0
        with pq.ParquetFile(path) as file:
            for part in file.iter_batches():
                for record in part.to_pylist():
                    number += 1
                    yield f"{path.name} row {number}", record
    elif path.suffix in _SUFFIXES:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path.name} line {number}", line
    else:
        raise ValueError(f"the name ends in {path.suffix or 'nothing'}")


def _row(place: str, record: object, columns: Columns) -> Demonstration:
    if isinstance(record, bytes):
        try:
            record = json.loads(record)
        except ValueError as error:
            raise BadRow(f"no JSON ({error})") from None
    if not isinstance(record, dict):
        raise BadRow(f"no JSON object but {type(record).__name__}")
    prompt, response = _value(record, columns.prompt), _value(record, columns.response)
    if not (_is_text(prompt) or _are_tokens(prompt) or _are_messages(prompt)):
        raise BadRow(f"{columns.prompt} is {_short(prompt)}, neither text, nor token ids, nor messages with content")
    if not (_is_text(response) or _are_tokens(response)):
        raise BadRow(f"{columns.response} is {_short(response)}, neither text nor token ids")
    return Demonstration(place, prompt, response, _domain(record, columns))


def _domain(record: dict[str, Any], columns: Columns) -> str | None:
    if columns.domain is None or (columns.domains is None and columns.domain not in record):
        return None
    domain = _value(record, columns.domain)
    if domain is not None and not isinstance(domain, str):
        raise BadRow(f"{columns.domain} is {_short(domain)}, not a name")
    return domain


def _value(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        near = nearest(name, record)
        there = ", ".join(map(str, record)) or "nothing"
        raise BadRow(f"no {name!r} among {there}" + (f"; did you mean {near!r}?" if near else ""))
    return record[name]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def _are_messages(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") for m in value)


def _short(value: object) -> str:
    text = repr(value)
    return "empty" if value in ("", [], None) else text if len(text) <= 60 else f"{text[:57]}..."
