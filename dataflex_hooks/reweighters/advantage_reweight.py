"""Advantage Reweighting: damp the update of low-probability tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Reweighter
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_reweighter


@register_reweighter("advantage_reweight")
class AdvantageReweight(Reweighter):
    """``w_t = alpha * pi_t + (1 - alpha)`` per token: (T,) float32; the host normalises.

    Advantage Reweighting of arXiv 2505.12929. The paper multiplies advantages, which is the same for a loss that is
    linear in the advantage. Its authors use alpha = 0.2 alone and 0.3 with Lopti, and no normalisation:
    ``normalize: none`` gives theirs.

    Args:
        alpha: strength in [0, 1]; 0 leaves every token alone, 1 weighs tokens by their probability.
    """

    accepts = "token"
    layout = "jagged"

    def __init__(self, alpha: float = 0.5, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.alpha = checks.number("alpha", alpha, at_least=0, at_most=1)
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return (T,) weights for (T,) scores, the probabilities of the tokens."""
        # One pass over the tokens instead of two.
        return torch.add(scores.new_tensor(1 - self.alpha), scores, alpha=self.alpha)
