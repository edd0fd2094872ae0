"""A plugin that writes down what is fetched, and that waits for ever at a point of a run, to be killed there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dataflex_verl import state_files
from dataflex_verl.sampler import DomainSampler
from tests.real.plugins import ScriptRewards

POINTS = {"before_tracker": "write", "after_checkpoint": "write_metrics"}
"""After our files are there and before verl's tracker names their step; after the tracker and before the next step."""


class Witness(ScriptRewards):
    """Scripted rewards, and a JSON line for every draw: place of the first prompt, rows, domains, shares in force.

    Args:
        record: file for the lines.
        wait: one of POINTS, or empty; a file ``<record>.waits`` says that it was reached.
        at: the step in which it waits.
    """

    def __init__(self, record: str, wait: str = "", at: int = 0) -> None:
        self.record = Path(record)
        draw = DomainSampler.draw

        def recorded(sampler: DomainSampler, count: int) -> Any:
            place, shares = int(sampler.counts.sum()), sampler.proportions.tolist()
            drawn = draw(sampler, count)
            with self.record.open("a") as file:
                file.write(json.dumps([place, drawn.rows, drawn.domains, shares]) + "\n")
            return drawn

        DomainSampler.draw = recorded  # type: ignore[method-assign]
        if wait:
            name = POINTS[wait]
            setattr(state_files, name, self._waits(getattr(state_files, name), name, at))

    def _waits(self, act: Callable[..., Any], name: str, at: int) -> Callable[..., Any]:
        def waits(*arguments: Any) -> Any:
            given = act(*arguments)
            step = arguments[2 if name == "write" else 1]
            if step == at:
                Path(f"{self.record}.waits").touch()
            while step == at:
                time.sleep(1.0)
            return given

        return waits


def fetched(record: str | Path) -> dict[int, tuple[int, int, tuple[float, ...]]]:
    """By the place of a prompt in the run: dataset row, domain, and the shares in force when it was chosen."""
    prompts = {}
    for line in Path(record).read_text().splitlines():
        place, rows, domains, shares = json.loads(line)
        for offset, pair in enumerate(zip(rows, domains, strict=True)):
            prompts[place + offset] = (*pair, tuple(shares))
    return prompts
