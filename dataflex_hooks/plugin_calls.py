"""What calling plugins of a run takes: the plugins, which of them are due at a hook, and one call."""

from __future__ import annotations

import pluggy

from dataflex_hooks import hookspecs
from dataflex_hooks.config import DataFlexConfig
from dataflex_hooks.entries import Entry
from dataflex_hooks.markers import GROUP
from dataflex_hooks.trace import CallLog


class PluginCalls:
    """The plugins of a run by label, in call order.

    Attributes:
        config: the validated ``dataflex`` block; defaults when not built from one.
        calls: time and number of the plugins' calls; the host takes the metrics from it, once an update.
    """

    def __init__(self) -> None:
        self.config = DataFlexConfig()
        self.calls = CallLog()
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

    def _call(self, entry: Entry, hook: str, **arguments: object) -> object:
        # A multicall returns results last-in first-out without the Nones: they could not be told apart by plugin.
        others = [other.plugin for other in self._entries.values() if other is not entry]
        results = self._pluggy.subset_hook_caller(hook, remove_plugins=others)(**arguments)
        return results[0] if results else None
