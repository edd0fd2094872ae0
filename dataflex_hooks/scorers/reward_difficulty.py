"""Reward of a response."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_scorer
from dataflex_hooks.signals import check_signal, session_signal, signal_requires


@register_scorer("reward_difficulty")
class RewardDifficulty(Scorer):
    """Raw outcome reward, before any KL penalty: (bs,) float32 in the units of the reward, low for hard prompts.

    The sum of ``rm_scores`` over the response. Every row of a multi-output session has the reward of its final output,
    which is the one the advantage comes from.

    Args:
        signal: ``reward``, or a key of the dict that the reward function returns, such as ``acc``.
    """

    timing = "post_reward"
    layout = "jagged"

    def __init__(self, signal: str = "reward", **kwargs: object) -> None:
        checks = ParameterChecks()
        self.signal = check_signal(checks, signal)
        checks.finish()
        self.requires = signal_requires(self.signal)

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (bs,) float32 rewards."""
        return batch.expand_sessions(session_signal(batch, self.signal))
