"""Reward of a response."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.registry import register_scorer


@register_scorer("reward_difficulty")
class RewardDifficulty(Scorer):
    """Raw outcome reward, before any KL penalty: (bs,) float32 in the units of the reward, low for hard prompts.

    The sum of ``rm_scores`` over the response. Every row of a multi-output session has the reward of its final output,
    which is the one the advantage comes from.
    """

    requires = ("rm_scores",)
    timing = "post_reward"
    layout = "jagged"

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (bs,) float32 rewards."""
        return batch.expand_sessions(batch.session_rewards)
