"""Small plugins that the real-trainer cases are made of."""

from __future__ import annotations

from typing import Any

import torch

from dataflex_hooks import RewardDecision, UpdateDecision, hookimpl


class Decide:
    """Returns an UpdateDecision made by ``make(batch)``; remembers the contexts and batches it saw."""

    requires = {"post_advantage": ("advantages", "rm_scores", "responses", "prompts")}

    def __init__(self, make: Any) -> None:
        self.make = make
        self.contexts: list[Any] = []
        self.batches: list[Any] = []

    @hookimpl
    def post_advantage(self, batch: Any, ctx: Any) -> UpdateDecision | None:
        self.contexts.append(ctx)
        self.batches.append(batch)
        return self.make(batch)


def mask_all(keep: bool) -> Decide:
    return Decide(lambda batch: UpdateDecision(mask=torch.full((batch.bs,), keep)))


def weigh_all(value: float, normalize: str) -> Decide:
    return Decide(lambda batch: UpdateDecision(weights=torch.full((batch.bs,), value), normalize=normalize))


def by_position(batch: Any) -> UpdateDecision:
    """Another raw weight for every token: 1 + its position in the response, 0 at every third."""
    weights = 1.0 + batch.position.double()
    return UpdateDecision(weights=torch.where(batch.position % 3 == 2, 0.0, weights), normalize="none")


class ReplaceRewards:
    """Owns the rewards: every response gets the number of its tokens."""

    provides = {"rewards"}

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> RewardDecision:
        return RewardDecision(rewards=batch.lengths.float())
