"""One manager per run: discovers, checks and registers plugins, calls them one by one, and merges what they return."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pluggy
from omegaconf import DictConfig

from dataflex_hooks import hookspecs, state
from dataflex_hooks.batch import ALIASES, RolloutBatch
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.config import DataFlexConfig, read
from dataflex_hooks.context import StepContext
from dataflex_hooks.domain_calls import DomainCalls
from dataflex_hooks.entries import Entry, admit, group_problems, loss_problems, unconfigured
from dataflex_hooks.errors import ConfigError, DecisionError, Origin, PluginError, Problem
from dataflex_hooks.loader import BuiltPlugin, build_plugin, shared_taken
from dataflex_hooks.markers import GROUP
from dataflex_hooks.merge import MergedUpdate, merge_resolved
from dataflex_hooks.merge_reward import Generated, MergedReward, merge_reward
from dataflex_hooks.metric_names import label_metric
from dataflex_hooks.resolve import ResolvedReward, ResolvedUpdate, resolve_rewards, resolve_update
from dataflex_hooks.state import Restored, SavedPlugin
from dataflex_hooks.trace import CallLog

_log = logging.getLogger("dataflex_hooks")
R = TypeVar("R")


class HookManager(DomainCalls):
    """The plugins of one run.

    Args:
        plugins: plugin objects by label, in call order; for tests and programs. A run uses :meth:`from_config`.

    Attributes:
        config: the validated ``dataflex`` block; defaults when not built from one.
        calls: time and number of the plugins' calls; the host takes the metrics from it, once an update.

    Raises:
        ConfigError: a plugin fails the checks at registration.
    """

    def __init__(self, plugins: Mapping[str, object] | None = None) -> None:
        self.config = DataFlexConfig()
        self._pluggy = pluggy.PluginManager(GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self._entries: dict[str, Entry] = {}
        self._disabled: set[str] = set()
        self.calls = CallLog()
        for label, plugin in (plugins or {}).items():
            self.register(label, plugin)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | DictConfig | None,
        *,
        estimator: str,
        has_groups: bool | None,
        rollout_n: int | None = None,
        response_length: int | None = None,
        extra_plugins: Mapping[str, object] | None = None,
    ) -> HookManager:
        """Build the plugins that a ``dataflex`` block names.

        Args:
            config: what stands under ``dataflex``, or None.
            estimator: advantage estimator of the run.
            has_groups: whether a prompt has several rollouts (``rollout.n > 1``); None judges by the estimator.
            rollout_n: rollouts of a prompt, as far as the host knows; components get it as ``rollouts``.
            response_length: length limit of responses in tokens, as far as the host knows.
            extra_plugins: plugin objects by label, called after the configured ones.

        Raises:
            ConfigError: with every problem of the block, of the plugins' constructors and of their registration.
        """
        manager = cls()
        manager.config, problems = read(config)
        taken: set[str] = set()
        facts = {"rollouts": rollout_n, "response_length": response_length}
        for settings in manager.config.plugins:
            taken |= shared_taken(settings, manager.config.shared)
            try:
                built = build_plugin(settings, manager.config.shared, facts)
            except ConfigError as error:
                problems += error.problems
                continue
            problems += group_problems(built, estimator, has_groups) + manager._admit(built)
        for label, plugin in (extra_plugins or {}).items():
            built = unconfigured(label, plugin, warmup_step=0)
            problems += group_problems(built, estimator, has_groups) + manager._admit(built)
        if "normalize" in manager.config.shared and "normalize" not in taken:
            given = manager.config.shared["normalize"]
            problems.append(Problem("dataflex.normalize", given, "nothing here: no configured plugin takes it"))
        if problems:
            raise ConfigError(problems)
        return manager

    def register(self, label: str, plugin: object, warmup_step: int = 0) -> None:
        """Add a plugin object under a new label, called after those before it.

        Raises:
            ConfigError: with everything wrong with it.
        """
        problems = self._admit(unconfigured(label, plugin, warmup_step))
        if problems:
            raise ConfigError(problems)

    def _admit(self, built: BuiltPlugin) -> list[Problem]:
        entry, problems = admit(self._pluggy, built, self._entries.values())
        if not problems:
            self._pluggy.register(entry.plugin, name=entry.label)
            self._entries[entry.label] = entry
        return problems

    def loss_problems(self, coefficients: LossCoefficients) -> list[Problem]:
        """Return what the configured plugins ask of the loss and it cannot give; for the host, at start."""
        return [problem for entry in self._entries.values() for problem in loss_problems(entry, coefficients)]

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels in call order."""
        return tuple(self._entries)

    def origin(self, label: str, hook: str, step: int) -> Origin:
        """Return what an error of the plugin under ``label`` says about where it happened; for the host."""
        return self._entries[label].origin(hook, step)

    def plan(self) -> list[dict[str, Any]]:
        """Describe the plugins in call order, in plain values: what runs, from where, when, and what it may decide."""
        return [entry.describe() for entry in self._entries.values()]

    def _called_at(self, hook: str, step: int) -> list[Entry]:
        called = (entry for entry in self._entries.values() if entry.is_called(hook, step))
        return [entry for entry in called if entry.label not in self._disabled]

    def active(self, hook: str, step: int) -> bool:
        """Whether any plugin will be called for ``hook`` at ``step``."""
        return bool(self._called_at(hook, step))

    def required_fields(self, hook: str, step: int) -> frozenset[str]:
        """Batch fields that ``hook`` needs at ``step``, under the names they are stored by.

        What the plugins declare, and what dropping rows takes: rewards for baselines, contents for ``keep_best``.
        ``uid`` is in the row keys and not among them.
        """
        called = self._called_at(hook, step)
        needed = {name for entry in called for name in entry.declared.requires.get(hook, ())}
        drops = any("keep" in entry.declared.provides for entry in called)
        rules = self.config.keep_rules
        if drops and hook == "post_reward":
            needed.add("rm_scores")
        if (drops or rules.min_keep is not None) and rules.fallback == "keep_best":
            needed |= {"prompts", "responses"}
        return frozenset(ALIASES.get(name, name) for name in needed) - {"uid"}

    def refuse_missing(self, hook: str, step: int, missing: Iterable[str], stored: Iterable[str]) -> None:
        """Say that declared fields are not in the batch; for the host, after it looked.

        Args:
            hook: the hook about to be called at ``step``.
            missing: names as stored, out of :meth:`required_fields`.
            stored: names of everything that is there.

        Raises:
            DecisionError: naming the first plugin that declared one of ``missing``.
        """
        gone, there = set(missing), ", ".join(sorted(stored))
        for entry in self._called_at(hook, step):
            declared = {ALIASES.get(name, name) for name in entry.declared.requires.get(hook, ())}
            for name in sorted(declared & gone):
                text = f"requires the batch field {name!r}, which is not there; the batch has {there}"
                raise DecisionError(entry.origin(hook, step), text)

    def post_reward(self, batch: RolloutBatch, ctx: StepContext) -> MergedReward:
        """Call ``post_reward`` and merge; the owner of rewards first, then the others with its rewards in the batch.

        Raises:
            PluginError: a plugin failed, or returned what it must not.
        """
        resolved: list[ResolvedReward] = []
        called = self._called_at("post_reward", ctx.step)
        for entry in sorted(called, key=lambda e: "rewards" not in e.declared.provides):
            decision = self._decide(entry, "post_reward", batch, ctx, resolve_rewards)
            if decision is not None:
                resolved.append(decision)
                if decision.rewards is not None:
                    batch = batch.with_token_field("rm_scores", decision.rewards)
        return merge_reward(resolved, batch, self.config.keep_rules)

    def post_advantage(
        self,
        batch: RolloutBatch,
        ctx: StepContext,
        coefficients: LossCoefficients,
        generated: Generated | None = None,
    ) -> MergedUpdate:
        """Call ``post_advantage`` and merge the decisions; see :func:`dataflex_hooks.merge.merge_update`.

        Args:
            batch: the real rows that are still in the batch.
            ctx: of the step.
            coefficients: of the configured loss.
            generated: what the step generated, where rows have been dropped since.

        Raises:
            PluginError: a plugin failed, or returned what it must not.
        """
        resolved: list[ResolvedUpdate] = []
        for entry in self._called_at("post_advantage", ctx.step):
            decision = self._decide(entry, "post_advantage", batch, ctx, resolve_update)
            if decision is not None:
                resolved.append(decision)
        config = self.config
        merged = merge_resolved(resolved, batch, coefficients, config.mask_scale, config.keep_rules, generated)
        merged.metrics.update({label_metric(label, "disabled"): 1.0 for label in sorted(self._disabled)})
        return merged

    def _decide(
        self,
        entry: Entry,
        hook: str,
        batch: RolloutBatch,
        ctx: StepContext,
        resolve: Callable[[Any, RolloutBatch, Origin], R],
    ) -> R | None:
        origin = entry.origin(hook, ctx.step)
        started, decision = time.perf_counter(), None
        try:
            decision = self._call(entry, hook, batch=batch, ctx=ctx)
            entry.check(decision, origin)
            resolved = None if decision is None else resolve(decision, batch, origin)
        except Exception as error:
            self.calls.add(origin, batch, decision, time.perf_counter() - started, error)
            _refuse_mutation(batch, origin, error)
            if entry.built.settings.on_error == "disable":
                _log.error("%s failed and is disabled for the rest of the run", origin, exc_info=error)
                self._disabled.add(entry.label)
                return None
            if isinstance(error, PluginError):
                raise
            raise PluginError(origin, f"{type(error).__name__}: {error}") from error
        self.calls.add(origin, batch, decision, time.perf_counter() - started)
        _refuse_mutation(batch, origin, None)
        return resolved

    def _call(self, entry: Entry, hook: str, **arguments: object) -> object:
        # A multicall returns results last-in first-out without the Nones: they could not be told apart by plugin.
        others = [other.plugin for other in self._entries.values() if other is not entry]
        results = self._pluggy.subset_hook_caller(hook, remove_plugins=others)(**arguments)
        return results[0] if results else None

    def state_dict(self, step: int = 0) -> dict[str, SavedPlugin]:
        """Return every plugin as a checkpoint of ``step`` keeps it, with its state where it has any, by label.

        Raises:
            PluginError: a plugin's ``state_dict`` failed, or holds a value that cannot be stored.
        """
        return state.collect(self._entries.values(), self._disabled, step)

    def state_problems(self, saved: Mapping[str, SavedPlugin], place: str) -> list[Problem]:
        """Return what keeps this run from resuming with the plugins of the checkpoint at ``place``."""
        return state.problems(self._entries.values(), saved, self.config.resume, place)

    def load_state_dict(self, saved: Mapping[str, SavedPlugin], step: int = 0, place: str = "") -> Restored:
        """Give every plugin its state of the checkpoint ``place``, written at ``step``.

        Raises:
            ConfigError: ``dataflex.resume`` is strict and the plugins with state are not the same.
            PluginError: a plugin could not take its state.
        """
        if self.config.resume == "fresh":
            saved = {}
        if problems := self.state_problems(saved, place):
            raise ConfigError(problems)
        restored = state.restore(self._entries.values(), saved, step)
        self._disabled |= set(restored.disabled)
        return restored


def _refuse_mutation(batch: RolloutBatch, origin: Origin, cause: Exception | None) -> None:
    changed = batch.mutated()
    if changed:
        text = f"changed {', '.join(changed)} in place; batches are read-only: work on a copy (tensor.clone())"
        raise DecisionError(origin, text) from cause
