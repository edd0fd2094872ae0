"""Train on the forking tokens only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Reweighter
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_reweighter


@register_reweighter("high_entropy")
class HighEntropy(Reweighter):
    """1 for tokens with a score at or above the (1 - ``rho``) quantile of the step, else 0: (T,) float32.

    With ``token_entropy`` this is arXiv 2506.01939 (section 5): policy gradients of the ``rho`` share of tokens with
    the highest entropy. The quantile is taken over all valid tokens of the global batch, and tokens equal to it are all
    kept. Its weights act as they are (``normalize: none``): normalised, a token that is kept would count 1 / rho.

    Args:
        rho: share of tokens to keep, in (0, 1].
    """

    accepts = "token"
    layout = "jagged"
    normalize = "none"

    def __init__(self, rho: float = 0.2, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.rho = checks.number("rho", rho, above=0, at_most=1)
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return (T,) weights for (T,) scores."""
        valid = scores if bool(batch.response_mask.all()) else scores[batch.response_mask]
        if not len(valid):
            return torch.ones_like(scores)
        # The smallest score at or above the interpolated quantile; partitioning is several times cheaper than sorting.
        place = math.ceil((1 - self.rho) * (len(valid) - 1) - 1e-9)
        threshold = np.partition(valid.cpu().numpy(), place)[place]
        return (scores >= float(threshold)).to(torch.float32)
