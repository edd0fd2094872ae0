"""Checks on a plugin object before pluggy sees it; each catches a mistake that pluggy accepts in silence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from dataflex_hooks.decisions import EXCLUSIVE, SHARED, undeclared_parts
from dataflex_hooks.discovery import describe
from dataflex_hooks.errors import Described, Problem, did_you_mean, one_of
from dataflex_hooks.hookspecs import CALLED, HOOKS

_PROVIDABLE = EXCLUSIVE | SHARED


@dataclass(frozen=True)
class Declaration:
    """What a plugin says about itself: hooks it implements, parts of decisions it provides, fields it reads by hook."""

    hooks: tuple[str, ...]
    provides: frozenset[str]
    requires: Mapping[str, tuple[str, ...]]


def inspect_plugin(pluggy_manager: pluggy.PluginManager, plugin: object) -> tuple[Declaration, list[Problem]]:
    """Read a plugin's declarations and check them.

    Returns:
        The declaration, and the problems found, with empty settings; with any problem the plugin must not be
        registered.
    """
    empty = Declaration((), frozenset(), {})
    if inspect.isclass(plugin):
        hint = f"register an instance: {plugin.__name__}()"
        return empty, [Problem("", describe(plugin), "an instance of a plugin class", hint)]
    problems = [*_hashable_problems(plugin), *_state_problems(plugin)]
    hooks = []
    for name in dir(plugin):
        options = pluggy_manager.parse_hookimpl_opts(plugin, name)
        if options is None:
            problems += _undecorated_problems(plugin, name)
            continue
        hook = options.get("specname") or name
        if hook in HOOKS:
            hooks.append(hook)
            problems += _implementation_problems(getattr(plugin, name), name, hook, dict(options))
        elif not options.get("optionalhook"):
            hint = did_you_mean(hook, HOOKS) or "without @hookimpl it is an ordinary method"
            problems.append(Problem("", Described(f"@hookimpl on {name}, which is no hook"), one_of(HOOKS), hint))
    if not hooks and not problems:
        hint = "decorate one with @dataflex_hooks.hookimpl"
        problems.append(Problem("", describe(plugin), f"a plugin that implements a hook, {one_of(CALLED)}", hint))
    used, used_problems = _used_hooks(plugin, hooks)
    provides, provides_problems = _provides(plugin, used)
    requires, requires_problems = _requires(plugin)
    problems += [*used_problems, *provides_problems, *requires_problems]
    return Declaration(tuple(used), provides, requires), problems


def _hashable_problems(plugin: object) -> list[Problem]:
    try:
        hash(plugin)
    except TypeError:
        hint = "a dataclass is with @dataclass(eq=False)"
        return [Problem("", describe(plugin), "a plugin that is hashable", hint)]
    return []


def _state_problems(plugin: object) -> list[Problem]:
    methods = ("state_dict", "load_state_dict")
    there = [name for name in methods if callable(getattr(plugin, name, None))]
    if len(there) != 1:
        return []
    (missing,) = set(methods) - set(there)
    hint = "a checkpoint saves state through the one and restores it through the other"
    return [Problem("", Described(f"{there[0]} without {missing}"), "both methods or neither", hint)]


def _undecorated_problems(plugin: object, name: str) -> list[Problem]:
    if name not in HOOKS or not callable(getattr(plugin, name)):
        return []
    given = Described(f"method {name} without @hookimpl, which would never be called")
    return [Problem("", given, "hooks marked with @hookimpl", f"put @dataflex_hooks.hookimpl above {name}")]


def _implementation_problems(
    method: Callable[..., object], name: str, hook: str, options: Mapping[str, Any]
) -> list[Problem]:
    problems = []
    if hook not in CALLED:
        given = Described(f"hook {hook}, which this version of the trainer does not call yet")
        problems.append(Problem("", given, one_of(CALLED), f"remove {name}: it would be ignored"))
    if options.get("wrapper") or options.get("hookwrapper"):
        given = Described(f"{name} as a hook wrapper")
        problems.append(
            Problem("", given, "an ordinary hookimpl", "plugins are called one by one and see no other's result")
        )
    arguments = HOOKS[hook]
    for parameter in inspect.signature(method).parameters.values():
        described = Described(f"argument {parameter.name!r} of {name}")
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            accepted = f"plain arguments out of {', '.join(arguments)}"
            hint = "pluggy never passes *args, **kwargs, keyword-only or positional-only arguments"
            problems.append(Problem("", described, accepted, hint))
        elif parameter.name not in arguments:
            accepted = f"arguments of the hook: {', '.join(arguments)}"
            problems.append(Problem("", described, accepted, did_you_mean(parameter.name, arguments)))
        elif parameter.default is not parameter.empty:
            hint = f"remove '= {parameter.default!r}': pluggy never passes an argument that has a default"
            problems.append(Problem("", described, "an argument without a default", hint))
    return problems


def _used_hooks(plugin: object, implemented: list[str]) -> tuple[list[str], list[Problem]]:
    """Leave out the hooks that this object does not use: a plugin may say so in ``hooks``, by its parameters."""
    declared = getattr(plugin, "hooks", None)
    if declared is None:
        return implemented, []
    accepted = f"a tuple out of the hooks it implements: {', '.join(sorted(implemented))}"
    if isinstance(declared, str) or not isinstance(declared, (tuple, list, set, frozenset)):
        return implemented, [Problem("", Described(f"hooks = {declared!r}"), accepted)]
    unknown = [name for name in declared if name not in implemented]
    problems = [
        Problem("", Described(f"hooks = {declared!r}"), accepted, did_you_mean(name, implemented)) for name in unknown
    ]
    return [name for name in implemented if name in declared], problems


def _provides(plugin: object, hooks: list[str]) -> tuple[frozenset[str], list[Problem]]:
    undeclared = undeclared_parts(hook for hook in hooks if hook in HOOKS)
    declared = getattr(plugin, "provides", undeclared)
    if isinstance(declared, str) or not isinstance(declared, (set, frozenset, tuple, list)):
        return undeclared, [
            Problem("", Described(f"provides = {declared!r}"), f"a set out of {', '.join(sorted(_PROVIDABLE))}")
        ]
    problems = [
        Problem("", Described(f"provides = {{{name!r}}}"), one_of(_PROVIDABLE), did_you_mean(name, _PROVIDABLE))
        for name in declared
        if not isinstance(name, str) or name not in _PROVIDABLE
    ]
    return undeclared if problems else frozenset(declared), problems


def _requires(plugin: object) -> tuple[dict[str, tuple[str, ...]], list[Problem]]:
    declared = getattr(plugin, "requires", {})
    if not isinstance(declared, Mapping):
        hint = "for example {'post_advantage': ('advantages',)}"
        return {}, [Problem("", Described(f"requires = {declared!r}"), "a mapping of hook to field names", hint)]
    problems = []
    for hook, names in declared.items():
        if hook not in HOOKS:
            problems.append(Problem("", Described(f"requires[{hook!r}]"), one_of(HOOKS), did_you_mean(hook, HOOKS)))
        elif not isinstance(names, (tuple, list, set, frozenset)) or not all(isinstance(name, str) for name in names):
            problems.append(Problem("", Described(f"requires[{hook!r}] = {names!r}"), "a tuple of field names"))
    return {} if problems else {hook: tuple(names) for hook, names in declared.items()}, problems
