"""The committed results of the published comparison, and what the documents say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.test_cli_compare import MAIN, METHODS, MIXERS, PUBLISHED_STEPS

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results" / "published"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads((RESULTS / "results.json").read_text())


@pytest.fixture(scope="module")
def section() -> str:
    text = (DOCS / "limits.md").read_text()
    return " ".join(text.split("## Thirteen configurations on the demo task")[1].split("\n## ")[0].split())


def test_every_arm_has_its_three_runs_at_an_equal_budget(found):
    assert [arm["name"] for arm in found["arms"]] == ["none", *METHODS, *MIXERS]
    assert found["steps"] == PUBLISHED_STEPS and found["rollouts"] == PUBLISHED_STEPS * 96
    runs = {(run["arm"], run["seed"]): run for run in found["runs"]}
    assert set(runs) == {(arm["name"], seed) for arm in found["arms"] for seed in (0, 1, 2)}
    assert {run["state"] for run in runs.values()} == {"finished"}


def test_the_page_quotes_the_results(found, section):
    arms = {arm["name"]: arm["against"][MAIN] for arm in found["arms"][1:]}
    assert {against["adjusted"] for name, against in arms.items() if name != "static"} == {1.0}
    assert "Every adjusted p is 1.000." in section
    largest = max(arms, key=lambda name: abs(arms[name]["difference"]["mean"]))
    worst = arms[largest]["difference"]
    assert f"that of `{largest}`, {worst['mean']:.3f}, with an interval from {worst['low']:.3f} to" in section
    assert f"to {worst['high']:+.3f}." in section
    ends = [run["values"][MAIN] for run in found["runs"] if run["arm"] == "none"]
    assert "ends at {:.3f}, {:.3f} and {:.3f};".format(*ends) in section
    detectable = {name: against["difference"]["detectable"] for name, against in arms.items() if name != "static"}
    low, high = (end(detectable, key=detectable.__getitem__) for end in (min, max))
    assert f"a difference of {detectable[low]:.3f} (`{low}`) to {detectable[high]:.3f} (`{high}`)." in section
    assert arms["static"]["differences"] == [0.0] * 3


def test_the_page_counts_the_intervals_that_leave_out_zero(found, section):
    differences = [
        (arm["name"], outcome, against["difference"])
        for arm in found["arms"][1:]
        for outcome, against in arm["against"].items()
    ]
    outside = [(arm, outcome) for arm, outcome, d in differences if d["low"] * d["high"] > 0]
    ((arm, outcome),) = outside
    assert f"One of {len(differences)} intervals by outcome leaves out 0**: `{arm}` in {outcome}." in section
