"""Weights that grow exponentially with the score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Reweighter
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_reweighter


@register_reweighter("softmax")
class Softmax(Reweighter):
    """``w`` proportional to exp(s / T): (bs,) float64, 1 at the highest score; the host normalises.

    Args:
        temperature: T > 0, in the units of the score; large T approaches equal weights.
    """

    accepts = "response"
    layout = "jagged"

    def __init__(self, temperature: float = 1.0, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.temperature = checks.number("temperature", temperature, above=0)
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return (bs,) weights for (bs,) scores."""
        exponent = scores.to(torch.float64) / self.temperature
        # exp of large scores overflows; the largest exponent may be any constant, since only ratios count.
        return (exponent - exponent.max()).exp()
