"""The figures in the documents are those that the code gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dataflex_verl.analysis import findings
from dataflex_verl.analysis.charts import MOST_POINTS
from dataflex_verl.analysis.statistics import ALPHA, SIMULATIONS, bootstrap_coverage, smallest_detectable

DOCS = Path(__file__).parents[3] / "docs"
LIMITS = (DOCS / "limits.md").read_text(encoding="utf-8")


def test_the_table_of_seeds_is_what_the_code_computes() -> None:
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \|$", LIMITS, re.MULTILINE)
    assert len(rows) == 7
    for seeds, shown in rows:
        assert smallest_detectable(1.0, int(seeds)) == pytest.approx(float(shown), abs=0.006)


def test_what_several_arms_ask_is_what_the_code_computes() -> None:
    shown = re.search(r"twelve arms\nit is ([\d.]+) for three seeds and ([\d.]+) for five", LIMITS)
    assert shown is not None
    for seeds, text in zip((3, 5), shown.groups(), strict=True):
        assert smallest_detectable(1.0, seeds, alpha=ALPHA / 12) == pytest.approx(float(text), abs=0.006)


def test_the_coverage_of_the_bootstrap_is_what_was_simulated() -> None:
    shown = re.findall(r"([\d.]+) %(?: for)? (\d+)(?: seeds)?[,.]", LIMITS.replace("\n", " "))
    assert [int(seeds) for _, seeds in shown] == [10, 12, 20] and f"{SIMULATIONS:,} simulated" in LIMITS
    for percent, seeds in shown:
        assert 100 * bootstrap_coverage(int(seeds)) == pytest.approx(float(percent), abs=0.06)


def test_the_standard_errors_of_validation_are_right() -> None:
    shown = re.search(r"(0\.\d+) for 2, (0\.\d+) for 8", LIMITS)
    assert shown is not None
    for text, samples in zip(shown.groups(), (2, 8), strict=True):
        assert float(text) == pytest.approx(0.5 / (72 * samples) ** 0.5, abs=0.0006)


def test_the_thresholds_of_warnings_are_those_of_the_code() -> None:
    page = (DOCS / "report.md").read_text(encoding="utf-8")
    assert f"nothing in {findings.STARVED_STEPS} steps in a row" in page
    assert f"ends below {findings.SMALL_SHARE:.0%}".replace("%", " %") in page
    assert f"less than {findings.NEAR_EMPTY:.0%}".replace("%", " %") in page
    assert findings.CONCENTRATED == 0.5 and "below half of the share kept" in page
    assert f"more than {MOST_POINTS}\nsteps" in page
