"""``dataflex compare`` as its users start it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import CACHE
from tests.real.test_cli_train import dataflex

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("difffilter", "topk", "maxvar", "gfpo", "ar", "per", "softmax", "diffband")
MIXERS = ("static", "reward_gap", "dump_ucb", "tscl")
PUBLISHED_STEPS = 20
# Eight samples a validation task: with two, chance in the validation hides differences of 0.1.
VALIDATION = ("trainer.val_before_train=False", "actor_rollout_ref.rollout.val_kwargs.n=8")
MAIN = "validation, all domains"


@pytest.mark.nightly
def test_an_arm_compared_with_itself_differs_by_exactly_zero(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    arms = ("--arm", "difffilter", "--arm", "again=difffilter", "--seeds", "1", "--steps", "2")
    quick = ("--", "trainer.val_before_train=False", "actor_rollout_ref.rollout.val_kwargs.n=1")
    command = ("compare", *arms, "--out", str(out), "--cache", str(CACHE), "--json", *quick)
    done = dataflex(*command, directory=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    again = found["arms"][1]
    assert again["name"] == "again" and again["same"] == [0]
    assert again["against"][MAIN]["differences"] == [0.0]
    assert "every step's reward and gradient norm are the same, and the difference is exactly 0" in again["verdict"]
    # Two runs, and not one counted twice.
    logs = [(out / arm / "seed-0" / "metrics.jsonl").read_text() for arm in ("difffilter", "again")]
    assert logs[0] != logs[1], "wall times of two runs are never the same"
    assert all(run["seconds"] > 0 and run["tokens"] > 0 for run in found["runs"])
    # Again, and nothing is run: the training would take longer than this.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert dataflex(*command, directory=tmp_path).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == before


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_the_published_configurations_are_compared(record_property: Any) -> None:
    """No strategy, eight methods and four mixers, three paired seeds each; whatever it shows is written down.

    The runs stay in ``build/published``: a test that was interrupted goes on where it stood.
    """
    out = ROOT / "build" / "published"
    arms = [word for name in ("none", *METHODS, *MIXERS) for word in ("--arm", name)]
    options = ("--seeds", "3", "--steps", str(PUBLISHED_STEPS), "--out", str(out), "--json")
    out.mkdir(parents=True, exist_ok=True)
    done = dataflex("compare", *arms, *options, "--", *VALIDATION, directory=out, timeout=4 * 3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert [run["state"] for run in found["runs"]] == ["finished"] * 39
    results = ROOT / "docs" / "results" / "published"
    results.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "results.md", "report.html"):
        if (out / name).exists():
            shutil.copy(out / name, results)
    for arm in found["arms"][1:]:
        against = arm["against"][MAIN]
        assert against["seeds"] == [0, 1, 2]
        record_property(arm["name"], round(against["difference"]["mean"], 4))
