"""Responses that were cut off at the length limit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_scorer
from dataflex_hooks.segments import segment_max


@register_scorer("truncated")
class Truncated(Scorer):
    """1 for a session with an output of ``max_length`` tokens or more, those of tools included, else 0: (bs,) float32.

    verl cuts responses at the limit and keeps no reason why generation ended, so a response that ends by itself on the
    very last token counts as truncated too. Masking them is the overlong filtering of DAPO (arXiv 2503.14476, section
    3.4).

    Args:
        max_length: in tokens; null stands for ``actor_rollout_ref.rollout.response_length``.
    """

    requires = ("response_mask",)
    timing = "post_reward"
    layout = "jagged"
    host_keywords = frozenset({"response_length"})

    def __init__(self, max_length: int | None = None, response_length: int | None = None, **kwargs: object) -> None:
        checks = ParameterChecks()
        limit = response_length if max_length is None else max_length
        self.max_length = checks.integer("max_length", limit, at_least=1)
        checks.finish()

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (bs,) float32, 0 or 1, equal within a session."""
        cut = (batch.lengths >= self.max_length).to(torch.float32)
        return batch.expand_sessions(segment_max(cut, batch.session, batch.n_sessions))
