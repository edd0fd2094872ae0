"""When the guard is on: above ``high`` it goes on, below ``low`` it goes off, in between it stays as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Hysteresis:
    """Two thresholds and the state between them.

    Attributes:
        high, low: a value above ``high`` (or NaN) turns it on, one below ``low`` turns it off.
        on: whether it is on.
    """

    high: float
    low: float
    on: bool = False

    def see(self, value: float) -> bool:
        """Take a new value; return whether it is on now."""
        if math.isnan(value) or value > self.high:
            self.on = True
        elif value < self.low:
            self.on = False
        return self.on


def was_updated(metrics: Mapping[str, Any]) -> bool:
    """Whether a step's metrics have any of an update of the policy; its entropy verl logs without one."""
    return any(name.startswith("actor/") and name != "actor/entropy" for name in metrics)


def metrics_like(wanted: str, metrics: Mapping[str, Any]) -> list[str]:
    """Names of metrics that have ``kl`` as a word in their name, those most like ``wanted`` first."""
    words = [name for name in metrics if "kl" in name.lower().replace("/", "_").split("_")]
    return sorted(words, key=lambda name: (-len(set(name) & set(wanted)), name))
