"""A command line whose training is recorded instead of run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from click.testing import Result
from typer.testing import CliRunner

from dataflex_verl.cli import app
from dataflex_verl.commands import train as train_module


@dataclass
class Started:
    """What verl's main module was started with: its command line, once per start."""

    command_lines: list[list[str]] = field(default_factory=list)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """verl's main module and the fork server do not start; what they would get is kept."""
    record = Started()

    def run_module(name: str, run_name: str, alter_sys: bool) -> dict:
        assert (name, run_name, alter_sys) == ("verl.trainer.main_ppo", "__main__", True)
        record.command_lines.append(sys.argv[1:])
        return {}

    monkeypatch.setattr(sys, "argv", ["dataflex"])
    monkeypatch.setattr(train_module.runpy, "run_module", run_module)
    monkeypatch.setattr("dataflex_verl.local.forkserver.start_server", lambda: None)
    return record


@pytest.fixture
def dataflex() -> Callable[..., Result]:
    """Call the command line."""
    return lambda *arguments: CliRunner().invoke(app, list(arguments))
