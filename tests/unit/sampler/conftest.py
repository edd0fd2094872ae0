"""Datasets shaped as verl's, without verl."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

datasets = pytest.importorskip("datasets", reason="needs what verl requires: pip install 'dataflex-verl[local]'")

from dataflex_verl.domain_column import DomainRows  # noqa: E402


class Prompts:
    """What the sampler uses of verl's dataset: the Arrow table, the files, and items by row."""

    def __init__(self, files: list[Path]) -> None:
        self.data_files = [str(path) for path in files]
        rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        self.dataframe = datasets.Dataset.from_list(rows)
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.fetched.append(row)
        return dict(self.dataframe[row])


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Prompts]:
    """Write a dataset: `prompts({"math": 6, "code": 4}, key="domain")`; domains alternate as far as they last."""

    def write(sizes: dict[str, int], key: str = "domain", name: str = "train", word: str = "prompt") -> Prompts:
        left = dict(sizes)
        rows = []
        while any(left.values()):
            for domain in [domain for domain, count in left.items() if count]:
                left[domain] -= 1
                rows.append({"prompt": f"{word} {len(rows)}", key: domain})
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return Prompts([path])

    return write


def domain_rows(sizes: list[int], fingerprint: str = "here") -> DomainRows:
    """Rows of consecutive domains d0, d1, ... without a dataset."""
    starts = np.cumsum([0, *sizes])
    rows = tuple(np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, sizes, strict=False))
    names = tuple(f"d{index}" for index in range(len(sizes)))
    return DomainRows("domain", names, rows, 0, fingerprint)


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., DomainRows]:
    return domain_rows
