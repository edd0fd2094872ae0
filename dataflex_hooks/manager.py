"""One manager per run: discovers, checks and registers plugins, calls them one by one, and merges what they return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from dataflex_hooks import state
from dataflex_hooks.batch import stored_names
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.config import read
from dataflex_hooks.domain_calls import DomainCalls
from dataflex_hooks.entries import admit, group_problems, loss_problems, unconfigured
from dataflex_hooks.errors import ConfigError, DecisionError, Problem, did_you_mean
from dataflex_hooks.loader import BuiltPlugin, build_plugin, shared_taken
from dataflex_hooks.rollout_calls import RolloutCalls
from dataflex_hooks.state import Restored, SavedPlugin


class HookManager(RolloutCalls, DomainCalls):
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
        super().__init__()
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
        facts: Mapping[str, object] | None = None,
        extra_plugins: Mapping[str, object] | None = None,
    ) -> HookManager:
        """Build the plugins that a ``dataflex`` block names.

        Args:
            config: what stands under ``dataflex``, or None.
            estimator: advantage estimator of the run.
            has_groups: whether a prompt has several rollouts (``rollout.n > 1``); None judges by the estimator.
            rollout_n: rollouts of a prompt, as far as the host knows; components get it as ``rollouts``.
            response_length: length limit of responses in tokens, as far as the host knows.
            facts: what else the host knows of the run, for plugins that ask for it: ``prompt_length``,
                ``tokenizer_path``, ``rollout_log_probs``.
            extra_plugins: plugin objects by label, called after the configured ones; the block's ``warmup_step``,
                ``on_error`` and ``slow_plugin_seconds`` hold for them as for a configured plugin without its own.

        Raises:
            ConfigError: with every problem of the block, of the plugins' constructors and of their registration.
        """
        manager = cls()
        manager.config, problems = read(config)
        taken: set[str] = set()
        facts = {**(facts or {}), "rollouts": rollout_n, "response_length": response_length}
        for settings in manager.config.plugins:
            taken |= shared_taken(settings, manager.config.shared)
            try:
                built = build_plugin(settings, manager.config.shared, facts)
            except ConfigError as error:
                problems += error.problems
                continue
            problems += group_problems(built, estimator, has_groups) + manager._admit(built)
        for label, plugin in (extra_plugins or {}).items():
            built = unconfigured(label, plugin, manager.config.usual)
            problems += group_problems(built, estimator, has_groups) + manager._admit(built)
        if "normalize" in manager.config.shared and "normalize" not in taken:
            given = manager.config.shared["normalize"]
            problems.append(Problem("dataflex.normalize", given, "nothing here: no configured plugin takes it"))
        if problems:
            raise ConfigError(problems)
        return manager

    def register(self, label: str, plugin: object, warmup_step: int | None = None) -> None:
        """Add a plugin object under a new label, called after those before it; None is the block's ``warmup_step``.

        Raises:
            ConfigError: with everything wrong with it.
        """
        usual = self.config.usual if warmup_step is None else replace(self.config.usual, warmup_step=warmup_step)
        problems = self._admit(unconfigured(label, plugin, usual))
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

    def plan(self) -> list[dict[str, Any]]:
        """Describe the plugins in call order, in plain values: what runs, from where, when, and what it may decide."""
        return [entry.describe() for entry in self._entries.values()]

    def active(self, hook: str, step: int) -> bool:
        """Whether any plugin will be called for ``hook`` at ``step``."""
        return bool(self._called_at(hook, step))

    def required_fields(self, hook: str, step: int) -> frozenset[str]:
        """Batch fields that ``hook`` needs at ``step``, under the names they are stored by.

        What the plugins declare, the rewards for whoever is called (they are logged over all rows and over those kept),
        and what dropping rows takes: contents for ``keep_best``. ``uid`` is in the row keys and not among them.
        """
        called = self._called_at(hook, step)
        needed = {name for entry in called for name in entry.declared.requires.get(hook, ())}
        drops = any("keep" in entry.declared.provides for entry in called)
        rules = self.config.keep_rules
        if called:
            needed.add("rm_scores")
        if (drops or rules.min_keep is not None) and rules.fallback == "keep_best":
            needed |= {"prompts", "responses"}
        return stored_names(needed)

    def readers(self, name: str) -> list[str]:
        """Labels of the plugins that declare the batch field ``name`` (as stored) for any hook."""
        entries = self._entries.values()
        return [e.label for e in entries if any(name in stored_names(of) for of in e.declared.requires.values())]

    def refuse_missing(self, hook: str, step: int, missing: Iterable[str], stored: Iterable[str]) -> None:
        """Do what ``on_error`` says of plugins whose declared fields are not in the batch; for the host.

        Args:
            hook: the hook about to be called at ``step``.
            missing: names as stored, out of :meth:`required_fields`.
            stored: names of everything that is there.

        Raises:
            DecisionError: naming the first plugin that declared one of ``missing``, and the field.
        """
        gone, present = set(missing), sorted(stored)
        for entry in self._called_at(hook, step):
            declared = stored_names(entry.declared.requires.get(hook, ()))
            if lacks := sorted(declared & gone):
                origin = entry.origin(hook, step)
                hint = did_you_mean(lacks[0], present)
                text = f"requires the batch field {lacks[0]!r}, which is not there; the batch has {', '.join(present)}"
                text += f"; {hint}" if hint else ""
                entry.disable_or_raise(origin, DecisionError(origin, text), self._disabled)

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
