from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commandline import dataflex, parsed_once

__all__ = ["dataflex", "parsed_once"]

Write = Callable[..., Path]


def metrics_of(
    steps: int = 4, validation: Mapping[str, float] | None = None, reward: float = 0.5, **extra: Any
) -> list[dict[str, Any]]:
    """Records of a run as verl logs them: validation before and after, a reward that rises by 0.01 a step."""
    validation = {"add": 0.5, "sort": 0.3} if validation is None else validation
    final = {f"val-core/{domain}/acc/mean@2": value for domain, value in validation.items()}
    records: list[dict[str, Any]] = [{"step": 0, "data": {name: 0.2 for name in final}}]
    for step in range(1, steps + 1):
        data = {
            "critic/score/mean": reward + 0.01 * step,
            "actor/grad_norm": 1.0 + 0.1 * step,
            "timing_s/step": 2.0,
            "perf/total_num_tokens": 100,
            **{name: values[step - 1] for name, values in extra.items()},
        }
        records.append({"step": step, "data": data | (final if step == steps else {})})
    return records


@pytest.fixture
def write_run(tmp_path: Path) -> Write:
    """Write records as verl's file logger does; return the folder."""

    def write(name: str, records: list[dict[str, Any]], plan: list[str] | None = None, cut: int = 0) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "metrics.jsonl").write_text(text[: len(text) - cut])
        if plan is not None:
            (folder / "metrics.plan.json").write_text(json.dumps([f"DataFlex plan: {line}" for line in plan]))
        return folder

    return write
