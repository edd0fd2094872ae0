"""A strategy to replay: its plugins, what it reads and the log lacks, and the state it begins with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from dataflex_hooks.errors import DataFlexError, FieldError, PluginError
from dataflex_hooks.manager import HookManager
from dataflex_hooks.state import SavedPlugin
from dataflex_hooks.whatif.replay import Replay
from dataflex_hooks.whatif.steps import ReplayStep, Source

TOKEN_FIELDS = frozenset({"old_log_probs", "entropy"})
_HOOKS = ("post_reward", "post_advantage")
_NO_TOKENS = "it was written without tokens, which dataflex.log_decisions=tokens keeps"
_MERGING = "merging the weights of"


class CannotReplay(DataFlexError):
    """A strategy and a log that do not go together; the message says everything that is missing."""


@dataclass(frozen=True)
class Strategy:
    """A named ``dataflex`` block.

    Attributes:
        name: as the user gave it.
        block: what would stand under ``dataflex``.
    """

    name: str
    block: Mapping[str, Any] = field(default_factory=dict)

    def hooks(self, source: Source, label: str | None = None, strict: bool = False) -> HookManager:
        """Build its plugins, or the one under ``label``, with the facts of the run that was logged.

        Args:
            source: the log.
            label: of the only plugin to build.
            strict: every error is raised, whatever ``on_error`` says.

        Raises:
            ConfigError: with everything wrong with the block.
        """
        facts = source.facts
        block = {**self.block, "resume": "matching", "log_decisions": False}
        if label is not None and block.get("plugins"):
            block["plugins"] = {label: block["plugins"][label]}
        if strict:
            block["on_error"] = "raise"
            if plugins := block.get("plugins"):
                block["plugins"] = {name: _without(settings, "on_error") for name, settings in plugins.items()}
        return HookManager.from_config(
            block,
            estimator=facts.estimator,
            has_groups=None if facts.rollouts is None else facts.rollouts > 1,
            rollout_n=facts.rollouts,
            response_length=facts.response_length,
            facts=facts.settings.get("facts"),
        )

    def replay(self, source: Source, state: Mapping[str, SavedPlugin] | None = None) -> tuple[Replay, list[str]]:
        """Get ready to go over a log.

        Args:
            source: the log.
            state: of plugins before the log's first step, by label; None where there is none.

        Returns:
            The replay, and what has to be said about it.

        Raises:
            CannotReplay: the strategy reads what the log does not have.
            ConfigError: the block is wrong.
        """
        hooks = self.hooks(source)
        lacking = _undeclared(hooks, source)
        tokens = bool(_read_by(hooks) & TOKEN_FIELDS) or any(row["per_token"] for row in hooks.plan())
        if not lacking:
            lacking = self._tried(source, tokens)
            if lacking and not tokens and source.facts.tokens:
                # Something reads values of tokens without saying so in its fields, such as a sum of advantages.
                tokens, lacking = True, self._tried(source, True)
        if lacking:
            raise CannotReplay(f"strategy {self.name!r} cannot be run over {source.path}: " + "; ".join(lacking))
        replayed = _replay(hooks, source, tokens)
        return replayed, self._begin(hooks, source, state)

    def _tried(self, source: Source, tokens: bool) -> list[str]:
        """What the plugins find missing in the first step; if anything, also what each alone does."""
        for step in islice(source.steps(tokens), 1):
            # A plugin that finds a field missing is not one that failed in the run, whatever on_error says.
            hooks = self.hooks(source, strict=True)
            plan = self.hooks(source).plan()
            may_fail = any(row["on_error"] == "disable" for row in plan)
            # Whatever their warm-ups: they will run some time.
            late = replace(step, step=max([step.step, *(row["warmup_step"] for row in plan)]))
            found = _missed(_replay(hooks, source, tokens), late, "the strategy", may_fail)
            if found is None:
                return []
            alone = [
                missed
                for row in plan
                if (missed := _missed(self._alone(source, row["label"], tokens), late, row["label"], may_fail))
            ]
            # Merging fails for all weights alike, and then the plugins that give some are named one by one.
            whole = [] if alone and found.startswith(_MERGING) else [found]
            return list(dict.fromkeys([*whole, *alone]))
        return []

    def _alone(self, source: Source, label: str, tokens: bool) -> Replay:
        return _replay(self.hooks(source, label, strict=True), source, tokens)

    def _begin(self, hooks: HookManager, source: Source, state: Mapping[str, SavedPlugin] | None) -> list[str]:
        """Give plugins their logged state; say which begin without one."""
        stateful = [label for label, saved in hooks.state_dict().items() if saved.state is not None]
        first = next((step.step for step in source.steps()), 1)
        if not stateful or first <= 1:
            return []
        restored = () if state is None else hooks.load_state_dict(state, first).restored
        fresh = ", ".join(label for label in stateful if label not in restored)
        if not fresh:
            return []
        return [f"strategy {self.name!r}: {fresh} remembers nothing of what came before step {first}, the log's first"]


def _without(settings: Any, key: str) -> Any:
    return (
        {name: value for name, value in settings.items() if name != key} if isinstance(settings, Mapping) else settings
    )


def _missed(replayed: Replay, step: ReplayStep, label: str, may_fail: bool) -> str | None:
    try:
        replayed.step(step)
    except PluginError as error:
        if not isinstance(error.__cause__, FieldError):
            if may_fail:
                return None
            raise
        return f"{error.origin.label!r} reads {error.__cause__}"
    except FieldError as error:
        return f"{_MERGING} {label!r} needs {error}"
    return None


def _replay(hooks: HookManager, source: Source, tokens: bool) -> Replay:
    domains, shares = _domains(hooks, source) if hooks.mixes else ((), ())
    return Replay(hooks, source.facts, domains, shares, tokens)


def _read_by(hooks: HookManager) -> set[str]:
    named = {name for hook in _HOOKS for name in hooks.required_fields(hook, sys.maxsize)}
    return named | {name for hook in _HOOKS for name in hooks.observed_fields(hook)}


def _undeclared(hooks: HookManager, source: Source) -> list[str]:
    """What plugins say that they read and the log has not, all of it."""
    found = [
        f"{row['label']!r} chooses prompts before they are generated, and a log has only those that were"
        for row in hooks.plan()
        if "pre_rollout" in row["hooks"]
    ]
    for name in sorted(_read_by(hooks) - source.has):
        readers = " and ".join(repr(label) for label in hooks.readers(name)) or "a plugin"
        why = f": {_NO_TOKENS}" if name in TOKEN_FIELDS else ""
        found.append(f"{readers} reads {name}, which this log does not have{why}")
    return found


def _domains(hooks: HookManager, source: Source) -> tuple[Sequence[str], Sequence[float]]:
    """The domains of the run, or those in the log, and the share of each."""
    counts = source.domain_counts()
    names = source.facts.domains or hooks.configured_domains() or tuple(counts)
    total = sum(counts.get(name, 0) for name in names)
    return names, [counts.get(name, 0) / total if total else 1 / len(names) for name in names]
