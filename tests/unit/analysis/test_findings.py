"""Each warning with the run that deserves it, and the same run without its cause."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataflex_verl.analysis.findings import findings
from dataflex_verl.analysis.records import read_run
from tests.unit.analysis.conftest import Write, metrics_of

STEPS = 40
FINE = {
    "dataflex/kept_frac": [0.6] * STEPS,
    "dataflex/ess_frac": [0.5] * STEPS,
    "dataflex/fallback": [0.0] * STEPS,
    "dataflex/applied": [1.0] * STEPS,
    "dataflex/skip_update": [0.0] * STEPS,
    "dataflex/difffilter/kept_frac": [0.6] * STEPS,
    "dataflex/difffilter/decided_total": [1.0] * STEPS,
    "dataflex/per/weight_std": [0.4] * STEPS,
    "dataflex/per/disabled": [0.0] * STEPS,
    "dataflex/prop_math": [0.7] * STEPS,
    "dataflex/trained_math": [0.7] * STEPS,
    "dataflex/prop_mi-nerva": [0.3] * STEPS,
    "dataflex/trained_mi-nerva": [0.3] * STEPS,
}


def texts(write_run: Write, **changed: Any) -> list[tuple[str, str]]:
    extra = {**FINE, **{name.replace("__", "/"): values for name, values in changed.items()}}
    records = metrics_of(STEPS, **extra)
    return [(found.level, found.text) for found in findings(read_run(write_run("run", records, plan=["a plan"])))]


def but(value: float, good: float, count: int, start: int = 0) -> list[float]:
    values = np.full(STEPS, good)
    values[start : start + count] = value
    return values.tolist()


def test_a_run_where_nothing_is_wrong_has_no_finding(write_run: Write) -> None:
    assert texts(write_run) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dataflex__kept_frac": but(0.05, 0.6, 5), "dataflex__ess_frac": but(0.05, 0.5, 5)}, "kept in 5 of 40 steps"),
        ({"dataflex__fallback": but(1.0, 0.0, 2)}, "too little was kept in 2 of 40 steps"),
        ({"dataflex__ess_frac": but(0.2, 0.5, 10)}, "weights concentrated: in 10 of 40 steps"),
        ({"dataflex__difffilter__kept_frac": [1.0] * STEPS}, "difffilter kept every rollout in all 40 steps"),
        ({"dataflex__difffilter__decided_total": [0.0] * STEPS}, "difffilter returned no decision in any step"),
        ({"dataflex__per__weight_std": [0.0] * STEPS}, "per gave all rollouts the same weight in all 40 steps"),
        ({"dataflex__per__disabled": but(1.0, 0.0, 10, 30)}, "per failed and was disabled from step 31 on"),
        ({"actor__grad_norm": but(0.0, 1.0, 3)}, "the gradient was exactly 0 in 3 of 40 steps"),
        (
            {"dataflex__trained_mi-nerva": but(0.0, 0.3, 25, 10)},
            "starved domain: minerva trained nothing from step 11 to 35, though its target share was 30.0%",
        ),
        ({"dataflex__prop_mi-nerva": but(0.004, 0.3, 20, 20)}, "minerva ends with a target share of 0.40%"),
    ],
)
def test_what_is_wrong_is_warned_of(write_run: Write, changed: dict[str, Any], text: str) -> None:
    found = texts(write_run, **changed)
    assert len(found) == 1 and found[0][0] == "warning" and text in found[0][1], found


@pytest.mark.parametrize(
    "changed",
    [
        {"dataflex__kept_frac": but(0.2, 0.6, 5), "dataflex__ess_frac": but(0.2, 0.5, 5)},
        {"dataflex__ess_frac": but(0.2, 0.5, 3)},
        {"dataflex__difffilter__kept_frac": but(0.9, 1.0, 1)},
        {"dataflex__difffilter__decided_total": but(1.0, 0.0, 1)},
        {"dataflex__per__weight_std": but(0.1, 0.0, 1)},
        {"dataflex__trained_mi-nerva": but(0.0, 0.3, 19, 10)},
        {"dataflex__prop_mi-nerva": but(0.0, 0.3, 20), "dataflex__trained_mi-nerva": but(0.0, 0.3, 20)},
        {"actor__grad_norm": but(1e-9, 1.0, 3)},
    ],
)
def test_what_is_nearly_wrong_is_not(write_run: Write, changed: dict[str, Any]) -> None:
    assert texts(write_run, **changed) == []


def test_notes_say_what_a_reader_has_to_know(write_run: Write) -> None:
    assert texts(write_run, dataflex__applied=[0.0] * STEPS)[0][1].startswith("shadow mode")
    skipped = {"dataflex__skip_update": but(1.0, 0.0, 2), "actor__grad_norm": but(0.0, 1.0, 2)}
    assert texts(write_run, **skipped) == [("note", "no optimizer step was made in 2 of 40 steps, as a plugin asked")]
    plain = findings(read_run(write_run("plain", metrics_of(3, validation={}))))
    assert [found.text for found in plain] == [
        "a run without DataFlex: what verl logs itself is shown",
        "no validation was logged",
    ]
