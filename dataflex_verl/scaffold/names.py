"""The names of a new package, and what speaks against them."""

from __future__ import annotations

import keyword
import re
import sys
import unicodedata
from dataclasses import dataclass
from importlib import metadata
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
_LONGEST = 100
"""A folder and a file have to be called by it, with more around it."""
_PREFIX = "dataflex_"
_OTHERS = "choose another; dataflex plugins --all and dataflex presets list those that are taken"
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


def name_problem(given: str) -> Problem | None:
    """Return what speaks against a package of that name, or None.

    A preset of the name does, whether or not the package brings one: a preset configures the plugin under its name,
    and that is the label under which the new plugin is configured too.
    """
    if not re.fullmatch(_PATTERN, given):
        meant = _in_ascii(given)
        return Problem("NAME", given, _ACCEPTED, f"did you mean {meant!r}?" if meant else None)
    if len(given) > _LONGEST:
        return Problem("NAME", given, f"at most {_LONGEST} letters and digits")
    names = Names.of(given)
    if names.plugin in _YAML or not names.cls.isidentifier() or keyword.iskeyword(names.cls):
        given_plugin = Described(f"{given!r}, a plugin {names.plugin!r} with the class {names.cls}")
        return Problem("NAME", given_plugin, "a name whose plugin and class are ordinary names in YAML and Python")
    taken, hint = _taken_by(names.plugin), _OTHERS
    if taken is None:
        taken, hint = _no_module(names.package) or _installed(given), None
    return Problem("NAME", Described(f"{given!r}, and {taken}"), "a name that nothing has yet", hint) if taken else None


def place_problem(place: Path) -> Problem | None:
    """Return what keeps a package from being written there, or None."""
    if place.is_dir() and not any(place.iterdir()):
        return None
    if place.exists() or place.is_symlink():
        what = "a directory with something in it" if place.is_dir() else "a file"
        return Problem("--out", Described(f"{place}, {what}"), "a directory that is empty or not there yet")
    return None


def _in_ascii(given: str) -> str | None:
    """Return the name that was probably meant, without accents and capitals; None where letters have no ASCII form."""
    letters = "".join(c for c in unicodedata.normalize("NFKD", given.casefold()) if not unicodedata.combining(c))
    meant = re.sub(r"[^a-z0-9]+", "-", letters).strip("-")
    lost = any(c.isalnum() and not c.isascii() for c in letters)
    return meant if not lost and re.fullmatch(_PATTERN, meant) and name_problem(meant) is None else None


def _taken_by(plugin: str) -> str | None:
    if plugin in LATER:
        return LATER[plugin]
    for point in entry_points(group=GROUP, name=plugin):
        return f"{source(point)} has a plugin {plugin!r}"
    for kind in KINDS:
        if plugin in REGISTRY.names(kind):
            return f"there is a {kind} {plugin!r}"
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


def _installed(distribution: str) -> str | None:
    try:
        there = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    return f"{there.name} {there.version} is installed, which pip would replace"
