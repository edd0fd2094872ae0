"""The unit tests of ``dataflex_hooks`` under the other Pythons, each in an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDED = ("torch", "numpy", "pluggy", "omegaconf", "hydra-core", "wrapt", "typer", "rich")
TOOLS = ("hypothesis", "pytest", "pytest-mock", "pytest-timeout")
COMPILE = """
import pathlib
for folder in ("dataflex_hooks", "dataflex_verl", "tests"):
    for path in pathlib.Path(folder).rglob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
"""


def interpreter(version: str) -> Path | None:
    """A Python of this version: on the path, or pyenv's."""
    found = shutil.which(f"python{version}")
    candidates = [Path(found)] if found else []
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in candidates:
        # pyenv's shims exist for versions that are not active, and fail.
        if subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("version", ["3.10", "3.12"])
def test_the_unit_tests_of_the_hooks_pass_under_python(version, record_property):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([python, "-m", "venv", directory], check=True)
        own = Path(directory, "bin", "python")
        subprocess.run([own, "-m", "pip", "install", "--quiet", *NEEDED, *TOOLS], check=True, timeout=1200)
        subprocess.run([own, "-c", COMPILE], check=True, cwd=ROOT)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [own, "-m", "pytest", "tests/unit/hooks", "-q", "-p", "no:cacheprovider"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=1500,
        )
        torch = subprocess.run(
            [own, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    record_property("torch", torch.stdout.strip())
    record_property("passed", int(re.search(r"(\d+) passed", done.stdout).group(1)))
