"""A plugin as the manager holds it, and what has to be true before it is let in."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import pluggy

from dataflex_hooks.as_built import plain
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.components import Component
from dataflex_hooks.config import PluginSettings
from dataflex_hooks.decisions import ADJUSTING, DECISION_OF, EXCLUSIVE, Decision, given_parts
from dataflex_hooks.discovery import describe, path_of, raised_by
from dataflex_hooks.errors import DecisionError, Described, Origin, PluginError, Problem
from dataflex_hooks.loader import BuiltPlugin
from dataflex_hooks.metric_names import plugin_metric
from dataflex_hooks.registration import Declaration, inspect_plugin

_log = logging.getLogger("dataflex_hooks")

GROUP_ESTIMATORS = frozenset(
    {
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "rloo",
        "rloo_vectorized",
        "opo",
        "gpg",
        "gdpo",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }
)
"""verl's advantage estimators that compare several rollouts of a prompt."""


@dataclass(frozen=True)
class Entry:
    """A plugin, its settings, where it came from, and what it declares."""

    built: BuiltPlugin
    declared: Declaration

    @property
    def label(self) -> str:
        """Its name in the run."""
        return self.built.settings.label

    @property
    def plugin(self) -> Any:
        """The plugin object."""
        return self.built.plugin

    @property
    def source(self) -> str:
        """Distribution and version, or the class where there is no distribution."""
        built = self.built
        return f"{built.distribution} {built.version}" if built.distribution else built.settings.plugin

    def origin(self, hook: str, step: int) -> Origin:
        """Return what an error in this plugin's ``hook`` says about where it happened."""
        return Origin(self.label, hook, step, self.built.distribution, self.built.version)

    def is_called(self, hook: str, step: int) -> bool:
        """Whether it implements ``hook`` and is past its warm-up at ``step``."""
        return hook in self.declared.hooks and step >= self.built.settings.warmup_step

    @property
    def declares(self) -> bool:
        """Whether it has `provides`; without, ``declared.provides`` follows from its hooks."""
        return hasattr(self.plugin, "provides")

    @property
    def adjusts(self) -> bool:
        """Whether it gives rewards a scale or a shift."""
        return bool(ADJUSTING & self.declared.provides)

    @property
    def reward_turn(self) -> int:
        """When it is called at ``post_reward``: 0 the owner of rewards, 1 adjusters, 2 those that see what applies."""
        return 0 if "rewards" in self.declared.provides else 1 if self.adjusts else 2

    def check(self, decision: object, origin: Origin) -> Decision | None:
        """Return ``decision``; raise DecisionError unless it is None, or of the hook's type with what is declared."""
        wanted = DECISION_OF[origin.hook]
        if decision is None:
            return None
        if not isinstance(decision, wanted):
            raise DecisionError(origin, f"must return {wanted.__name__} or None, got {describe(decision)}")
        undeclared = given_parts(decision) - self.declared.provides
        if undeclared:
            given = ", ".join(sorted(undeclared))
            declared = ", ".join(sorted(self.declared.provides)) or "nothing"
            text = f"returned {given}, but provides only {declared}: add it to `provides`"
            if not self.declares:
                cure = f"provides = {{{', '.join(repr(part) for part in sorted(undeclared))}}}"
                text = f"returned {given}, and has no `provides`, which stands for {declared}: write {cure}"
            raise DecisionError(origin, text)
        _check_metrics(self.label, decision.metrics, origin)
        return decision

    def disable_or_raise(self, origin: Origin, error: Exception, disabled: set[str]) -> None:
        """Do what ``on_error`` says of a failed call: add the label to ``disabled``, or raise.

        Raises:
            PluginError: with ``error`` as its cause, or ``error`` itself where it is one.
        """
        if self.built.settings.on_error == "disable":
            by = raised_by(error, origin.distribution)
            _log.error("%s failed%s and is disabled for the rest of the run", origin, by, exc_info=error)
            disabled.add(self.label)
        elif isinstance(error, PluginError):
            raise error
        else:
            raise failure(origin, error) from error

    def describe(self) -> dict[str, Any]:
        """Return one row of the plan, in plain values."""
        components = _components(self.plugin)
        own = {name: value for name, value in self.built.params.items() if name not in components}
        return {
            "label": self.label,
            "plugin": self.built.settings.plugin,
            "distribution": self.built.distribution,
            "version": self.built.version,
            "hooks": list(self.declared.hooks),
            "scorer": _component_name(self.plugin, "scorer"),
            "actuator": _component_name(self.plugin, "actuator"),
            "path": self.built.settings.path,
            "effect": self._effect(),
            "advantages": getattr(self.plugin, "advantages", None),
            "warmup_step": self.built.settings.warmup_step,
            "on_error": self.built.settings.on_error,
            "slow_plugin_seconds": self.built.settings.slow_plugin_seconds,
            "provides": sorted(self.declared.provides),
            "declares": self.declares,
            "per_token": bool(getattr(self.plugin, "per_token", False)),
            "normalize": getattr(self.plugin, "normalize", None),
            "keywords": plain(self.built.settings.keywords),
            "params": plain(own),
            "components": components,
        }

    def _effect(self) -> str | None:
        """What becomes of rows not kept: what the plugin says, else a drop if it declares ``keep``."""
        drops = self.declares and "keep" in self.declared.provides
        effect: str | None = getattr(self.plugin, "effect", None)
        return effect or ("drop" if drops else None)


