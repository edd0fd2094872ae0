"""What calling plugins of a run takes: the plugins, which of them are due at a hook, and one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pluggy

from dataflex_hooks import hookspecs
from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.config import DataFlexConfig
from dataflex_hooks.decisions import Decision
from dataflex_hooks.entries import Entry
from dataflex_hooks.errors import DecisionError, Origin
from dataflex_hooks.markers import GROUP
from dataflex_hooks.metric_names import label_metric
from dataflex_hooks.slow import SlowCalls
from dataflex_hooks.trace import CallLog, Seen

R = TypeVar("R")


class PluginCalls:
    """The plugins of a run by label, in call order.

    Attributes:
        config: the validated ``dataflex`` block; defaults when not built from one.
        calls: time and number of the plugins' calls; the host takes the metrics from it, once an update.
    """

    def __init__(self) -> None:
        self.config = DataFlexConfig()
        self.calls = CallLog()
        self.slow = SlowCalls()
        self._pluggy = pluggy.PluginManager(GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self._entries: dict[str, Entry] = {}
        self._disabled: set[str] = set()

    def _using(self, hook: str) -> list[Entry]:
        """Plugins that use ``hook`` and have not been disabled, whatever their warm-up."""
        entries = (entry for entry in self._entries.values() if hook in entry.declared.hooks)
        return [entry for entry in entries if entry.label not in self._disabled]

    def _called_at(self, hook: str, step: int) -> list[Entry]:
        return [entry for entry in self._using(hook) if entry.is_called(hook, step)]

    @property
    def disabled(self) -> tuple[str, ...]:
        """Labels of plugins that failed under ``on_error: disable``, sorted."""
        return tuple(sorted(self._disabled))

    def disabled_metrics(self) -> dict[str, float]:
        """1 for every plugin that failed under ``on_error: disable``, 0 for one that might and has not."""
        may = {label for label, entry in self._entries.items() if entry.built.settings.on_error == "disable"}
        labels = sorted(may | self._disabled)
        return {label_metric(label, "disabled"): float(label in self._disabled) for label in labels}

    def _decide(
        self, entry: Entry, origin: Origin, arguments: dict[str, object], seen: Seen, resolve: Callable[[Decision], R]
    ) -> R | None:
        """Call a hook of a plugin; return what ``resolve`` makes of its decision, None where it decided nothing."""

        def act() -> tuple[object, R | None]:
            decision = entry.check(self._call(entry, origin.hook, **arguments), origin)
            resolved = None if decision is None else resolve(decision)
            if decision is not None and decision.metrics:
                self.calls.note(entry.label, decision.metrics)
            return decision, resolved

        return self._guarded(entry, origin, seen, act)

    def _guarded(
        self,
        entry: Entry,
        origin: Origin,
        seen: Seen,
        act: Callable[[], tuple[object, R | None]],
        decides: bool = True,
    ) -> R | None:
        """Time and log what ``act`` does, and see to its failure; it returns a decision and what that resolves to."""
        started, failed = time.perf_counter(), None
        decision, resolved = None, None
        limit = entry.built.settings.slow_plugin_seconds
        with self.slow.watch(origin, limit):
            try:
                decision, resolved = act()
            except Exception as error:
                failed = error
        seconds = time.perf_counter() - started
        self.calls.add(origin, seen, decision, seconds, failed, decides)
        self.calls.count_slow(entry.label, limit is not None and seconds > limit)
        if isinstance(seen, RolloutBatch):
            _refuse_mutation(seen, origin, failed)
        if failed is not None:
            entry.disable_or_raise(origin, failed, self._disabled)
        return resolved

    def _call(self, entry: Entry, hook: str, **arguments: object) -> object:
        # A multicall returns results last-in first-out without the Nones: they could not be told apart by plugin.
        others = [other.plugin for other in self._entries.values() if other is not entry]
        results = self._pluggy.subset_hook_caller(hook, remove_plugins=others)(**arguments)
        return results[0] if results else None


def _refuse_mutation(batch: RolloutBatch, origin: Origin, cause: Exception | None) -> None:
    changed = batch.mutated()
    if changed:
        text = f"changed {', '.join(changed)} in place; batches are read-only: work on a copy (tensor.clone())"
        raise DecisionError(origin, text) from cause
