"""Pass rate of a prompt's group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_scorer


@register_scorer("group_solve_rate")
class GroupSolveRate(Scorer):
    """Share of the group's sessions whose final output has a reward above ``success_threshold``.

    The pass rate that online difficulty filtering bounds (arXiv 2504.03380) and dynamic sampling requires to be neither
    0 nor 1 (DAPO, arXiv 2503.14476, eq. 11). (bs,) float32 in [0, 1], equal within a group.

    Args:
        success_threshold: reward above which a session counts as solved, in the units of the reward.
    """

    requires = ("rm_scores", "response_mask")
    timing = "post_reward"
    granularity = "prompt"
    needs_groups = True
    layout = "jagged"

    def __init__(self, success_threshold: float = 0.5, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.success_threshold = checks.number("success_threshold", success_threshold)
        checks.finish()

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (bs,) float32 pass rates."""
        solved = (batch.session_rewards > self.success_threshold).to(torch.float32)
        return batch.expand_groups(batch.per_group(solved))
