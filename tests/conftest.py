"""Shared by all tests. The environment must stand before anything imports verl."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dataflex_verl.local.settings import local_environment

for _name, _value in local_environment().items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("RAY_TMPDIR", tempfile.mkdtemp(prefix="dfray-", dir="/tmp"))


@pytest.fixture(scope="module")
def contrib() -> Iterator[Path]:
    """Wheels of all packages of ``contrib/`` as pip installed them, on the path while the module's tests run."""
    from tests.wheels import contrib_site

    with contrib_site().on_path() as site:
        yield site


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly-results", help="write outcomes, durations and figures as JSON to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly-results"):
        config.pluginmanager.register(NightlyResults(Path(config.getoption("--nightly-results"))))


class NightlyResults:
    """Collects what a nightly run found; a test adds figures of its own with ``record_property``.

    A run of some of the tests keeps what the file says of the others, each with the commit at which it ran.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.tests[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "figures": dict(report.user_properties),
        }

    def pytest_sessionfinish(self) -> None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        earlier = json.loads(self.path.read_text()) if self.path.exists() else {"tests": {}}
        kept = {
            test: {"commit": earlier["commit"], **result}
            for test, result in earlier["tests"].items()
            if Path(test.split("::")[0]).exists()
        }
        tests = {test: {**result, "commit": commit} for test, result in self.tests.items()}
        results = {
            "commit": commit,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "versions": {name: metadata.version(name) for name in ("verl", "torch", "ray", "transformers")},
            "cores": os.cpu_count(),
            "tests": dict(sorted({**kept, **tests}.items())),
        }
        self.path.write_text(json.dumps(results, indent=2) + "\n")