def failure(origin: Origin, error: Exception, what: str = "") -> PluginError:
    """Return what says that a plugin raised ``error``, after ``what``; and from which package, where from another."""
    return PluginError(origin, f"{what}{type(error).__name__}: {error}{raised_by(error, origin.distribution)}")


def _check_metrics(label: str, metrics: object, origin: Origin) -> None:
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise DecisionError(origin, f"metrics is {type(metrics).__name__}; accepted: a mapping of names to numbers")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise DecisionError(origin, f"metrics has the name {name!r}; accepted: names that are text")
        if not isinstance(value, Real) or not math.isfinite(value):
            raise DecisionError(origin, f"metrics[{name!r}] is {value!r}; accepted: a finite number")
        try:
            plugin_metric(label, name)
        except ValueError as error:
            raise DecisionError(origin, str(error)) from None


def admit(
    pluggy_manager: pluggy.PluginManager, built: BuiltPlugin, others: Iterable[Entry]
) -> tuple[Entry, list[Problem]]:
    """Check a plugin against the hook specifications and against the plugins before it.

    Returns:
        Its entry, and the problems found; with any, the plugin must not be registered.
    """
    label, path = built.settings.label, built.settings.path
    declared, found = inspect_plugin(pluggy_manager, built.plugin)
    entry = Entry(built, declared)
    problems = [problem.under(built.settings.plugin_setting) for problem in found]
    for other in others:
        if other.label == label:
            problems.append(Problem(path, label, "a label that no other plugin of the run has"))
        if other.plugin is built.plugin:
            hint = f"it is registered as {other.label!r} already"
            problems.append(Problem(path, describe(built.plugin), "one object for each label", hint))
        for part in sorted(declared.provides & other.declared.provides & EXCLUSIVE):
            hint = "remove one of the two" + (", or let one adjust: scale and shift" if part == "rewards" else "")
            given = Described(f"{part} from {label!r} ({entry.source}) and {other.label!r} ({other.source})")
            problems.append(Problem(path, given, f"one plugin that provides {part}", hint))
    return entry, problems


def group_problems(built: BuiltPlugin, estimator: str, has_groups: bool | None) -> list[Problem]:
    """Say so if the plugin compares rollouts of one prompt and a prompt has only one.

    Args:
        built: a plugin; ``needs_groups = True`` on it says that it does.
        estimator: the run's advantage estimator.
        has_groups: whether ``rollout.n > 1``; None leaves that unchecked.
    """
    if not getattr(built.plugin, "needs_groups", False):
        return []
    scorer = _component_name(built.plugin, "scorer")
    setting = f"{built.settings.path}.scorer.name" if scorer else built.settings.plugin_setting
    given = scorer or built.settings.plugin
    problems = estimator_problems(setting, given, estimator)
    if has_groups is False:
        hint = "it compares rollouts of one prompt, and a prompt has one: set actor_rollout_ref.rollout.n > 1"
        problems.append(Problem(setting, given, "a scorer that needs no groups", hint))
    return problems


def estimator_problems(setting: str, given: object, estimator: str) -> list[Problem]:
    """Say so if something that needs groups meets an estimator that compares none."""
    if estimator in GROUP_ESTIMATORS:
        return []
    hint = f"it compares rollouts of one prompt; algorithm.adv_estimator={estimator} does not: use grpo or rloo"
    return [Problem(setting, given, "a scorer that needs no groups", hint)]


def loss_problems(entry: Entry, coefficients: LossCoefficients) -> list[Problem]:
    """Say so if the plugin decides per token (``per_token = True`` on it) and the loss cannot follow."""
    if coefficients.per_token or not getattr(entry.plugin, "per_token", False):
        return []
    actuator = _component_name(entry.plugin, "actuator")
    setting = f"{entry.built.settings.path}.actuator.name" if actuator else entry.built.settings.plugin_setting
    accepted = f"decisions per response: the loss ({coefficients.source}) is not linear in per-token weights"
    return [Problem(setting, actuator or entry.built.settings.plugin, accepted, "or use loss_mode=vanilla")]


def unconfigured(label: str, plugin: object, usual: PluginSettings) -> BuiltPlugin:
    """Wrap a plugin object that a program made itself; ``usual`` says from when it is called, and what if it fails."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    return BuiltPlugin(plugin, replace(usual, label=label, plugin=path_of(cls), path=f"dataflex.plugins.{label}"))


def _components(plugin: Any) -> dict[str, dict[str, Any]]:
    """How the plugin's scorer and actuator were built, as far as the host built them."""
    found = {}
    for role in ("scorer", "actuator"):
        component = getattr(plugin, role, None)
        if isinstance(component, Component) and component.as_built is not None:
            schedules = {name: schedule.shape for name, schedule in component.schedules.items()}
            found[role] = {"name": component.name, **component.as_built.describe(), "schedules": schedules}
    return found


def _component_name(plugin: Any, attribute: str) -> str | None:
    name = getattr(getattr(plugin, attribute, None), "name", None)
    return name if isinstance(name, str) else None
