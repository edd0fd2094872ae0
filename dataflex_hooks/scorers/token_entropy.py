"""Entropy of the policy at each token."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.registry import register_scorer


@register_scorer("token_entropy")
class TokenEntropy(Scorer):
    """H_t = -sum_v pi(v | q, o_<t) log pi(v | q, o_<t) in nats: (T,) float32.

    verl computes it in the pass that gives old log-probs and stores it as ``entropy``; with
    ``algorithm.rollout_correction.bypass_mode`` there is no such pass. Tokens of high entropy are the forks at which a
    chain of reasoning takes its direction (arXiv 2506.01939).
    """

    requires = ("entropy",)
    granularity = "token"
    layout = "jagged"

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (T,) float32 entropies."""
        return batch.values("entropy")
