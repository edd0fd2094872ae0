"""A run that takes up the plugins of another through a checkpoint's encoding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dataflex_hooks.config import parse
from dataflex_hooks.state import SavedPlugin
from dataflex_hooks.state_values import Packed
from dataflex_hooks.testing.running import HookRunner
from dataflex_hooks.testing.watch import WatchingManager, tensor_bytes


class WatchedRunner(HookRunner):
    """Steps with plugins that are watched, and that can be taken up in the middle."""

    hooks: WatchingManager

    def __init__(self, plugins: object, config: Mapping[str, Any] | None) -> None:
        super().__init__(plugins, config=_looked_at_throughout(config), manager=WatchingManager)

    def resume(self, other: HookRunner, saved: Mapping[str, SavedPlugin], step: int) -> None:
        """Take up what another run saved, as the trainer does: domains are known before plugins get their state."""
        if other.domains:
            self._start(other.domains)
            self.proportions = other.proportions
        self.hooks.load_state_dict(saved, step)
        self.last_step = step


def _looked_at_throughout(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The block without what would keep a plugin from being called, or hide that it failed."""
    parse(config)
    return {name: value for name, value in (config or {}).items() if name not in ("warmup_step", "on_error")}


def through_files(saved: Mapping[str, SavedPlugin]) -> dict[str, SavedPlugin]:
    """Return states as they come back from a checkpoint: the tree through strict JSON, tensors as copies."""
    return {label: replace(plugin, state=_encoded(plugin.state)) for label, plugin in saved.items()}


def _encoded(state: Packed | None) -> Packed | None:
    if state is None:
        return None
    tree = json.loads(json.dumps(state.tree, allow_nan=False))
    return Packed(tree, {name: tensor.clone() for name, tensor in state.tensors.items()})


def same_state(one: Packed | None, other: Packed | None) -> bool:
    """Whether two states are equal bit for bit."""
    if one is None or other is None:
        return one is other
    return one.tree == other.tree and _bits(one.tensors) == _bits(other.tensors)


def _bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor)) for name, tensor in tensors.items()}
