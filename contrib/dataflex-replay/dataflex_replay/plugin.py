"""The plugin ``replay``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataflex_hooks import AddedRow, ParameterChecks, RewardDecision, RolloutBatch, StepContext, hookimpl
from dataflex_replay.pool import KEEP, Bounds, Ints, SuccessPool
from dataflex_replay.successes import failed_groups, prompt_keys, successes


class Replay:
    """Keeps successful responses by prompt; a group whose rollouts all fail gets the best of them to train on.

    The replayed response joins the group: its reward counts in the group's baseline, and its advantage is what verl's
    estimator gives it there. Its log-probs at the time when it was made go with it, for verl's rollout correction.

    Args:
        success_threshold: a reward above it is a success; a group with none has failed.
        per_group: replayed responses for a failed group, at most.
        max_rows: replayed responses in a step, at most; None for no limit. Prompts are taken in an order of their
            contents, by hash.
        capacity: responses kept of a prompt.
        total: responses kept of all prompts.
        max_age: training steps after which a response is forgotten.
        keep: which stay, and come first, when there are more: ``recent`` or ``reward``.
        identity: a scalar dataset column that tells prompts of equal text apart; None where the text does.
        rollout_log_probs: whether rollouts have log-probs, from the host.

    Raises:
        ConfigError: everything wrong with the parameters.
    """

    provides = frozenset({"add"})
    host_keywords = frozenset({"rollout_log_probs"})

    def __init__(
        self,
        success_threshold: float = 0.5,
        per_group: int = 1,
        max_rows: int | None = None,
        capacity: int = 4,
        total: int = 4096,
        max_age: int = 100,
        keep: str = "recent",
        identity: str | None = None,
        rollout_log_probs: bool | None = None,
    ) -> None:
        checks = ParameterChecks()
        self.threshold = checks.number("success_threshold", success_threshold)
        self.per_group = checks.integer("per_group", per_group, at_least=1)
        self.max_rows = None if max_rows is None else checks.integer("max_rows", max_rows, at_least=1)
        bounds = Bounds(
            capacity=checks.integer("capacity", capacity, at_least=1),
            total=checks.integer("total", total, at_least=1),
            max_age=checks.integer("max_age", max_age, at_least=1),
            keep=checks.choice("keep", keep, KEEP),
        )
        if not checks.failed and self.per_group > bounds.capacity:
            checks.refuse("per_group", per_group, f"at most capacity={bounds.capacity}")
        if not checks.failed and bounds.capacity > bounds.total:
            checks.refuse("capacity", capacity, f"at most total={bounds.total}")
        if identity is not None and not isinstance(identity, str):
            checks.refuse("identity", identity, "null, or the name of a column")
        checks.finish()
        self.identity = identity
        self.log_probs = rollout_log_probs is not False
        self.pool = SuccessPool(bounds)
        optional = (*(("rollout_log_probs",) if self.log_probs else ()), *((identity,) if identity else ()))
        self.requires = {"post_reward": ("prompts", "responses", "rm_scores", "response_mask", *optional)}

    @hookimpl
    def post_reward(self, batch: RolloutBatch, ctx: StepContext) -> RewardDecision:
        """Return responses of earlier steps for the groups that failed, then remember this step's successes."""
        keys = prompt_keys(batch, self.identity)
        self.pool.forget(ctx.step)
        failed = failed_groups(batch, self.threshold)
        asked, found = self.pool.find(keys[failed], self.per_group)
        add = [self._added(batch, int(row), int(hit)) for row, hit in self._limited(failed[asked], found)]
        self.pool.add(successes(batch, self.threshold, keys, ctx.step, self.log_probs))
        metrics = {
            "failed_groups_total": float(len(failed)),
            "replayed_total": float(len(add)),
            "pool": float(len(self.pool.held)),
            "pool_prompts": float(len(np.unique(self.pool.held.prompt))),
        }
        return RewardDecision(add=add, metrics=metrics)

    def _limited(self, rows: Ints, found: Ints) -> Any:
        return zip(rows[: self.max_rows], found[: self.max_rows], strict=True)

    def _added(self, batch: RolloutBatch, row: int, found: int) -> AddedRow:
        values, offsets = batch.prompts
        response, log_probs = self.pool.held.row(found)
        return AddedRow(
            prompt=values[int(offsets[row]) : int(offsets[row + 1])].tolist(),
            response=response,
            advantage=None,
            reward=float(self.pool.held.reward[found]),
            log_probs=log_probs,
            uid=str(batch.uid[row]),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the pool as tensors."""
        return {"log_probs": self.log_probs, "identity": self.identity, "pool": self.pool.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the pool back.

        Raises:
            ValueError: it was filled by a run with other keys, or with log-probs where this one has none, or none
                where it has.
        """
        for name in ("log_probs", "identity"):
            if state[name] != getattr(self, name):
                raise ValueError(f"its pool was filled with {name}={state[name]}, here it is {getattr(self, name)}")
        self.pool.load_state_dict(state["pool"])
