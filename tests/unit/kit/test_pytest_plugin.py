"""The fixtures are there wherever the package is installed, and cost nothing where nobody asks for them."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WATCHED = ("torch", "numpy", "dataflex_hooks", "typer", "verl", "ray")
UNRELATED = "def test_nothing():\n    pass\n"
USING = """
    def test_a_mask(dataflex_testing, run_hooks, assert_plugin_contract):
        import dataflex_hooks as df

        class KeepShort:
            @df.hookimpl
            def post_advantage(self, batch, ctx):
                return df.UpdateDecision(mask=batch.lengths <= 3)

        assert run_hooks(KeepShort(), dataflex_testing.make_groups([1, 0], lengths=[[3, 4]])).kept_rows == [0]
        assert_plugin_contract(KeepShort)
        assert dataflex_testing.__name__ == "dataflex_hooks.testing"
"""
REPORT = """
    import json, sys

    def pytest_sessionfinish(session, exitstatus):
        registered = session.config.pluginmanager.has_plugin("dataflex_verl.pytest_plugin") or (
            session.config.pluginmanager.has_plugin("dataflex")
        )
        loaded = [name for name in {watched!r} if name in sys.modules]
        loaded += sorted(name for name in sys.modules if name.startswith("dataflex_verl"))
        print("REPORT", json.dumps({{"loaded": loaded, "registered": registered, "status": int(exitstatus)}}))
"""


@pytest.fixture
def report(tmp_path: Path):
    """Run pytest on one file in a process of its own; return what was imported by the end."""

    def run(test: str, *arguments: str) -> dict:
        (tmp_path / "test_it.py").write_text(textwrap.dedent(test))
        (tmp_path / "conftest.py").write_text(textwrap.dedent(REPORT.format(watched=WATCHED)))
        # A checkout that was installed before the entry point was there has to name it.
        known = {point.name for point in entry_points(group="pytest11")}
        named = [] if "dataflex" in known else ["-p", "dataflex_verl.pytest_plugin"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *named, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        line = next(line for line in done.stdout.splitlines() if "REPORT" in line)
        return json.loads(line[line.index("{") :])

    return run


def test_an_unrelated_run_imports_nothing_of_ours(report) -> None:
    found = report(UNRELATED)
    assert found == {"loaded": ["dataflex_verl", "dataflex_verl.pytest_plugin"], "registered": True, "status": 0}


def test_a_test_that_asks_gets_the_kit(report) -> None:
    found = report(USING)
    assert found["status"] == 0 and {"torch", "dataflex_hooks"} <= set(found["loaded"])
    assert not {"verl", "ray", "typer"} & set(found["loaded"])


def test_the_entry_point_is_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\ndataflex = "dataflex_verl.pytest_plugin"\n' in text
