"""Group filtered policy optimisation: sample more, keep the shortest or the most efficient."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Selector
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.ranking import from_best, group_sizes, place_in_group, rows_of, session_lengths, session_values
from dataflex_hooks.registry import register_selector


@register_selector("gfpo")
class Gfpo(Selector):
    """Keep the ``k`` sessions of each group that are best by ``metric``; a group with at most k keeps all.

    GFPO (arXiv 2508.09726, section 3). ``short``: the fewest tokens, whatever their score. ``efficiency``: the highest
    score per token; a score below 0 is divided all the same, so that of two equally bad responses the longer one is
    preferred. Length counts the tokens that the model wrote in all outputs of the session. Ties break by content
    (``batch.tie_rank``).

    Args:
        k: sessions to keep in each group, fewer than ``actor_rollout_ref.rollout.n``.
        metric: ``short`` or ``efficiency``.
    """

    requires = ("prompts", "responses", "response_mask")
    layout = "jagged"
    within_group = True
    needs_groups = True
    host_keywords = frozenset({"rollouts"})

    def __init__(self, k: int = 8, metric: str = "short", rollouts: int | None = None, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.k = checks.integer("k", k, at_least=1)
        self.metric = checks.choice("metric", metric, ("short", "efficiency"))
        checks.finish()
        if rollouts is not None and rollouts > 1 and self.k >= rollouts:
            checks.refuse(
                "k", k, f"an integer below actor_rollout_ref.rollout.n, which is {rollouts}: all are kept else"
            )
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return the kept row indices for (bs,) scores: all rows of the kept sessions."""
        order = from_best(self._value(scores, batch), batch.group_of_session.cpu().numpy(), batch)
        return rows_of(order[place_in_group(group_sizes(batch)) < self.k], batch)

    def preference(self, scores: Tensor, batch: RolloutBatch) -> Tensor:
        """Return the metric: minus the length, or the score per token."""
        return batch.expand_sessions(torch.from_numpy(self._value(scores, batch)).to(scores.device))

    def _value(self, scores: Tensor, batch: RolloutBatch) -> NDArray[np.float64]:
        lengths = session_lengths(batch)
        if self.metric == "short":
            return -lengths.astype(np.float64)
        per_token: NDArray[np.float64] = session_values(scores, batch) / np.maximum(lengths, 1)
        return per_token
