"""``dataflex new``: what it writes installs and passes its tests; what it cannot use is refused and nothing written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dataflex_verl.cli import app
from dataflex_verl.scaffold.write import KINDS, TEMPLATES
from tests.wheels import pip

INSTALL = ("--no-build-isolation", "--no-compile", "--target")


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["new", *arguments])


def run_pytest(folder: Path, site: Path | None, *packages: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, as its user would start it, with what ``site`` has installed."""
    places = [*([str(site)] if site else []), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    arguments = ["-q", "-p", "no:cacheprovider", *packages]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_new_package_of_every_kind_installs_and_passes_its_tests(new, tmp_path: Path) -> None:
    names = {"demo-x": [], "demo-p": ["--preset"]}
    names |= {f"dataflex-demo-{kind}": ["--kind", kind, "--preset"] for kind in KINDS if kind != "plugin"}
    for name, options in names.items():
        result = new(name, *options)
        assert result.exit_code == 0, result.output
        assert f"Next: pip install ./{name} && python -m pytest {name}" in result.stdout
    pip("install", *INSTALL, tmp_path / "site", *(tmp_path / name for name in names))

    done = run_pytest(tmp_path, tmp_path / "site", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
    # Its tests are about the package as installed, and it is not.
    without = run_pytest(tmp_path, None, "demo-x")
    assert without.returncode != 0 and "No module named 'demo_x'" in without.stdout


def test_a_changed_plugin_fails_its_generated_tests(new, tmp_path: Path) -> None:
    new("demo-x")
    module = tmp_path / "demo-x" / "demo_x" / "__init__.py"
    module.write_text(module.read_text().replace("batch.lengths <=", "batch.lengths <"))
    pip("install", *INSTALL, tmp_path / "site", tmp_path / "demo-x")
    done = run_pytest(tmp_path, tmp_path / "site", "demo-x")
    assert done.returncode == 1 and "test_long_responses_are_masked" in done.stdout


def test_names_follow_from_the_name_of_the_package(new, tmp_path: Path) -> None:
    assert new("dataflex-keep-short", "--preset", "--out", "here").exit_code == 0
    written = (tmp_path / "here" / "pyproject.toml").read_text()
    assert 'name = "dataflex-keep-short"\n' in written
    assert '[project.entry-points.dataflex_hooks]\nkeep_short = "dataflex_keep_short:KeepShort"\n' in written
    assert '[project.entry-points.dataflex_presets]\nkeep_short = "dataflex_keep_short.presets"\n' in written
    assert (tmp_path / "here" / "dataflex_keep_short" / "presets" / "dataflex" / "keep_short.yaml").is_file()
    new("demo-x")
    readme = (tmp_path / "demo-x" / "README.md").read_text()
    assert re.search(
        r"Install first, then test.*\n.*\n\n```bash\npip install ./demo-x\npython -m pytest demo-x\n", readme
    )
    assert "dataflex_presets" not in (tmp_path / "demo-x" / "pyproject.toml").read_text()
    assert not (tmp_path / "demo-x" / "demo_x" / "presets").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Demo X"], "NAME: got 'Demo X'; accepted: lower-case letters, .*; did you mean 'demo-x'?"),
        (["2fast"], "NAME: got '2fast'; accepted: lower-case letters"),
        (["demo--x"], "did you mean 'demo-x'?"),
        (["torch"], "NAME: got 'torch', and there is a module torch already"),
        (["class"], "NAME: got 'class', and that is a word of Python"),
        (["select"], "NAME: got 'select', and dataflex-verl .* has a plugin 'select'"),
        (["dataflex-select"], "NAME: got 'dataflex-select', and dataflex-verl .* has a plugin 'select'"),
        (["dataflex-2x"], "NAME: got 'dataflex-2x', a plugin '2x' with the class 2x; accepted: a name whose plugin"),
        (["dataflex-none"], "NAME: got 'dataflex-none', a plugin 'none' with the class None; accepted: a name"),
        (["tests"], "NAME: got 'tests', and its tests stand in a folder of that name"),
        (["on", "--preset"], "NAME: got 'on', a plugin 'on' with the class On; .* ordinary names in YAML and Python"),
        (["token_prob"], "NAME: got 'token_prob', and there is a scorer 'token_prob'"),
        (["curriculum"], "NAME: got 'curriculum', and curriculum comes with"),
        (["difffilter", "--preset"], "NAME: got 'difffilter', and dataflex-verl has a preset 'difffilter'"),
        # Without one too: +dataflex=difffilter would configure the new plugin's label.
        (["difffilter"], "has a preset 'difffilter'; accepted: a name that nothing has yet; choose another; dataflex"),
        (["dataflex-difffilter"], "'dataflex-difffilter', and dataflex-verl has a preset 'difffilter'"),
        (["pluggy-plus"], "'pluggy-plus', and pluggy-plus 7.1 is installed, which pip would replace; accepted: a name"),
        (["über"], "NAME: got 'über'; accepted: lower-case letters, .*; did you mean 'uber'[?]$"),
        (["Straße Zwei"], "; did you mean 'strasse-zwei'[?]$"),
        (["mądrość"], "; did you mean 'madrosc'[?]$"),
        # No letter is left out of a suggestion, and none is suggested that is taken.
        (["mask-短い"], "beginning with a letter, such as keep-short$"),
        (["øl"], "such as keep-short$"),
        (["Difffilter"], "such as keep-short$"),
        (["demo-x", "--kind", "scorrer"], "--kind: got 'scorrer'; .*; did you mean 'scorer'?"),
        (["demo-x", "--out", "full"], "--out: got full, a directory with something in it; accepted: a directory"),
        (["demo-x", "--out", "full/file"], "--out: got full/file, a file; accepted: a directory"),
        (["demo-x", "--out", "full/file/x"], "--out: got 'full/file/x'; accepted: a directory that can be .*Not a dir"),
        (["demo-x", "--out", "x" * 300], "--out: got 'xxx.*; accepted: a directory that can be written: .*too long"),
        (["x" * 101], "NAME: got 'xxx.*'; accepted: at most 100 letters and digits$"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(new, tmp_path: Path, distribution, arguments, message) -> None:
    distribution("pluggy-plus", {}, {}, version="7.1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    result = new(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert re.match("dataflex new: ", line) and re.search(message, line), line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plugin_that_somebody_else_installed_is_not_named_again(new, distribution) -> None:
    assert new("acme-mask").exit_code == 0
    distribution("acme", {"acme_other": "acme_other_module:Plugin"}, {"acme_other_module": ""})
    result = new("acme-other")
    assert result.exit_code == 2 and "acme 1.2.3 has a plugin 'acme_other'" in result.stderr


def test_an_empty_directory_is_filled(new, tmp_path: Path) -> None:
    (tmp_path / "demo-x").mkdir()
    assert new("demo-x").exit_code == 0
    assert (tmp_path / "demo-x" / "pyproject.toml").is_file()


def test_every_kind_has_a_module_and_a_test() -> None:
    templates = {path.name for path in TEMPLATES.iterdir()}
    assert templates >= {f"{prefix}{kind}.py.txt" for kind in KINDS for prefix in ("", "test_")}


def test_help_lists_it() -> None:
    assert "Write a package of a plugin to begin with." in CliRunner().invoke(app, ["--help"]).output
    assert all(kind in CliRunner().invoke(app, ["new", "--help"]).output for kind in KINDS)
