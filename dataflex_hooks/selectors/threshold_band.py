"""Keep scores inside an open interval."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Selector
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_selector


@register_selector("threshold_band")
class ThresholdBand(Selector):
    """Keep iff ``low < s < high``, both strict.

    With ``group_solve_rate`` this is online difficulty filtering (arXiv 2504.03380); with the defaults it drops exactly
    the groups that dynamic sampling drops (DAPO, arXiv 2503.14476, eq. 11), whose advantage is zero.

    Args:
        low: lower bound, in the units of the score; ``-.inf`` for none.
        high: upper bound, above ``low``; ``.inf`` for none.
    """

    layout = "jagged"
    on_candidates = True

    def __init__(self, low: float = 0.0, high: float = 1.0, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.low = checks.number("low", low, finite=False)
        self.high = checks.number("high", high, finite=False)
        checks.finish()
        if self.low >= self.high:
            checks.refuse("low", low, f"a number below high, which is {high}")
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return the kept row indices for (bs,) scores."""
        return ((scores > self.low) & (scores < self.high)).nonzero().flatten()

    def preference(self, scores: Tensor, batch: RolloutBatch) -> Tensor:
        """Return minus the distance from the band, 0 inside."""
        return -((self.low - scores).clamp(min=0) + (scores - self.high).clamp(min=0))
