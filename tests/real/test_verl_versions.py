"""Other versions of verl, installed from their own wheels beside everything else: 0.9.0 runs, 0.8 is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataflex_verl.demo.build import DemoFiles
from tests.real.conftest import base_overrides

pytestmark = [pytest.mark.real, pytest.mark.nightly]

MODE = "trainer.v1.trainer_mode=dataflex_sync"


def installed(version: str, directory: Path) -> dict[str, str]:
    """Install verl alone into ``directory``; the environment in which it stands before the other verl."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory)]
    subprocess.run([*pip, f"verl=={version}"], check=True, timeout=300)
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import verl; print(verl.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.split()[-1] == version, found.stderr
    return environment


@pytest.fixture(scope="module")
def verl_0_9_0() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        yield installed("0.9.0", Path(directory))


@pytest.fixture(scope="module")
def verl_0_8() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        yield installed("0.8.0", Path(directory))


def run(environment: dict[str, str], *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=560,
    )


def first_step(environment: dict[str, str], demo: DemoFiles, directory: Path, band: tuple[float, float]):
    """Metrics of one step that keeps the responses whose reward lies in ``band``."""
    directory.mkdir()
    metrics = directory / "metrics.jsonl"
    low, high = band
    done = run(
        {**environment, "VERL_FILE_LOGGER_PATH": str(metrics)},
        *("dataflex_verl.cli", "train", "--local"),
        *base_overrides(demo),
        *("trainer.total_training_steps=1", "trainer.val_before_train=False", "trainer.logger=[console,file]"),
        f"trainer.default_local_dir={directory / 'checkpoints'}",
        *(MODE, "+dataflex.mechanism=select", "+dataflex.scorer.name=reward_difficulty"),
        *("+dataflex.actuator.name=threshold_band", f"+dataflex.actuator.params.low={low}"),
        f"+dataflex.actuator.params.high={high}",
        cwd=directory,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return next(record for record in records if "actor/grad_norm" in record)


def test_a_mask_reaches_the_gradient_of_verl_0_9_0(verl_0_9_0, demo, tmp_path, record_property) -> None:
    masked = first_step(verl_0_9_0, demo, tmp_path / "masked", (5, 6))
    kept = first_step(verl_0_9_0, demo, tmp_path / "kept", (-1, 2))
    record_property("grad_norm_masked", masked["actor/grad_norm"])
    record_property("grad_norm_kept", kept["actor/grad_norm"])
    assert (masked["dataflex/kept_frac"], kept["dataflex/kept_frac"]) == (0.0, 1.0)
    assert masked["actor/grad_norm"] == 0.0
    assert kept["actor/grad_norm"] > 0.0
    assert masked["critic/score/mean"] == kept["critic/score/mean"]


@pytest.mark.parametrize("command", ["check", "train"])
def test_verl_0_8_is_refused_in_one_message(verl_0_8, tmp_path, command) -> None:
    done = run(verl_0_8, "dataflex_verl.cli", command, MODE, "+dataflex=[difffilter,per]", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("verl 0.8.0 has no v1 trainer") == 1 and "verl>=0.9,<0.10" in done.stderr
    assert "Traceback" not in done.stderr


def test_verl_0_8_alone_refuses_the_trainer_mode(verl_0_8, tmp_path) -> None:
    # It loads no plugins, so nothing of ours runs; its configuration has no such setting, and nothing starts.
    done = run(verl_0_8, "verl.trainer.main_ppo", MODE, cwd=tmp_path)
    assert done.returncode == 1
    assert "Could not override 'trainer.v1.trainer_mode'" in done.stderr
