"""The names of a new package, and what speaks against them."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from dataflex_hooks.config import LATER
from dataflex_hooks.discovery import source
from dataflex_hooks.errors import Described, Problem
from dataflex_hooks.markers import GROUP
from dataflex_hooks.registry import KINDS, REGISTRY
from dataflex_verl.presets.providers import all_presets

_PATTERN = r"[a-z][a-z0-9]*([-_][a-z0-9]+)*"
_ACCEPTED = "lower-case letters, digits, - and _, beginning with a letter, such as keep-short"
_PREFIX = "dataflex_"
_YAML = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that YAML reads as something else than text."""


@dataclass(frozen=True)
class Names:
    """What a package of plugins goes by.

    Attributes:
        distribution: what pip calls it, ``dataflex-keep-short``.
        package: what Python calls it, ``dataflex_keep_short``.
        plugin: what configurations call it, ``keep_short``.
        cls: its class, ``KeepShort``.
    """

    distribution: str
    package: str
    plugin: str
    cls: str

    @classmethod
    def of(cls, distribution: str) -> Names:
        """Derive the others from the name of the distribution."""
        package = distribution.replace("-", "_")
        plugin = package.removeprefix(_PREFIX)
        return cls(distribution, package, plugin, "".join(part.capitalize() for part in plugin.split("_")))


def name_problem(given: str, with_preset: bool) -> Problem | None:
    """Return what speaks against a package of that name, or None."""
    if not re.fullmatch(_PATTERN, given):
        meant = re.sub(r"[^a-z0-9]+", "-", given.lower()).strip("-")
        hint = f"did you mean {meant!r}?" if re.fullmatch(_PATTERN, meant) else None
        return Problem("NAME", given, _ACCEPTED, hint)
    names = Names.of(given)
    if names.plugin in _YAML or not names.cls.isidentifier() or keyword.iskeyword(names.cls):
        given_plugin = Described(f"{given!r}, a plugin {names.plugin!r} with the class {names.cls}")
        return Problem("NAME", given_plugin, "a name whose plugin and class are ordinary names in YAML and Python")
    taken = _taken_by(names.plugin, with_preset) or _no_module(names.package)
    return Problem("NAME", Described(f"{given!r}, and {taken}"), "a name that nothing has yet") if taken else None


def place_problem(place: Path) -> Problem | None:
    """Return what keeps a package from being written there, or None."""
    if place.is_dir() and not any(place.iterdir()):
        return None
    if place.exists() or place.is_symlink():
        what = "a directory with something in it" if place.is_dir() else "a file"
        return Problem("--out", Described(f"{place}, {what}"), "a directory that is empty or not there yet")
    return None


def _taken_by(plugin: str, with_preset: bool) -> str | None:
    if plugin in LATER:
        return LATER[plugin]
    for point in entry_points(group=GROUP, name=plugin):
        return f"{source(point)} has a plugin {plugin!r}"
    for kind in KINDS:
        if plugin in REGISTRY.names(kind):
            return f"there is a {kind} {plugin!r}"
    if with_preset:
        for preset in all_presets()[0]:
            if preset.name == plugin:
                return f"{preset.source} has a preset {plugin!r}"
    return None


def _no_module(package: str) -> str | None:
    if package == "tests":
        return "its tests stand in a folder of that name"
    if keyword.iskeyword(package):
        return "that is a word of Python"
    if package in sys.stdlib_module_names or find_spec(package) is not None:
        return f"there is a module {package} already"
    return None
