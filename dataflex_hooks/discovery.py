"""Finding plugins and components by name: entry points of the group ``dataflex_hooks``, or ``module:Class``.

Entry points are loaded one by one and only when something names them, so that a broken package cannot stop a run that
does not use it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from os.path import commonprefix
from pathlib import Path

from dataflex_hooks._version import __version__
from dataflex_hooks.errors import NOTHING, ConfigError, Described, Problem, did_you_mean, one_of
from dataflex_hooks.markers import GROUP

_OURS = frozenset({"dataflex_hooks", "dataflex_verl"})
IMPORTABLE = "a name that can be imported"
"""What a problem of a failed import accepts; its cause has the traceback."""


@dataclass(frozen=True)
class Loaded:
    """A loaded object and the distribution that declares it (None for ``module:Class``)."""

    target: object
    distribution: str | None
    version: str | None


def entry_point_names() -> list[str]:
    """Names in the entry-point group, of all installed distributions, sorted; nothing is imported."""
    return sorted({entry_point.name for entry_point in entry_points(group=GROUP)})


def find_entry_point(name: str) -> EntryPoint | None:
    """Return the entry point of that name, or None.

    Raises:
        ConfigError: two distributions declare the name.
    """
    found = list(entry_points(group=GROUP, name=name))
    if len(found) > 1:
        sources = " and ".join(sorted(f"{source(entry_point)} ({entry_point.value})" for entry_point in found))
        accepted = "a name that one installed distribution declares, or module:Class"
        raise ConfigError([Problem("", name, accepted, f"{sources} both declare it: uninstall one")])
    return found[0] if found else None


def load(name: str) -> Loaded | None:
    """Load ``name``: the entry point of that name, or the object that ``module:Class`` points at; None if neither.

    Raises:
        ConfigError: two distributions declare the name, its distribution needs a newer version of this package, or
            importing it fails (the exception is chained).
    """
    entry_point = find_entry_point(name)
    if entry_point is None:
        if not re.fullmatch(r"[\w.]+:[\w.]+", name):
            return None
        entry_point = EntryPoint(name=name, value=name, group=GROUP)
    needed = _newer_version_needed(entry_point)
    if needed is not None:
        hint = f"{source(entry_point)} needs dataflex-verl {needed}: upgrade with pip install -U dataflex-verl"
        given = Described(f"{name!r}, made for a newer version")
        raise ConfigError([Problem("", given, f"a plugin that works with dataflex-verl {__version__}", hint)])
    try:
        target = entry_point.load()
    except Exception as error:
        by = f" from {source(entry_point)}" if entry_point.dist else ""
        hint = f"importing {entry_point.value}{by} raised {type(error).__name__}: {error}"
        hint += "" if entry_point.dist else _where_it_has_to_be(entry_point.module, error)
        raise ConfigError([Problem("", name, IMPORTABLE, hint, cause=error)]) from error
    dist = entry_point.dist
    return Loaded(target, dist.name if dist else None, dist.version if dist else None)


def _where_it_has_to_be(module: str, error: Exception) -> str:
    """Say how Python finds a module of the user's, where it is that module that it did not find."""
    top = module.split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != top:
        return ""
    here = next((place for place in (f"{top}.py", f"{top}/") if Path(place).exists()), None)
    found = f"; {here} is in the current directory, which is not on it" if here else ""
    return f": its directory must be on PYTHONPATH, also the current one (PYTHONPATH=. dataflex ...){found}"


def _newer_version_needed(entry_point: EntryPoint) -> str | None:
    """Return the lower bound on this package in the metadata of the entry point's distribution, if it is not met."""
    for requirement in (entry_point.dist.requires if entry_point.dist else None) or ():
        ours = re.match(r"dataflex[-_.]verl(?![-\w.])([^;]*)", requirement.strip(), re.IGNORECASE)
        bound = re.search(r"(?:>=|~=|==|>)\s*(\d+(?:\.\d+)*)", ours[1]) if ours else None
        if bound and _release(bound[1]) > _release(__version__):
            return bound[0].replace(" ", "")
    return None


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(int(part) for part in match[0].split(".")) if match else ()
    return numbers + (0,) * (4 - len(numbers))


def distribution_of(module: str) -> tuple[str | None, str | None]:
    """Return name and version of the plugin package that a module belongs to, twice None where it is in none.

    Judged by the entry points of our group: of packages that share a namespace, the one with most in common, and more
    than the namespace.
    """
    parts = module.split(".")
    if parts[0] in _OURS:
        return "dataflex-verl", __version__

    def common(point: EntryPoint) -> int:
        return len(commonprefix([parts, point.module.split(".")]))

    best = max(entry_points(group=GROUP), key=common, default=None)
    if best is None or best.dist is None or common(best) <= _namespaces(parts):
        return None, None
    return best.dist.name, best.dist.version


def _namespaces(parts: list[str]) -> int:
    """How many of a module's outer packages are namespaces, which several distributions may fill."""
    outer = [sys.modules.get(".".join(parts[:depth])) for depth in range(1, len(parts))]
    own = (depth for depth, package in enumerate(outer) if getattr(package, "__file__", None) is not None)
    return next(own, len(outer))


def path_of(cls: type) -> str:
    """Return ``module:Class``, the name by which a class can be configured."""
    return f"{cls.__module__}:{cls.__qualname__}"


def source(entry_point: EntryPoint) -> str:
    """Return ``name version`` of the distribution that declares ``entry_point``."""
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist else "no distribution"


def raised_by(error: BaseException, known: str | None = None) -> str:
    """Say which plugin package an exception comes from: ``" (raised in acme.judge, from acme 1.2)"``.

    The innermost frame of a package with entry points in our group counts: a scorer of one package fails inside a
    plugin of another. Empty where there is none, or where it is the distribution ``known``.
    """
    owners = {entry_point.module.split(".")[0]: entry_point for entry_point in entry_points(group=GROUP)}
    owners.pop(__name__.split(".")[0], None)
    found, frame = "", error.__traceback__
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__", ""))
        owner = owners.get(module.split(".")[0])
        if owner is not None and owner.dist is not None:
            found = "" if owner.dist.name == known else f" (raised in {module}, from {source(owner)})"
        frame = frame.tb_next
    return found


def unknown_name(given: object, known: list[str], what: str) -> Problem:
    """Return the problem of a name that nothing answers to; its setting is left to the caller."""
    shown = NOTHING if given is None else given
    accepted = f"{what}, {one_of(known)}; or module:Class"
    return Problem("", shown, accepted, did_you_mean(given, known) if isinstance(given, str) else None)


def describe(target: object) -> Described:
    """Return a short description of an object for a message."""
    if isinstance(target, type):
        return Described(f"the class {target.__module__}.{target.__qualname__}")
    cls = type(target)
    return Described(f"an object of {cls.__module__}.{cls.__qualname__}")
