"""From a plugin's settings to a plugin object."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dataflex_hooks import discovery
from dataflex_hooks.config import PluginSettings
from dataflex_hooks.construct import Signature, construct, parameters_of
from dataflex_hooks.errors import ConfigError, Described, Problem, nearest
from dataflex_hooks.registry import KINDS, REGISTRY, USED_BY


@dataclass(frozen=True)
class BuiltPlugin:
    """A plugin object with its settings, the distribution it came from, and its parameters in force."""

    plugin: object
    settings: PluginSettings
    distribution: str | None = None
    version: str | None = None
    params: Mapping[str, object] = field(default_factory=dict)


def build_plugin(
    settings: PluginSettings, shared: Mapping[str, object], facts: Mapping[str, object] | None = None
) -> BuiltPlugin:
    """Load the plugin and construct it.

    Args:
        settings: one plugin's.
        shared: top-level settings for every plugin whose constructor names them; the plugin's own win.
        facts: what the host knows of the run, for every plugin that names it in ``host_keywords``.

    Raises:
        ConfigError: everything wrong, with full setting paths.
    """
    try:
        loaded = discovery.load(settings.plugin)
    except ConfigError as error:
        raise ConfigError(error.under(settings.plugin_setting)) from error.__cause__
    if loaded is None:
        raise ConfigError(
            [_unknown(settings.plugin).under(settings.plugin_setting), *_as_if_meant(settings, shared, facts)]
        )
    target = loaded.target
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        raise ConfigError([_no_class(target).under(settings.plugin_setting)])
    taken = {name: shared[name] for name in shared_taken(settings, shared)}
    asked: frozenset[str] = getattr(target, "host_keywords", frozenset())
    known = {name: value for name, value in (facts or {}).items() if name in asked}
    try:
        plugin = construct(target, settings.keywords, {**taken, **known}, reserved=asked)
    except ConfigError as error:
        raised = [_from(loaded, problem, settings.path) for problem in error.under(settings.path)]
        raise ConfigError(raised) from error.__cause__
    params = parameters_of(plugin, target, settings.keywords, taken, asked)
    return BuiltPlugin(plugin, settings, loaded.distribution, loaded.version, params)


def shared_taken(settings: PluginSettings, shared: Mapping[str, object]) -> frozenset[str]:
    """Which of the top-level settings a plugin takes, judged without building it; all where that cannot be known."""
    name = settings.plugin
    if not shared:
        return frozenset()
    try:
        loaded = discovery.load(name) or discovery.load(nearest(name, discovery.entry_point_names()) or name)
    except ConfigError:
        loaded = None
    if loaded is None or not callable(loaded.target):
        return frozenset(shared)
    return frozenset(shared) & frozenset(Signature.of(loaded.target).known)


def _from(loaded: discovery.Loaded, problem: Problem, path: str) -> Problem:
    """Say whose constructor it was, where it raised something: the plugin's, or one of a component's."""
    if problem.cause is None:
        return problem
    by = discovery.raised_by(problem.cause)
    if not by and problem.setting == path and loaded.distribution:
        by = f" (the plugin is from {loaded.distribution} {loaded.version})"
    return replace(problem, hint=f"{problem.hint}{by}") if by else problem


def _no_class(target: object) -> Problem:
    accepted = "a plugin class, or a function that returns a plugin"
    if inspect.ismodule(target):
        given = Described(f"the module {target.__name__}")
        return Problem("", given, accepted, f"name the class in it: {target.__name__}:ClassName")
    hint = f"point the entry point at the class: {discovery.path_of(type(target))}"
    return Problem("", discovery.describe(target), accepted, hint)


def _as_if_meant(
    settings: PluginSettings, shared: Mapping[str, object], facts: Mapping[str, object] | None
) -> list[Problem]:
    """Return what else is wrong, read as settings of the plugin whose name was probably meant."""
    meant = nearest(settings.plugin, discovery.entry_point_names())
    if meant is None:
        return []
    try:
        build_plugin(replace(settings, plugin=meant), shared, facts)
    except ConfigError as error:
        return error.problems
    return []


def _unknown(name: str) -> Problem:
    kind = next((kind for kind in KINDS if name in REGISTRY.names(kind)), None)
    problem = discovery.unknown_name(name, discovery.entry_point_names(), "the name of an installed plugin")
    if kind is None:
        return problem
    role = "scorer" if kind == "scorer" else f"actuator of mechanism {USED_BY[kind]!r}"
    return Problem("", name, problem.accepted, f"{name!r} is a {kind}: name it as {role}")
