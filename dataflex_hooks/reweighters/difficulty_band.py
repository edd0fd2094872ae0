"""More weight for the middle of the difficulty range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Component, Reweighter, Scorer
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_reweighter


@register_reweighter("difficulty_band")
class DifficultyBand(Reweighter):
    """``focus_weight`` for scores within the [``low_q``, ``high_q``] quantiles, 1 elsewhere: (bs,) float64.

    Quantiles are those of the groups of the step if the scorer scores prompts, else those of its sessions; linear
    between two scores, both ends included. On rewards of 0 and 1 the quartiles fall on 0 and 1 themselves, and what is
    favoured is one extreme or everything: a score of the group, such as ``group_solve_rate``, serves it better. The
    host normalises.

    Args:
        low_q, high_q: quantiles in [0, 1], low_q at most high_q.
        focus_weight: weight within them, at least 0.
    """

    accepts = "response"
    layout = "jagged"

    def __init__(
        self,
        low_q: float = 0.25,
        high_q: float = 0.75,
        focus_weight: float = 2.0,
        scorer: Component | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.low_q = checks.number("low_q", low_q, at_least=0, at_most=1)
        self.high_q = checks.number("high_q", high_q, at_least=0, at_most=1)
        self.focus_weight = checks.number("focus_weight", focus_weight, at_least=0)
        checks.finish()
        if self.low_q > self.high_q:
            checks.refuse("low_q", low_q, f"a number up to high_q, which is {high_q}")
        checks.finish()
        self.by_group = isinstance(scorer, Scorer) and scorer.granularity == "prompt"

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return (bs,) weights for (bs,) scores."""
        sessions = batch.per_session(scores)
        ranked = batch.per_group(sessions) if self.by_group else sessions
        if not len(ranked):
            return scores.to(torch.float64)
        at = torch.tensor([self.low_q, self.high_q], dtype=torch.float64, device=scores.device)
        low, high = torch.quantile(ranked.to(torch.float64), at)
        inside = (scores >= low) & (scores <= high)
        return torch.where(inside, self.focus_weight, 1.0).to(torch.float64)
