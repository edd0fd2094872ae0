"""What runs with domains have in common: settings that make a step cheap, and the prompts as they were submitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataflex_verl.demo.build import DemoFiles
from tests.real.conftest import base_overrides

CHEAP = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=2",
)
"""Four prompts of two rollouts of two tokens a step."""


def overrides(demo: DemoFiles, *more: str) -> list[str]:
    """A run without validation in the sync mode, unless ``more`` says otherwise."""
    return [
        *base_overrides(demo),
        "trainer.v1.trainer_mode=dataflex_sync",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        *more,
    ]


def mixing(mixer: str, scorer: str | None = None) -> list[str]:
    """The plugin ``mix`` with an actuator, and a scorer where there is one."""
    given = [f"+dataflex.plugins.mix.actuator={mixer}"]
    return given if scorer is None else [*given, f"+dataflex.plugins.mix.scorer={scorer}"]


class Prompts:
    """Counts what is submitted, from the prompts themselves, and what was in force at that moment."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.domains: list[str] = []
        self.sources: list[str] = []
        self.in_force: list[Any] = []

    def look(self, trainer: Any) -> None:
        """Given to ``train``; the second call, after the last step, changes nothing."""
        if self.rows:
            return
        submit = trainer._submit_batch_to_rollout

        def counted(batch: Any) -> int:
            self.rows += [int(getattr(row, "data", row)) for row in batch["dataflex_row"]]
            self.domains += [str(getattr(name, "data", name)) for name in batch["dataflex_domain"]]
            self.sources += [str(getattr(name, "data", name)) for name in batch["data_source"]]
            self.in_force += [trainer.mixing.sampler.proportions] * len(batch)
            return submit(batch)

        trainer._submit_batch_to_rollout = counted

    def worst(self, names: Sequence[str]) -> float:
        """Largest distance between realised and target counts at any prompt, in prompts."""
        realised = np.cumsum([[domain == name for name in names] for domain in self.domains], axis=0)
        return float(np.abs(realised - np.cumsum(self.in_force, axis=0)).max())


class Updates:
    """What the actor is trained on in each step, by row: reward of the rollout, weight of its tokens, their number."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[float, float, int]]] = []

    def look(self, trainer: Any) -> None:
        """Given to ``train``."""
        update = trainer._update_actor

        def seen(batch: Any, metrics: dict[str, Any]) -> Any:
            import transfer_queue as tq

            fields = ["rm_scores", "rollout_is_weights"]
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            rows = zip(data["rm_scores"], data["rollout_is_weights"], strict=True)
            self.steps.append([(float(reward.sum()), float(weights[0]), len(weights)) for reward, weights in rows])
            return update(batch, metrics)

        if not self.steps:
            trainer._update_actor = seen
