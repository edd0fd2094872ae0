"""Fixtures: runs of the command line in this process, verl's files parsed once for all of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from omegaconf import OmegaConf
from typer.testing import CliRunner

from dataflex_verl.cli import app

PARSED: dict[str, Any] = {}
"""By text of the file."""


@pytest.fixture(autouse=True, scope="module")
def parsed_once() -> Iterator[None]:
    """verl's configuration is two dozen files, which take longer to parse than everything else that is checked."""
    load = OmegaConf.load

    def cached(file: Any) -> Any:
        text = file.read()
        if text not in PARSED:
            PARSED[text] = OmegaConf.create(text)
        return copy.deepcopy(PARSED[text])

    patch = pytest.MonkeyPatch()
    patch.setattr(OmegaConf, "load", cached)
    yield
    patch.undo()
    assert OmegaConf.load is load


@pytest.fixture
def dataflex() -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    return run


@pytest.fixture
def check_json(dataflex: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    def run(*arguments: str) -> dict[str, Any]:
        result = dataflex("check", "--json", *arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        found = json.loads(result.stdout)
        assert result.exit_code == (0 if found["ok"] else 2)
        return found

    return run


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """Write a configuration that starts from verl's; return the options that name it."""
    import textwrap

    def write(text: str) -> tuple[str, ...]:
        defaults = "defaults:\n  - ppo_trainer\n  - _self_\n"
        (tmp_path / "mine.yaml").write_text(defaults + textwrap.dedent(text))
        return (f"--config-dir={tmp_path}", "--config-name=mine")

    return write
