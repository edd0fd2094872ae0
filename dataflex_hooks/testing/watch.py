"""A manager that notices what a plugin changed though it may only read it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dataflex_hooks.batch import DomainStats, PromptBatch, RolloutBatch
from dataflex_hooks.batch_fields import as_array
from dataflex_hooks.context import StepContext
from dataflex_hooks.entries import Entry
from dataflex_hooks.testing.running import RecordingManager

Prints = Mapping[str, bytes]
Note = tuple[str, int, tuple[str, ...]]
"""A hook, a step, and the names of what was changed or used there."""


class WatchingManager(RecordingManager):
    """Compares what a plugin is given, and the global random state, before and after each call.

    Attributes:
        changed: ``(hook, step, names)`` for every call that changed something of its arguments.
        drew: ``(hook, step, names)`` for every call that used a global random generator.
    """

    def __init__(self, plugins: Mapping[str, object] | None = None) -> None:
        self.changed: list[Note] = []
        self.drew: list[Note] = []
        super().__init__(plugins)

    def _call(self, entry: Entry, hook: str, **arguments: object) -> object:
        ctx = arguments["ctx"]
        step = ctx.step if isinstance(ctx, StepContext) else 0
        given, drawn = fingerprint(arguments), _random_state()
        try:
            return super()._call(entry, hook, **arguments)
        finally:
            self._note(self.changed, hook, step, given, fingerprint(arguments))
            self._note(self.drew, hook, step, drawn, _random_state())

    @staticmethod
    def _note(notes: list[Note], hook: str, step: int, old: Prints, new: Prints) -> None:
        names = tuple(name for name in old if old[name] != new.get(name))
        if names:
            notes.append((hook, step, names))


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[str, ...]:
    """Names of what differs between two sets of arguments."""
    old, new = fingerprint(before), fingerprint(after)
    return tuple(name for name in old if old[name] != new.get(name))


def fingerprint(arguments: Mapping[str, object]) -> Prints:
    """The content of everything that a hook is given, by name."""
    prints: dict[str, bytes] = {}
    for given in arguments.values():
        if isinstance(given, RolloutBatch):
            tensors = {**given._token_fields, "offsets": given.offsets, "lengths": given.lengths}
            if given._prompts is not None:
                tensors["prompts"] = given._prompts[0]
            prints |= {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
            prints |= {name: tensor_bytes(as_array(column)) for name, column in given._fields.items()}
        elif isinstance(given, PromptBatch):
            prints |= {name: tensor_bytes(column) for name, column in given.columns.items()}
            prints |= {"dataset_rows": tensor_bytes(given.dataset_rows), "domains": tensor_bytes(given.domains)}
        elif isinstance(given, DomainStats):
            prints |= {f"scores[{name!r}]": tensor_bytes(values) for name, values in given.scores.items()}
            named = ("counts", "groups", "unscored", "proportions")
            prints |= {name: tensor_bytes(getattr(given, name)) for name in named}
    return prints


def tensor_bytes(value: Any) -> bytes:
    """The content of a tensor, an array, or anything that has a repr."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tobytes()
    # repr, as two pickles of equal objects may differ in what they share
    return repr(value if not isinstance(value, np.ndarray) else value.tolist()).encode()


def _random_state() -> Prints:
    numpy_state = np.random.get_state(legacy=False)
    return {
        "random": str(hash(random.getstate())).encode(),
        "numpy.random": numpy_state["state"]["key"].tobytes() + str(numpy_state["state"]["pos"]).encode(),
        "torch": tensor_bytes(torch.get_rng_state()),
    }
