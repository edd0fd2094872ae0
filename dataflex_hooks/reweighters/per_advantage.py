"""Prioritised experience replay, as loss weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Reweighter
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_reweighter


@register_reweighter("per_advantage")
class PerAdvantage(Reweighter):
    """``w`` proportional to (abs(s) + epsilon)^alpha: (bs,) float64; the host normalises.

    The proportional priority of prioritised experience replay (arXiv 1511.05952, eq. 1), with the score in place of the
    TD error and a weight in place of a sampling probability.

    Args:
        alpha: exponent >= 0; 0 gives equal weights.
        epsilon: >= 0, keeps responses with score 0 in the update, in the units of the score.
    """

    accepts = "response"
    layout = "jagged"

    def __init__(self, alpha: float = 0.5, epsilon: float = 1e-6, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.alpha = checks.number("alpha", alpha, at_least=0)
        self.epsilon = checks.number("epsilon", epsilon, at_least=0)
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return (bs,) weights for (bs,) scores."""
        return (scores.to(torch.float64).abs() + self.epsilon) ** self.alpha
