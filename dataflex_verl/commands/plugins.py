"""``dataflex plugins``: what is installed, from where, and which of it a configuration makes active."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from dataflex_verl.commands.check import REFUSED
from dataflex_verl.commands.checks import refusal
from dataflex_verl.commands.hydra_config import VerlMissing
from dataflex_verl.commands.lazy_torch import postpone_torch
from dataflex_verl.commands.look import look_at
from dataflex_verl.commands.tables import table


@dataclass
class Row:
    """A plugin or component.

    Attributes:
        name: as configurations name it.
        kind: ``plugin``, ``scorer``, ``selector``, ``reweighter``, ``mixer``, or ``?`` where it does not load.
        distribution, version: what declares it, None for ``module:Class``.
        hooks: hooks that a plugin implements.
        active: whether the given configuration names it.
        error: why it cannot be used, None if it can.
    """

    name: str
    kind: str
    distribution: str | None
    version: str | None
    hooks: tuple[str, ...] = ()
    active: bool = False
    error: str | None = None


def plugins(arguments: Sequence[str], every: bool = False, as_json: bool = False) -> int:
    """Print the list.

    Args:
        arguments: Hydra overrides; what they make active is marked.
        every: built-in components too, beside what entry points declare.
        as_json: print JSON.

    Returns:
        0, or 2 when the overrides give no configuration. A package that does not load is listed with its error.
    """
    postpone_torch()
    try:
        active = active_names(arguments)
    except VerlMissing as error:
        typer.echo(f"dataflex: {error}", err=True)
        return REFUSED
    except Uncomposable as error:
        typer.echo(str(error), err=True)
        return REFUSED
    rows = list(installed(every, active))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    typer.echo(table(("name", "kind", "from", "hooks", "active", "error"), [_cells(row) for row in rows]))
    return 0


class Uncomposable(Exception):
    """The overrides give no configuration; the text says why."""


def active_names(arguments: Sequence[str]) -> set[str]:
    """Return the names of plugins and components that a configuration names, right or wrong.

    Raises:
        Uncomposable: there is no configuration.
        VerlMissing: verl's configuration files are not here.
    """
    if not arguments:
        return set()
    from omegaconf import OmegaConf

    from dataflex_hooks.config import read

    checked = look_at(arguments)
    if checked.composed is None:
        raise Uncomposable(refusal(checked.findings.problems))
    names = set()
    for settings in read(OmegaConf.select(checked.composed.config, "dataflex"))[0].plugins:
        parts = [settings.plugin, *(settings.keywords.get(part) for part in ("scorer", "actuator"))]
        names |= {str(part.get("name") if isinstance(part, Mapping) else part) for part in parts if part}
    return names


def installed(every: bool, active: set[str]) -> Iterator[Row]:
    """Yield a row for each entry point, and those for built-in components and unlisted names of the configuration."""
    from dataflex_hooks.markers import GROUP
    from dataflex_hooks.registry import KINDS, REGISTRY

    listed = set()
    points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    for point in points:
        listed.add(point.name)
        yield _entry_point_row(point, [other for other in points if other.name == point.name], point.name in active)
    for kind in KINDS:
        for name in REGISTRY.names(kind):
            ours = REGISTRY.get(kind, name).__module__.startswith("dataflex_hooks.")
            if name not in listed and (every or name in active or not ours):
                listed.add(name)
                row = Row(name, kind, None, None, active=name in active)
                if ours:
                    row.distribution, row.version = _own_distribution()
                yield row
    for name in sorted(active - listed):
        yield _loaded_row(Row(name, "?", None, None, active=True))


def _entry_point_row(point: EntryPoint, same_name: Sequence[EntryPoint], active: bool) -> Row:
    dist = point.dist
    row = Row(point.name, "?", dist.name if dist else None, dist.version if dist else None, active=active)
    return _loaded_row(row) if len(same_name) == 1 else _clash(row, same_name)


def _clash(row: Row, same_name: Sequence[EntryPoint]) -> Row:
    from dataflex_hooks.discovery import source

    row.error = f"declared by {' and '.join(sorted({source(point) for point in same_name}))}: uninstall one"
    return row


def _loaded_row(row: Row) -> Row:
    from dataflex_hooks import discovery
    from dataflex_hooks.errors import ConfigError

    try:
        loaded = discovery.load(row.name)
    except ConfigError as error:
        row.error = error.problems[0].hint or str(error)
        return row
    if loaded is None:
        row.error = "nothing of this name is installed"
        return row
    row.kind, row.hooks, row.error = _describe(row.name, loaded.target)
    return row


def _describe(name: str, target: Any) -> tuple[str, tuple[str, ...], str | None]:
    """Return kind, hooks and what is wrong with a loaded target."""
    import pluggy

    from dataflex_hooks.hookspecs import HOOKS
    from dataflex_hooks.markers import GROUP
    from dataflex_hooks.registry import KINDS, REGISTRY

    for kind, base in KINDS.items():
        if inspect.isclass(target) and issubclass(target, base):
            return kind, (), None
    if inspect.ismodule(target):
        kinds = [kind for kind in KINDS if name in REGISTRY.names(kind)]
        error = None if kinds else f"the module {target.__name__} registers no component {name!r}"
        return " and ".join(kinds) or "?", (), error
    if not callable(target):
        return "?", (), "neither a class nor a function that returns a plugin"
    manager = pluggy.PluginManager(GROUP)
    hooks = tuple(hook for hook in HOOKS if manager.parse_hookimpl_opts(target, hook) is not None)
    error = "implements no hook" if inspect.isclass(target) and not hooks else None
    return "plugin", hooks, error


def _own_distribution() -> tuple[str, str]:
    from dataflex_hooks import __version__

    return "dataflex-verl", __version__


def _cells(row: Row) -> tuple[str, ...]:
    source = f"{row.distribution} {row.version}" if row.distribution else "-"
    hooks = ", ".join(row.hooks) or "-"
    return row.name, row.kind, source, hooks, "active" if row.active else "-", row.error or "-"
