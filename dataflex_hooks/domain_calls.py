"""The part of the hook manager that concerns domains: start, observation, and ``on_domain_stats``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataflex_hooks.batch import DomainStats, PromptBatch, RolloutBatch, stored_names
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import RolloutDecision
from dataflex_hooks.entries import Entry, failure
from dataflex_hooks.errors import ConfigError, DecisionError, Origin
from dataflex_hooks.plugin_calls import PluginCalls

Shares = NDArray[np.float64]


class DomainCalls(PluginCalls):
    """Laid under the hook manager.

    A plugin that sets proportions may have, besides the hook: ``domains`` (names it was configured with, or None),
    ``start(domains)`` (called once, before the first prompt; may return proportions), ``observes`` (a hook's name) and
    ``observe(batch, ctx)`` (called there in every step, warm-up included, with all rows and those that were evicted).
    """

    @property
    def mixes(self) -> bool:
        """Whether any plugin wants to set proportions, so that prompts come from the domain sampler."""
        return bool(self._using("on_domain_stats"))

    def configured_domains(self) -> tuple[str, ...] | None:
        """Names that the configuration lists, at the top level or for the plugin; None leaves them to the dataset."""
        listed = self.config.shared.get("domains")
        if isinstance(listed, (list, tuple)):
            return tuple(str(name) for name in listed)
        own = (getattr(entry.plugin, "domains", None) for entry in self._using("on_domain_stats"))
        return next((tuple(names) for names in own if names), None)

    def start_domains(self, domains: Sequence[str]) -> Shares | None:
        """Tell the plugins the domains; return the proportions to begin with, (K,), or None for the dataset's.

        Raises:
            ConfigError: a plugin cannot have these domains.
            PluginError: a plugin failed, or returned what it must not.
        """
        first: Shares | None = None
        for entry in self._using("on_domain_stats"):
            begin = getattr(entry.plugin, "start", None)
            if begin is None:
                continue
            origin = entry.origin("start", 0)
            try:
                given = begin(tuple(domains))
            except ConfigError as error:
                raise ConfigError(error.under(entry.built.settings.path)) from error.__cause__
            except Exception as error:
                raise failure(origin, error) from error
            if given is not None and entry.built.settings.warmup_step == 0:
                first = resolve_proportions(given, tuple(domains), origin)
        return first

    def scorer_means(self, step: int) -> dict[str, float]:
        """Return the configured scorer's mean of the step by domain, as far as a plugin tells."""
        means: dict[str, float] = {}
        for entry in self._using("on_domain_stats"):
            tell = getattr(entry.plugin, "scorer_means", None)
            try:
                means.update(tell(step) if tell is not None else {})
            except Exception as error:
                entry.disable_or_raise(entry.origin("scorer_means", step), error, self._disabled)
        return means

    def observed_fields(self, hook: str) -> frozenset[str]:
        """Batch fields that observers at ``hook`` declare, as stored; empty when nobody observes there."""
        mixing = self._using("on_domain_stats")
        observers = [entry for entry in mixing if getattr(entry.plugin, "observes", None) == hook]
        names = {name for entry in observers for name in entry.declared.requires.get(hook, ())}
        return stored_names(names)

    def observe(self, hook: str, batch: RolloutBatch, ctx: StepContext) -> None:
        """Hand rows to the observers at ``hook``, whatever their warm-up.

        Raises:
            PluginError: an observer failed.
        """
        for entry in self._using("on_domain_stats"):
            if getattr(entry.plugin, "observes", None) != hook or not hasattr(entry.plugin, "observe"):
                continue
            origin = entry.origin("observe", ctx.step)

            def act(entry: Entry = entry) -> tuple[object, None]:
                entry.plugin.observe(batch, ctx)
                return None, None

            self._guarded(entry, origin, batch, act, decides=False)

    def on_domain_stats(self, stats: DomainStats, ctx: StepContext) -> Shares | None:
        """Call ``on_domain_stats`` when it is due: past the warm-up, every ``update_step`` steps.

        Returns:
            The new proportions (K,) float64, summing to 1, or None to leave them.

        Raises:
            PluginError: a plugin failed, or returned what it must not.
        """
        if ctx.step % self.config.update_step:
            return None
        decided: Shares | None = None
        for entry in self._called_at("on_domain_stats", ctx.step):
            origin = entry.origin("on_domain_stats", ctx.step)

            def resolve(decision: Any, origin: Origin = origin) -> Shares | None:
                given = decision.proportions
                return None if given is None else resolve_proportions(given, stats.domains, origin)

            shares = self._decide(entry, origin, {"stats": stats, "ctx": ctx}, stats, resolve)
            decided = decided if shares is None else shares
        return decided

    @property
    def draws(self) -> bool:
        """Whether any plugin wants to see candidate prompts."""
        return bool(self._using("pre_rollout"))

    @property
    def ranks(self) -> bool:
        """Whether a plugin gives candidates priorities."""
        return any("priority" in entry.declared.provides for entry in self._using("pre_rollout"))

    def candidate_columns(self) -> frozenset[str]:
        """Static dataset columns that plugins declare for ``pre_rollout``."""
        return frozenset(name for names in self.candidate_columns_by_setting().values() for name in names)

    def candidate_columns_by_setting(self) -> dict[str, tuple[str, ...]]:
        """The same by the setting under which the plugin stands that declares them."""
        entries = self._using("pre_rollout")
        return {entry.built.settings.path: entry.declared.requires.get("pre_rollout", ()) for entry in entries}

    def pre_rollout(self, candidates: PromptBatch, ctx: StepContext) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        """Call ``pre_rollout`` on candidates that were drawn.

        Returns:
            Which are admitted, (n,) bool, by all plugins; and the priorities of the one that gives any, (n,) float64.
            None each where nobody said anything.

        Raises:
            PluginError: a plugin failed, or returned what it must not.
        """
        admitted: NDArray[Any] | None = None
        priority: NDArray[Any] | None = None
        for entry in self._called_at("pre_rollout", ctx.step):
            origin = entry.origin("pre_rollout", ctx.step)

            def resolve(decision: Any, origin: Origin = origin) -> _Chosen:
                return _chosen(decision, len(candidates), origin)

            arguments = {"candidates": candidates, "ctx": ctx}
            chosen = self._decide(entry, origin, arguments, candidates, resolve) or _Chosen()
            if chosen.admit is not None:
                admitted = chosen.admit if admitted is None else admitted & chosen.admit
            if chosen.priority is not None:
                priority = chosen.priority
        return admitted, priority


@dataclass(frozen=True)
class _Chosen:
    """What one plugin says of candidates: ``admit`` (n,) bool, ``priority`` (n,) float64."""

    admit: NDArray[Any] | None = None
    priority: NDArray[Any] | None = None


def _chosen(decision: RolloutDecision, n: int, origin: Origin) -> _Chosen:
    if decision.rollouts is not None:
        raise DecisionError(origin, "rollouts per prompt are not applied in this version: leave rollouts None")
    admit = None if decision.admit is None else _per_candidate("admit", decision.admit, n, origin).astype(bool)
    priority = None if decision.priority is None else _per_candidate("priority", decision.priority, n, origin)
    return _Chosen(admit, priority)


def _per_candidate(name: str, given: Any, n: int, origin: Origin) -> NDArray[np.float64]:
    values = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DecisionError(origin, f"{name} must be numbers, got {given!r}") from error
    if array.shape != (n,):
        raise DecisionError(origin, f"{name} must be ({n},), one for each candidate, got shape {array.shape}")
    wrong = np.isnan(array) | ((array != 0) & (array != 1) if name == "admit" else False)
    if wrong.any():
        what = "neither true nor false" if name == "admit" else "NaN"
        raise DecisionError(origin, f"{name} is {what} for {int(wrong.sum())} of {n} candidates")
    return array


def resolve_proportions(given: Any, domains: Sequence[str], origin: Origin) -> Shares:
    """Check proportions and normalise them: (K,) float64, summing to 1.

    Raises:
        DecisionError: negative, NaN, of the wrong length, or all zero; names the plugin of ``origin``.
    """
    values = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    try:
        shares = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DecisionError(origin, f"proportions must be numbers, got {given!r}") from error
    if shares.shape != (len(domains),):
        text = f"proportions must be ({len(domains)},), one for each of {', '.join(domains)}; got shape {shares.shape}"
        raise DecisionError(origin, text)
    for wrong, what in ((~np.isfinite(shares), "NaN or infinite"), (shares < 0, "negative")):
        if wrong.any():
            named = ", ".join(domains[index] for index in np.flatnonzero(wrong).tolist())
            raise DecisionError(origin, f"proportions are {what} for {named}")
    total = shares.sum()
    if not total > 0:
        raise DecisionError(origin, "proportions are all 0; a domain has to be sampled")
    # Dividing by a sum that is 1 up to rounding would take a share below its floor.
    return shares if abs(total - 1) < 1e-9 else np.asarray(shares / total, dtype=np.float64)
