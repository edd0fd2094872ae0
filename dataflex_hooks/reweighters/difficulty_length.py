"""More weight for hard prompts and short responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Reweighter
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_reweighter


@register_reweighter("difficulty_length")
class DifficultyLength(Reweighter):
    """``w = (0.5 + 1.5 * clip(d, 0, 1)) * (1.5 - min(|o| / max_length, 1))``: (bs,) float64; the host normalises.

    d is the difficulty, 0 easy and 1 hard; |o| counts the tokens that the model wrote. The hardest prompts count four
    times as much as the easiest, the shortest responses three times as much as the longest.

    Args:
        invert: True takes d = 1 - score, for pass rates and rewards, which are low for hard prompts; False takes the
            score itself.
        max_length: in tokens; null stands for ``actor_rollout_ref.rollout.response_length``, or for the longest
            response of the step where the host does not know that.
    """

    requires = ("response_mask",)
    accepts = "response"
    layout = "jagged"
    host_keywords = frozenset({"response_length"})

    def __init__(
        self,
        invert: bool = True,
        max_length: int | None = None,
        response_length: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.invert = checks.flag("invert", invert)
        limit = response_length if max_length is None else max_length
        self.max_length = None if limit is None else checks.integer("max_length", limit, at_least=1)
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return (bs,) weights for (bs,) scores."""
        difficulty = scores.to(torch.float64)
        difficulty = (1 - difficulty if self.invert else difficulty).clamp(0, 1)
        longest = self.max_length or int(batch.n_valid.max()) if batch.bs else 1
        share = (batch.n_valid.to(torch.float64) / max(longest, 1)).clamp(max=1)
        return (0.5 + 1.5 * difficulty) * (1.5 - share)
