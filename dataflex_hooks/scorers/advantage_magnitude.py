"""Size of a response's advantage."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_scorer


@register_scorer("advantage_magnitude")
class AdvantageMagnitude(Scorer):
    """``agg`` of abs(A) over the valid tokens of a response: (bs,) float32, at least 0.

    The learning signal that DUMP averages per domain (arXiv 2504.09710) and SEC rewards its curriculum with
    (arXiv 2505.14970), here per response.

    Args:
        agg: ``mean``, ``sum`` or ``max``. ``sum`` grows with the length of the response.
    """

    requires = ("advantages", "response_mask")
    layout = "jagged"

    def __init__(self, agg: str = "mean", **kwargs: object) -> None:
        checks = ParameterChecks()
        self.agg = checks.choice("agg", agg, ("mean", "sum", "max"))
        checks.finish()

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (bs,) float32 magnitudes."""
        return batch.magnitude("advantages", self.agg)
