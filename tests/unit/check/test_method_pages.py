"""The pages under docs/methods agree with the code: every component, preset, parameter and default, and no others."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml

from dataflex_hooks import REGISTRY
from dataflex_verl import presets
from dataflex_verl.commands.hydra_config import CommandLine, compose_with_presets
from dataflex_verl.startup import prepare_with

DOCS = Path(__file__).parents[3] / "docs" / "methods"
PAGES = sorted(page for page in DOCS.glob("*.md") if "Presets:" in page.read_text(encoding="utf-8"))
SECTIONS = ["What it does", "Formula", "Source", "Parameters", "When to use it", "Cost", "Command"]
HOST = {"kwargs", "scorer", "domains", "window"}
MIXER_HOST = {"kwargs", "scorer"}
KINDS = ("scorer", "selector", "reweighter", "mixer")


def parameters_in_code() -> set[tuple[str, str, str, object]]:
    found = set()
    for kind in KINDS:
        for name in REGISTRY.names(kind):
            cls = REGISTRY.get(kind, name)
            if not cls.__module__.startswith("dataflex_hooks."):
                continue
            # Of mixers, the domains and the window are published parameters.
            taken = MIXER_HOST if kind == "mixer" else HOST
            signature = inspect.signature(cls).parameters
            own = {k: p.default for k, p in signature.items() if k not in taken | cls.host_keywords}
            found |= {(kind, name, parameter, default) for parameter, default in own.items()} or {
                (kind, name, "-", "-")
            }
    return found


def parameters_in(text: str) -> list[tuple[str, str, str, object]]:
    rows = re.findall(r"^\| (\w+) `(\w+)` \| (\S+) \| (\S+) \| .+ \|$", text, re.M)
    return [(kind, name, p.strip("`"), value(default.strip("`"))) for kind, name, p, default in rows]


def value(text: str) -> object:
    if text == "-":
        return text
    return float(text) if re.fullmatch(r"[\d.]+e-\d+", text) else yaml.safe_load(text)


def presets_of(text: str) -> list[str]:
    (line,) = re.findall(r"^Presets: (.+)$", text, re.M)
    return re.findall(r"`(\w+)`", line)


def test_parameters_on_the_pages_are_those_of_the_code_each_once():
    written = [row for page in PAGES for row in parameters_in(page.read_text(encoding="utf-8"))]
    assert set(written) == parameters_in_code()
    assert len(written) == len(set(written))


def test_every_preset_has_one_page():
    written = [name for page in PAGES for name in presets_of(page.read_text(encoding="utf-8"))]
    assert sorted(written) == presets.names()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_complete(page):
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS
    names = presets_of(text)
    assert page.stem == (names[0] if names else "schedule")
    used = {str(part["name"]) for name in names for part in components(name)}
    assert {name for _, name, _, _ in parameters_in(text)} <= used | {"schedule"}
    for link in re.findall(r"\]\(([\w.]+)\)", text):
        assert (DOCS / link).is_file(), link


def components(preset: str) -> list[dict]:
    (plugin,) = presets.block(preset)["plugins"].values()
    return [plugin[role] for role in ("scorer", "actuator") if role in plugin]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_command_on_a_page_starts(page):
    (command,) = re.findall(r"## Command\n\n```bash\n(.+?)```", page.read_text(encoding="utf-8"), re.S)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    config = compose_with_presets(CommandLine.parse(words[3:])).config

    def linear(*_: object):
        from dataflex_hooks import LossCoefficients

        return LossCoefficients("token")

    hooks, _ = prepare_with(config, linear)
    assert hooks.labels == (("mix",) if page.stem == "schedule" else (page.stem,))


def test_the_index_lists_every_page_and_every_component():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\w+\.md)\)", index)) == {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    by_action, by_signal = index.split("## By signal")
    for page in PAGES:
        for name in presets_of(page.read_text(encoding="utf-8")):
            assert f"`{name}`" in by_action
            for part in components(name)[:-1]:
                (row,) = re.findall(rf"^\|.+\| `{part['name']}` \|(.+)\|$", by_signal, re.M)
                assert f"({page.name})" in row
    scorers = {name for kind, name, _, _ in parameters_in_code() if kind == "scorer"}
    assert all(f"`{name}`" in by_signal for name in scorers)
