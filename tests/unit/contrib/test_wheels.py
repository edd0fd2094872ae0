"""The packages of contrib/ as installed wheels: found by name with one override, and not at all when not installed."""

from __future__ import annotations

import json
import re
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.wheels import CONTRIB, build, packages

GOOD = ["trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
NAMES = [path.name for path in packages()]


def plugin_name(package: str) -> str:
    return package.removeprefix("dataflex-").replace("-", "_")


def one_override(package: str) -> str:
    """The override that the package's README gives: the first line of a code block that begins with ``+dataflex``."""
    found = re.search(r"^ *(\+dataflex\S+)", (CONTRIB / package / "README.md").read_text(), re.MULTILINE)
    assert found, f"the README of {package} shows no override on a line of its own"
    return found[1]


@pytest.fixture
def their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that overrides in the READMEs name, in the current directory."""
    (tmp_path / "judge.py").write_text("async def compute_score(solution_str):\n    return 0.7\n")
    (tmp_path / "demos.jsonl").write_text(json.dumps({"prompt": [5, 6], "response": [7, 4]}) + "\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("package", NAMES)
def test_one_override_makes_an_installed_plugin_active(package, contrib, check_json, their_files):
    found = check_json(*GOOD, one_override(package))
    assert found["ok"], found["problems"]
    (plugin,) = found["plan"]["plugins"]
    assert (plugin["plugin"], plugin["distribution"]) == (plugin_name(package), package)
    assert plugin["version"] == version(package)
    assert plugin["hooks"]


def test_the_overview_lists_every_package_with_its_override():
    rows = re.findall(
        r"^\| \[(\S+)\]\((\S+)/README.md\) \| .+ \| `(.+)` \|$", (CONTRIB / "README.md").read_text(), re.M
    )
    assert sorted(rows) == [(name, name, one_override(name)) for name in NAMES]


@pytest.mark.parametrize("package", NAMES)
def test_installed_is_not_active(package, contrib, check_json, dataflex):
    assert check_json(*GOOD, "+dataflex=per")["plan"]["plugins"][0]["distribution"] != package
    rows = {row["name"]: row for row in json.loads(dataflex("plugins", "--json").stdout)}
    row = rows[plugin_name(package)]
    assert (row["distribution"], row["active"], row["error"]) == (package, False, None)


@pytest.mark.parametrize("package", NAMES)
def test_a_wheel_has_the_package_and_nothing_else(package):
    project = tomllib.loads((CONTRIB / package / "pyproject.toml").read_text())["project"]
    assert project["name"] == package
    assert any(need.startswith("dataflex-verl") for need in project["dependencies"])
    (wheel,) = (build() / "wheels").glob(f"{package.replace('-', '_')}-*.whl")
    top = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert top == {package.replace("-", "_"), wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


@pytest.mark.parametrize("package", NAMES)
def test_a_package_imports_nothing_of_ours_but_public_names(package):
    sources = (CONTRIB / package / package.replace("-", "_")).rglob("*.py")
    text = "\n".join(path.read_text() for path in sources)
    imported = re.findall(
        r"^ *(?:from|import) +((?:dataflex_hooks|dataflex_verl|verl|ray)\b[\w.]*)", text, re.MULTILINE
    )
    assert set(imported) == {"dataflex_hooks"}
