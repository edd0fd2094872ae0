"""A number per domain that a mixer carries from one decision to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks.mixing import MixView
from dataflex_hooks.proportions import Shares


class RunningValues:
    """Values by domain, and which steps of the window went into them already."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._step: int | None = None

    def fresh(self, view: MixView) -> tuple[Shares, NDArray[np.bool_]]:
        """Return the mean scores of sessions since the last decision, (K,), and which domains have any, (K,) bool."""
        new = view.history if self._step is None else view.history.since(self._step)
        return new.mean(), new.total() > 0

    def values(self, domains: Sequence[str], default: float) -> Shares:
        """Return a copy of the values in the order of ``domains``, ``default`` for a domain without one."""
        return np.array([self._values.get(domain, default) for domain in domains], dtype=np.float64)

    def keep(self, view: MixView, values: Shares) -> None:
        """Carry finite ``values`` on; the window's steps count as used."""
        pairs = zip(view.domains, values, strict=True)
        self._values = {domain: float(value) for domain, value in pairs if np.isfinite(value)}
        # Scores handed over without steps are new ones each time.
        has_steps = len(view.history.steps) > 0 and bool(view.history.steps[-1] > 0)
        if has_steps:
            self._step = int(view.history.steps[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return values and step, plain."""
        return {"values": dict(self._values), "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self._values = {str(domain): float(value) for domain, value in state["values"].items()}
        self._step = None if state["step"] is None else int(state["step"])
