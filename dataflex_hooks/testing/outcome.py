"""What a step came to: the merged decisions of its plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.decisions import AddedRow


@dataclass(frozen=True)
class Outcome:
    """What plugins decided about one step, merged as in a run. All rows and tokens are those of the batch given.

    Attributes:
        decisions: what each plugin returned, ``decisions[label][hook]``; a hook that was not called is not there, one
            that returned None is there with None.
        in_batch: (bs,) bool, rows that nobody dropped.
        kept: (bs,) bool, rows in the batch of which at least one valid token has a mask of 1.
        excluded: (bs,) bool, rows taken out of the KL and entropy terms too.
        weights: (T,) float32, factor on each token's policy gradient; 0 where masked, dropped, or not valid.
        row_weights: (bs,) float32, their means over each row's valid tokens; 0 without any.
        rewards: (bs,) float32, after replacement and adjusting; None where the batch has none.
        token_rewards: (T,), the same token by token: ``rewards`` are their sums.
        added: label and row, in the order in which a run adds them.
        update_scale: product of the plugins' scales; it is in ``weights`` already.
        skip_update: no optimizer step is made.
        admitted: (n,) bool, candidate prompts; None where no plugin says anything.
        priority: (n,) float64, likewise.
        proportions: (K,) float64, decided in this step; None where no plugin decided.
        metrics: what a run would log.
    """

    decisions: Mapping[str, Mapping[str, Any]]
    in_batch: Tensor
    kept: Tensor
    excluded: Tensor
    weights: Tensor
    row_weights: Tensor
    rewards: Tensor | None = None
    token_rewards: Tensor | None = None
    added: tuple[tuple[str, AddedRow], ...] = ()
    update_scale: float = 1.0
    skip_update: bool = False
    admitted: NDArray[np.bool_] | None = None
    priority: NDArray[np.float64] | None = None
    proportions: NDArray[np.float64] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def kept_rows(self) -> list[int]:
        """Indices of the rows in ``kept``."""
        return [int(row) for row in self.kept.nonzero().flatten()]


def nothing() -> Outcome:
    """The outcome of a step without a batch."""
    none, no_numbers = torch.zeros(0, dtype=torch.bool), torch.zeros(0)
    return Outcome({}, none, none, none, no_numbers, no_numbers)
