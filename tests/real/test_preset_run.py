"""Stock ``python -m verl.trainer.main_ppo '+dataflex=[difffilter,per]'`` on the real trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dataflex_verl.cli import app
from dataflex_verl.demo.build import DemoFiles
from dataflex_verl.local.settings import local_overrides
from tests.real.conftest import base_overrides
from tests.real.test_stock_runs import stock_run

pytestmark = [pytest.mark.real, pytest.mark.nightly]


def test_presets_run_under_stock_main_ppo_with_the_plan_of_check(demo: DemoFiles, tmp_path: Path) -> None:
    overrides = [*base_overrides(demo), "trainer.v1.trainer_mode=dataflex_sync", "+dataflex=[difffilter,per]"]
    run = stock_run(tmp_path / "run", overrides)
    assert run.metrics["dataflex/applied"] == 1.0
    assert 0 <= run.metrics["dataflex/difffilter/kept_frac"] <= 1 and run.metrics["dataflex/per/weight_mean"] >= 0

    checked = CliRunner().invoke(app, ["check", *local_overrides(overrides), *overrides])
    assert checked.exit_code == 0
    assert run.plan == checked.stdout.splitlines()
    assert json.loads((tmp_path / "run" / "metrics.plan.json").read_text()) == run.plan
