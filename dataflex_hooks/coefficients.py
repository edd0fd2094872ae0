"""The coefficient that the configured loss gives each token, under which weights are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch


@dataclass(frozen=True)
class LossCoefficients:
    """How the loss mode and its aggregation weigh tokens, up to a constant.

    Attributes:
        kind: ``"token"``: every valid token alike (token-mean: 1/T, and the token-sum modes); ``"sequence"``: every
            response alike, 1/|o_i| for each of its valid tokens (seq-mean-token-mean).
        per_token: whether the loss is linear in per-token weights; where it is not (``geo_mean``), only decisions per
            response can be applied.
        divides_by_rows: whether the loss divides by the nominal number of rows of a mini-batch, padding included (the
            sequence-mean modes), so that padding in place of dropped rows shrinks the gradient.
        source: where this is known from, for messages.
    """

    kind: Literal["token", "sequence"]
    per_token: bool = True
    divides_by_rows: bool = False
    source: str = ""

    def of_rows(self, batch: RolloutBatch) -> Tensor:
        """Return what the loss gives each valid token of a row, (bs,) float64."""
        if self.kind == "token":
            return torch.ones(batch.bs, dtype=torch.float64, device=batch.offsets.device)
        return 1.0 / batch.weighed.clamp(min=1).to(torch.float64)
