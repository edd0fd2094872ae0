"""Max-variance down-sampling: keep the part of each group whose scores differ most."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Selector
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.ranking import from_best, group_sizes, place_in_group, rows_of, session_values
from dataflex_hooks.registry import register_selector

# Variances that differ by rounding only count as equal.
_EQUAL = 1e-12


@register_selector("max_variance")
class MaxVariance(Selector):
    """Keep, in each group of G, the ``m = max(1, floor(keep_fraction * G + 0.5))`` sessions of largest score variance.

    PODS (arXiv 2504.13818): such a subset consists of the a lowest and the m - a highest scores, for some a, so m + 1
    candidates are compared. Among equal variances (to 1e-12 of the largest) the smallest a is taken, and equal scores
    are told apart by content (``batch.tie_rank``).

    Args:
        keep_fraction: share of each group to keep, in (0, 1].
    """

    requires = ("prompts", "responses")
    layout = "jagged"
    within_group = True
    needs_groups = True

    def __init__(self, keep_fraction: float = 0.5, **kwargs: object) -> None:
        checks = ParameterChecks()
        self.keep_fraction = checks.number("keep_fraction", keep_fraction, above=0, at_most=1)
        checks.finish()

    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return the kept row indices for (bs,) scores: all rows of the kept sessions."""
        values = session_values(scores, batch)
        group = batch.group_of_session.cpu().numpy()
        order = from_best(values, group, batch)
        sizes = group_sizes(batch)
        place = place_in_group(sizes)
        kept = np.maximum(1, np.floor(self.keep_fraction * sizes + 0.5).astype(np.int64))
        lowest = _lowest_to_keep(values[order], group[order], place, sizes, kept)
        from_top = place < (kept - lowest)[group[order]]
        from_bottom = place >= (sizes - lowest)[group[order]]
        return rows_of(order[from_top | from_bottom], batch)


def _lowest_to_keep(
    ranked: NDArray[np.float64],
    group: NDArray[np.int64],
    place: NDArray[np.int64],
    sizes: NDArray[np.int64],
    kept: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Find how many of the ``kept`` sessions of each group have to be its lowest: (n_groups,).

    Args:
        ranked, group, place: of the sessions, by group and from the highest score to the lowest.
        sizes, kept: of the groups.
    """
    width = int(sizes.max(initial=0))
    # Sums of the first j scores of each group, above the group's lowest: small numbers, so that squares stay exact.
    above = np.zeros((len(sizes), width))
    above[group, place] = ranked
    above -= np.take_along_axis(above, (sizes - 1)[:, None], axis=1)
    above[np.arange(width) >= sizes[:, None]] = 0.0
    sums, squares = (
        np.concatenate([np.zeros((len(sizes), 1)), np.cumsum(x, axis=1)], axis=1) for x in (above, above**2)
    )
    a = np.arange(int(kept.max(initial=0)) + 1)
    possible = a <= kept[:, None]
    top = np.where(possible, kept[:, None] - a, 0)
    bottom = np.where(possible, sizes[:, None] - a, 0)

    def of_subset(total: NDArray[np.float64]) -> NDArray[np.float64]:
        whole = np.take_along_axis(total, sizes[:, None], axis=1)
        result: NDArray[np.float64] = (
            np.take_along_axis(total, top, axis=1) + whole - np.take_along_axis(total, bottom, axis=1)
        )
        return result

    variance = np.where(possible, kept[:, None] * of_subset(squares) - of_subset(sums) ** 2, -np.inf)
    largest = variance.max(axis=1, keepdims=True)
    best: NDArray[np.int64] = (variance >= largest - _EQUAL * np.abs(largest)).argmax(axis=1).astype(np.int64)
    return best
