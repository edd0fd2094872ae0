"""Probability of each token under the policy that is being updated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.registry import register_scorer


@register_scorer("token_prob")
class TokenProb(Scorer):
    """pi(o_t | q, o_<t) = exp(old_log_prob): (T,) float32 in [0, 1].

    Tokens of low probability have large gradients and dominate updates (arXiv 2505.12929).
    """

    requires = ("old_log_probs",)
    granularity = "token"
    layout = "jagged"

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (T,) float32 probabilities."""
        return batch.values("old_log_probs").exp()
