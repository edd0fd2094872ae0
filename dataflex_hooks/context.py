"""What a hook is told about the step it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class StepContext:
    """Read-only facts about the training step.

    Attributes:
        step: global training step, counted from 1 as verl does.
        local_update: index of this update within the step, from 0 (more than one in asynchronous modes only).
        mode: base trainer mode (``"sync"``, ``"colocate_async"``).
        estimator: advantage estimator (``"grpo"``, ``"gae"``, ...).
        last_metrics: the previous step's logged metrics, empty at the first step.
        seed: seed of the run; derive random generators from it and ``step``, never from global state.
        explain: the run keeps a decision log: give ``scores`` with a decision even where that takes a pass over tokens.
    """

    step: int
    local_update: int = 0
    mode: str = "sync"
    estimator: str = "grpo"
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    explain: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_metrics", MappingProxyType(dict(self.last_metrics)))

    def keywords(self) -> dict[str, object]:
        """Return what scorers and actuators receive as ``**ctx``; ``step_id``, the step, is passed beside it."""
        return {
            "local_update": self.local_update,
            "mode": self.mode,
            "estimator": self.estimator,
            "last_metrics": self.last_metrics,
            "seed": self.seed,
        }
