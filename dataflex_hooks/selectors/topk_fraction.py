"""Keep the highest-scored share of the responses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Selector
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.ranking import from_best, rows_of, session_values
from dataflex_hooks.registry import register_selector


@register_selector("topk_fraction")
class TopkFraction(Selector):
    """Keep the ``k = max(1, floor(fraction * n + 0.5))`` best of the n sessions of the step, over all groups.

    Ties break by prompt, response, session and output (``batch.tie_rank``), so that the same responses are kept
    wherever they stand in the batch.

    Args:
        fraction: share to keep, in (0, 1].
        largest: True keeps the highest scores, False the lowest.
    """

    requires = ("prompts", "responses")
    layout = "jagged"

    def __init__(self, fraction: float = 0.5, largest: bool = True, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.fraction = checks.number("fraction", fraction, above=0, at_most=1)
        self.largest = checks.flag("largest", largest)
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return the kept row indices for (bs,) scores: all rows of the kept sessions."""
        k = max(1, math.floor(self.fraction * batch.n_sessions + 0.5))
        values = session_values(scores, batch)
        everywhere = np.zeros(batch.n_sessions, dtype=np.int64)
        return rows_of(from_best(values if self.largest else -values, everywhere, batch)[:k], batch)

    def preference(self, scores: Tensor, batch: RolloutBatch) -> Tensor:
        """Return the scores, or minus them where the lowest are kept."""
        return scores if self.largest else -scores
