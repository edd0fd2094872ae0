"""Pass rate of a prompt's group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_scorer
from dataflex_hooks.signals import check_signal, session_signal, signal_requires


@register_scorer("group_solve_rate")
class GroupSolveRate(Scorer):
    """Share of the group's sessions whose final output has a reward above ``success_threshold``.

    The pass rate that online difficulty filtering bounds (arXiv 2504.03380) and dynamic sampling requires to be neither
    0 nor 1 (DAPO, arXiv 2503.14476, eq. 11). (bs,) float32 in [0, 1], equal within a group. Sessions that are missing
    from a group are not counted.

    Args:
        success_threshold: value above which a session counts as solved, in the units of the signal.
        signal: ``reward``, or a key of the dict that the reward function returns, such as ``acc``.
    """

    timing = "post_reward"
    granularity = "prompt"
    needs_groups = True
    layout = "jagged"

    def __init__(self, success_threshold: float = 0.5, signal: str = "reward", **kwargs: object) -> None:
        checks = ParameterChecks()
        self.success_threshold = checks.number("success_threshold", success_threshold)
        self.signal = check_signal(checks, signal)
        checks.finish()
        self.requires = (*signal_requires(self.signal), "response_mask")

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (bs,) float32 pass rates."""
        solved = (session_signal(batch, self.signal) > self.success_threshold).to(torch.float32)
        return batch.expand_groups(batch.per_group(solved))
