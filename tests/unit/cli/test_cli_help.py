from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from dataflex_verl.cli import app


def test_version_names_the_distribution() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"dataflex-verl {metadata.version('dataflex-verl')}"


HEAVY = {"torch", "ray", "verl", "transformers", "hydra", "numpy", "scipy", "plotly"}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["train", "--help"], ["demo", "--help"], ["compare", "--help"], ["report", "--help"]],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from dataflex_verl.cli import app\n"
        f"assert CliRunner().invoke(app, {arguments}).exit_code == 0\n"
        f"print(sorted({HEAVY} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_train_help_shows_three_examples() -> None:
    output = CliRunner().invoke(app, ["train", "--help"]).output
    assert output.count("    dataflex train ") == 3
    assert "trainer.v1.trainer_mode=dataflex_sync" in output
