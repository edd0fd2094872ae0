"""Calling a plugin's or component's constructor with configured keywords, every mistake reported with its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dataflex_hooks import discovery
from dataflex_hooks.as_built import AsBuilt, effective
from dataflex_hooks.components import Component
from dataflex_hooks.errors import NOTHING, ConfigError, Described, Problem, did_you_mean, one_of
from dataflex_hooks.registry import REGISTRY
from dataflex_hooks.scheduled import build_scheduled

HOST_FACTS = frozenset({"rollouts", "response_length", "prompt_length", "tokenizer_path", "rollout_log_probs"})
"""Facts of the run, as far as the host knows them: ``rollout.n``, the length limits of responses and prompts in tokens,
where the policy's tokenizer lies, and whether rows have the log-probs of the policy that wrote them. They go to plugins
that name them in ``host_keywords``, and the first two to components."""


@dataclass(frozen=True)
class Signature:
    """Keywords a constructor knows: ``known`` in order, ``required`` of them, and whether others may be given.

    ``defaults`` has a value for each that is known, None for those that are required.
    """

    known: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool
    defaults: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, factory: Callable[..., object]) -> Signature:
        """Read the signature of a class or function."""
        try:
            parameters = inspect.signature(factory).parameters.values()
        except ValueError:  # some built-in types have none
            return cls((), (), False)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            known=tuple(p.name for p in named),
            required=tuple(p.name for p in named if p.default is p.empty),
            takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
            defaults={p.name: None if p.default is p.empty else p.default for p in named},
        )


def construct(
    factory: Callable[..., object],
    keywords: Mapping[str, object],
    host: Mapping[str, object],
    reserved: frozenset[str] = frozenset(),
) -> object:
    """Call ``factory`` with the user's ``keywords`` and those of the host's that it takes.

    Args:
        factory: class or function; ``open_params = True`` on it admits keywords that only its ``**kwargs`` takes.
        keywords: what the user configured; wins over ``host``.
        host: what the host offers; names that the factory does not take are left out.
        reserved: names that only the host may give.

    Raises:
        ConfigError: unknown, missing or refused keywords. Settings are relative: the keyword's name, or ``""``.
    """
    signature = Signature.of(factory)
    known = [name for name in signature.known if name not in reserved]
    unknown = {} if getattr(factory, "open_params", False) else {k: v for k, v in keywords.items() if k not in known}
    problems = [Problem(name, given, one_of(known), did_you_mean(name, known)) for name, given in unknown.items()]
    accepted = {name: value for name, value in keywords.items() if name not in unknown}
    offered = {k: v for k, v in host.items() if signature.takes_any or k in signature.known}
    missing = [name for name in signature.required if name not in accepted and name not in offered]
    problems += [Problem(name, NOTHING, "a value: it has no default") for name in missing]
    if not missing:
        try:
            instance = factory(**{**offered, **accepted})
        except ConfigError as error:
            problems += error.problems
        except Exception as error:
            name = getattr(factory, "__qualname__", repr(factory))
            text = f"{name} raised {type(error).__name__}: {error}"
            problems.append(Problem("", dict(keywords), "values that the constructor takes", text, cause=error))
    if problems:
        raise ConfigError(problems)
    return instance


def parameters_of(
    built: object,
    factory: Callable[..., object],
    keywords: Mapping[str, object],
    host: Mapping[str, object],
    reserved: frozenset[str] = frozenset(),
) -> dict[str, object]:
    """Return the parameters in force of what :func:`construct` built with the same arguments, by name.

    The names of the run's domains are none of them unless they were configured here.
    """
    hidden = reserved | ({"domains"} - keywords.keys())
    defaults = {name: value for name, value in Signature.of(factory).defaults.items() if name not in hidden}
    return effective(defaults, keywords, host, getattr(built, "__dict__", {}))


def build_component(kind: str, setting: object, host: Mapping[str, object]) -> Component:
    """Build the component that ``setting`` names.

    Args:
        kind: ``scorer``, ``selector``, ``reweighter`` or ``mixer``.
        setting: a name, or ``{"name": ..., "params": {...}}``.
        host: keywords that the host adds.

    Raises:
        ConfigError: with settings relative to the component's own (``name``, ``params.low``).
    """
    if isinstance(setting, str):
        setting = {"name": setting}
    if not isinstance(setting, Mapping):
        given = NOTHING if setting is None else setting
        accepted = f"the name of a {kind}, {one_of(REGISTRY.names(kind))}; or {{name: ..., params: {{...}}}}"
        raise ConfigError([Problem("", given, accepted)])
    keys = ("name", "params")
    problems = [
        Problem(str(key), given, one_of(keys), did_you_mean(key, keys) or f"parameters of the {kind} go under params")
        for key, given in setting.items()
        if key not in keys
    ]
    params = setting.get("params")
    if params is not None and not isinstance(params, Mapping):
        problems.append(Problem("params", params, "a mapping of parameter names to values"))
        params = None
    name = setting.get("name")
    try:
        component = build_scheduled(lambda constant: _build(kind, name, constant, host), params or {})
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    component.name = str(name)
    cls = type(component)
    parameters = parameters_of(component, cls, params or {}, host, _reserved(cls))
    component.as_built = AsBuilt(discovery.path_of(cls), parameters, *discovery.distribution_of(cls.__module__))
    return component


def _build(kind: str, name: object, params: Mapping[str, Any], host: Mapping[str, object]) -> Component:
    if not isinstance(name, str):
        given = NOTHING if name is None else name
        raise ConfigError([Problem("name", given, f"the name of a {kind}, {one_of(REGISTRY.names(kind))}")])
    try:
        cls = REGISTRY.get(kind, name)
    except ConfigError as error:
        raise ConfigError(error.under("name")) from error.__cause__
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError([Problem("name", Described(name), f"a complete {kind}", f"it does not define {missing}")])
    facts = {name: value for name, value in host.items() if name not in HOST_FACTS or name in cls.host_keywords}
    try:
        return cast(Component, construct(cls, params, facts, reserved=_reserved(cls)))
    except ConfigError as error:
        raise ConfigError(error.under("params")) from error.__cause__


def _reserved(cls: type[Component]) -> frozenset[str]:
    return cls.host_keywords | {"scorer"}
