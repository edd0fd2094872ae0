"""Components by name: ``@register_scorer("name")`` and its siblings, and the lookup behind a configured name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from dataflex_hooks import discovery
from dataflex_hooks.components import Component, Mixer, Reweighter, Scorer, Selector
from dataflex_hooks.errors import ConfigError, Problem, did_you_mean

C = TypeVar("C", bound=type[Component])
Names = list[str]

KINDS: Mapping[str, type[Component]] = MappingProxyType(
    {"scorer": Scorer, "selector": Selector, "reweighter": Reweighter, "mixer": Mixer},
)
USED_BY: Mapping[str, str] = MappingProxyType({"selector": "select", "reweighter": "reweight", "mixer": "mix"})
"""Which mechanism an actuator of each kind belongs to."""

_BUILT_IN = (
    "dataflex_hooks.scorers",
    "dataflex_hooks.selectors",
    "dataflex_hooks.reweighters",
    "dataflex_hooks.mixers",
)


class Registry:
    """Component classes by kind (``scorer``, ``selector``, ``reweighter``, ``mixer``) and name."""

    def __init__(self) -> None:
        self._classes: dict[str, dict[str, type[Component]]] = {kind: {} for kind in KINDS}

    def register(self, kind: str, name: str) -> Callable[[C], C]:
        """Return a class decorator that registers a component.

        Raises (from the decorator):
            TypeError: what is decorated is no class derived from the base class of its kind.
            ValueError: another class has the name already; the message names both.
        """

        def decorate(cls: C) -> C:
            base = KINDS[kind]
            if not (inspect.isclass(cls) and issubclass(cls, base)):
                raise TypeError(f"@register_{kind}({name!r}) needs a class derived from {base.__name__}, got {cls!r}")
            if not cls.__module__.startswith("dataflex_hooks."):
                _import_built_in()
            other = self._classes[kind].get(name)
            # A reloaded module registers a new object of the same class.
            if other is not None and _path(other) != _path(cls):
                raise ValueError(f"{kind} {name!r} is already {_path(other)}; {_path(cls)} needs another name")
            self._classes[kind][name] = cls
            return cls

        return decorate

    def names(self, kind: str) -> Names:
        """Names registered for the kind, sorted; built-in ones are always among them."""
        _import_built_in()
        return sorted(self._classes[kind])

    def get(self, kind: str, name: str) -> type[Component]:
        """Return the class behind ``name``: registered, or an entry point's, or ``module:Class``.

        Raises:
            ConfigError: nothing of this kind has the name; one problem, whose setting is empty.
        """
        _import_built_in()
        if name in self._classes[kind]:
            return self._classes[kind][name]
        loaded = discovery.load(name)
        if loaded is None:
            raise ConfigError([self._unknown(kind, name)])
        if name in self._classes[kind]:
            return self._classes[kind][name]
        target = loaded.target
        if inspect.isclass(target) and issubclass(target, KINDS[kind]):
            return target
        accepted = f"the name of a {kind} (a class derived from {KINDS[kind].__name__})"
        if inspect.ismodule(target):
            own = [name for name, cls in self._classes[kind].items() if cls.__module__ == target.__name__]
            hint = f"the module {target.__name__} registers no {kind} {name!r}, only {', '.join(sorted(own)) or 'none'}"
            raise ConfigError([Problem("", name, accepted, hint)])
        raise ConfigError([Problem("", name, accepted, f"{name!r} is {discovery.describe(target)}")])

    def build(
        self,
        kind: str,
        name: str,
        runtime: Mapping[str, object] | None = None,
        cfg: Mapping[str, Any] | None = None,
    ) -> Component:
        """Build the component behind ``name``, as a run does.

        Args:
            kind: as for :meth:`get`.
            name: as for :meth:`get`.
            runtime: keywords of the host (``scorer``, ``domains``, ``window``); what the class does not take is left
                out.
            cfg: its parameters.

        Raises:
            ConfigError: with everything wrong with name and parameters.
        """
        from dataflex_hooks.construct import build_component  # reads this module's registry

        return build_component(kind, {"name": name, "params": dict(cfg or {})}, dict(runtime or {}))

    def list(self, kind: str) -> Names:
        """Return :meth:`names`, under its published name."""
        return self.names(kind)

    def _unknown(self, kind: str, name: str) -> Problem:
        known = self.names(kind)
        other = next((other for other in KINDS if name in self._classes[other]), None)
        if other is None:
            problem = discovery.unknown_name(name, known, f"the name of a {kind}")
            # What kind an entry point is shows only when it is loaded, so it is no more than a hint here.
            return replace(problem, hint=problem.hint or did_you_mean(name, discovery.entry_point_names()))
        belongs = f": it belongs to mechanism {USED_BY[other]!r}" if other in USED_BY else ""
        return Problem("", name, f"the name of a {kind}, {', '.join(known)}", f"{name!r} is a {other}{belongs}")


def _import_built_in() -> None:
    for module in _BUILT_IN:
        importlib.import_module(module)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


REGISTRY = Registry()


def register_scorer(name: str) -> Callable[[C], C]:
    """Register the decorated class as scorer ``name``."""
    return REGISTRY.register("scorer", name)


def register_selector(name: str) -> Callable[[C], C]:
    """Register the decorated class as selector ``name``."""
    return REGISTRY.register("selector", name)


def register_reweighter(name: str) -> Callable[[C], C]:
    """Register the decorated class as reweighter ``name``."""
    return REGISTRY.register("reweighter", name)


def register_mixer(name: str) -> Callable[[C], C]:
    """Register the decorated class as mixer ``name``."""
    return REGISTRY.register("mixer", name)
