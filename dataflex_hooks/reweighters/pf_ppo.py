"""Policy filtration: responses whose reward is far from unreliable middle values count more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Reweighter
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_reweighter
from dataflex_hooks.segments import segment_max

# As in verl's compute_pf_ppo_reweight_data; without it nothing would be left when every reward is 0.
_EPSILON = 1e-8


@register_reweighter("pf_ppo")
class PfPpo(Reweighter):
    """Weights by reward: (bs,) float64; the host normalises.

    ``pow``: abs(s)^k. ``max_min``: 1 for the highest and the lowest score, 0 between. ``max_random``: 0.4 for the
    highest, 0.1 for all others. 1e-8 is added to each. PF-PPO (arXiv 2409.06957) samples from a buffer with such
    probabilities; a weight has the same expectation without drawing, and verl's ``algorithm.use_pf_ppo``, which draws,
    mixes up rows under its v1 trainer. verl's function compares the whole batch, the paper the responses to one prompt:
    ``over``.

    Args:
        method: ``pow``, ``max_min`` or ``max_random``.
        k: exponent of ``pow``, at least 0.
        over: ``batch`` or ``group``: among which sessions ``max_min`` and ``max_random`` look for extremes.
    """

    accepts = "response"
    layout = "jagged"

    def __init__(self, method: str = "pow", k: float = 2.0, over: str = "batch", **kwargs: object) -> None:
        checks = ParameterChecks()
        self.method = checks.choice("method", method, ("pow", "max_min", "max_random"))
        self.k = checks.number("k", k, at_least=0)
        self.over = checks.choice("over", over, ("batch", "group"))
        checks.finish()
        self.needs_groups = self.over == "group"

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return (bs,) weights for (bs,) scores."""
        values = scores.to(torch.float64)
        if self.method == "pow":
            return values.abs() ** self.k + _EPSILON
        grouped = self.over == "group"
        segment = batch.group if grouped else torch.zeros_like(batch.group)
        size = batch.n_groups if grouped else 1
        best = values == segment_max(values, segment, size)[segment]
        if self.method == "max_random":
            return torch.where(best, 0.4, 0.1).to(torch.float64) + _EPSILON
        worst = values == -segment_max(-values, segment, size)[segment]
        return (best | worst).to(torch.float64) + _EPSILON
