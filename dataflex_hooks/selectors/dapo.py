"""Dynamic sampling without the sampling: only groups whose scores differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Selector
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_selector
from dataflex_hooks.segments import segment_count, segment_max, segment_sum


@register_selector("dapo")
class Dapo(Selector):
    """Keep the groups whose scores have a standard deviation above ``tol``; a group of one has none.

    The condition of dynamic sampling (DAPO, arXiv 2503.14476, eq. 11), for binary and for continuous rewards: groups
    without a spread have no advantage. DAPO draws new prompts for those it leaves out; here the update gets smaller.
    verl's own ``algorithm.filter_groups`` refills.

    Args:
        tol: in the units of the score, at least 0; the deviation is that of the population (divided by G).
    """

    layout = "jagged"
    needs_groups = True

    def __init__(self, tol: float = 1e-6, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.tol = checks.number("tol", tol, at_least=0)
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return the kept row indices for (bs,) scores: all rows of the kept groups."""
        group, n = batch.group_of_session, batch.n_groups
        values = batch.per_session(scores).to(torch.float64)
        # From the largest score of the group on, so that equal scores have a deviation of exactly 0.
        below = segment_max(values, group, n)[group] - values
        size = segment_count(group, n).clamp(min=1)
        mean = segment_sum(below, group, n) / size
        variance = segment_sum((below - mean[group]) ** 2, group, n) / size
        return batch.expand_groups(variance.sqrt() > self.tol).nonzero().flatten()
