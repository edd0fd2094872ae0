"""From a name to the files of a package that installs, passes its tests and runs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import MappingProxyType

from dataflex_hooks._version import __version__
from dataflex_verl.scaffold.names import Names

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Kind:
    """What differs between kinds of plugin, beside the module and its test.

    Attributes:
        summary: one line on what the generated one does.
        settings: of the plugin in a configuration, as YAML under its label.
        overrides: the same on a command line.
    """

    summary: str
    settings: str
    overrides: tuple[str, ...]


def _pair(plugin: str, scorer: str, actuator: str) -> tuple[str, tuple[str, ...]]:
    label = "+dataflex.plugins.$plugin"
    settings = f"plugin: {plugin}\nscorer:\n  name: {scorer}\nactuator:\n  name: {actuator}"
    return settings, (f"{label}.plugin={plugin}", f"{label}.scorer={scorer}", f"{label}.actuator={actuator}")


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "plugin": Kind(
            "Masks long responses.", "plugin: $plugin\nlongest: 256", ("+dataflex.plugins.$plugin.longest=256",)
        ),
        "scorer": Kind("Scores responses by their length.", *_pair("select", "$plugin", "threshold_band")),
        "selector": Kind("Keeps responses that score high enough.", *_pair("select", "reward_difficulty", "$plugin")),
        "reweighter": Kind("Weighs responses by their score.", *_pair("reweight", "reward_difficulty", "$plugin")),
        "mixer": Kind("Draws domains that score low more often.", *_pair("mix", "reward_difficulty", "$plugin")),
    }
)
"""What can be generated: a plugin of its own, or a component of the built-in ones."""

_PRESET_POINT = """
[project.entry-points.dataflex_presets]
$plugin = "$package.presets"
"""
_PRESET_README = """
or as a preset: `+dataflex=$plugin`.
"""


def package_files(names: Names, kind: str, with_preset: bool) -> dict[str, str]:
    """Return the content of each file of the package, by its path below the package's folder."""
    chosen = KINDS[kind]
    values = {
        "distribution": names.distribution,
        "package": names.package,
        "plugin": names.plugin,
        "cls": names.cls,
        "kind": kind,
        "needs": ".".join(__version__.split(".")[:2]),
        "summary": chosen.summary,
    }
    values |= {
        "overrides": _fill(" \\\n  ".join(chosen.overrides), values),
        "settings": textwrap.indent(_fill(chosen.settings, values), "    "),
        "preset_point": _fill(_PRESET_POINT, values) if with_preset else "",
        "preset_readme": _fill(_PRESET_README, values) if with_preset else "",
    }
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{names.package}/__init__.py": f"{kind}.py",
        f"tests/test_{names.package}.py": f"test_{kind}.py",
    }
    if with_preset:
        templates[f"{names.package}/presets/dataflex/{names.plugin}.yaml"] = "preset.yaml"
    return {path: _fill((TEMPLATES / f"{name}.txt").read_text("utf-8"), values) for path, name in templates.items()}


def write_package(place: Path, files: Mapping[str, str]) -> None:
    """Write files below a directory, which is made if it is not there."""
    for path, text in files.items():
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def _fill(text: str, values: Mapping[str, str]) -> str:
    return Template(text).substitute(values)
