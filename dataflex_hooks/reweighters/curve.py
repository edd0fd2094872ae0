"""CurveRL: weight prompts by where their pass rate stands among those of the last steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Reweighter
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_reweighter

_DEFAULT_BINS = 11


@register_reweighter("curve")
class Curve(Reweighter):
    """``w(p) = f(p) / F(p)``: (bs,) float64, as it is (``normalize: none``).

    CurveRL (arXiv 2605.24331, algorithm 1; checked against the authors' code): f and F are the share of prompts in the
    same bin as p, and in that bin or below, in the histogram of the pass rates of the ``history`` steps before this
    one. The first step, and any with ``history`` 0, is compared with itself. Prompts never or always solved are left
    out of the histogram and get 0 (their advantage is 0 under a group baseline anyway); so does one in a bin that was
    empty. The paper pairs it with advantages that are not divided by the group's deviation
    (``algorithm.norm_adv_by_std_in_grpo=False``).

    A score is taken as a pass rate, averaged over the group; below 0 counts as 0, above 1 as 1.

    Args:
        history: steps to look back, at least 0.
        bins: of the histogram on [0, 1]; null stands for ``actor_rollout_ref.rollout.n`` + 1, one for each pass rate.
    """

    accepts = "response"
    layout = "jagged"
    normalize = "none"
    needs_groups = True
    host_keywords = frozenset({"rollouts"})

    def __init__(
        self, history: int = 10, bins: int | None = None, rollouts: int | None = None, **kwargs: object
    ) -> None:
        checks = ParameterChecks()
        self.history = checks.integer("history", history, at_least=0)
        own = _DEFAULT_BINS if rollouts is None else rollouts + 1
        self.bins = checks.integer("bins", own if bins is None else bins, at_least=2)
        checks.finish()
        self._counts: dict[int, NDArray[np.int64]] = {}

    def act(self, scores: Tensor, batch: RolloutBatch, *, step_id: int = 0, **ctx: Any) -> Tensor:
        """Return (bs,) weights for (bs,) scores, and remember the pass rates of this step."""
        rates = batch.per_group(batch.per_session(scores)).cpu().numpy().astype(np.float64)
        active = (rates > 0) & (rates < 1)
        # A rate such as 2/6 comes as the nearest float32, which may lie below the edge of its bin.
        bin_of = np.minimum((rates * self.bins + 1e-6).astype(np.int64).clip(0), self.bins - 1)
        own = np.bincount(bin_of[active], minlength=self.bins)
        before = [self._counts[step] for step in sorted(self._counts) if step < step_id][-self.history :]
        known = np.sum(before, axis=0) if self.history and before else own
        below = np.cumsum(known)
        share = np.divide(known, below, out=np.zeros(self.bins), where=below > 0)
        self._remember(step_id, own)
        weights = np.where(active, share[bin_of], 0.0)
        return batch.expand_groups(torch.from_numpy(weights).to(scores.device))

    def _remember(self, step: int, counts: NDArray[np.int64]) -> None:
        # A second call at the same step, as in asynchronous modes, adds to the first.
        self._counts[step] = self._counts[step] + counts if step in self._counts else counts
        for old in sorted(self._counts)[: -max(self.history, 1) - 1]:
            del self._counts[old]

    def state_dict(self) -> dict[str, Any]:
        """Return the histograms: ``steps`` (n,) int64 and ``counts`` (n, bins) int64."""
        steps = sorted(self._counts)
        counts = np.array([self._counts[step] for step in steps], dtype=np.int64).reshape(len(steps), self.bins)
        return {"steps": np.array(steps, dtype=np.int64), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take histograms back; raises ValueError when they have another number of bins."""
        counts = np.asarray(state["counts"], dtype=np.int64)
        if counts.shape[1:] != (self.bins,):
            raise ValueError(f"the saved histograms have {counts.shape[-1]} bins, this run has {self.bins}: set bins")
        self._counts = {int(step): counts[i].copy() for i, step in enumerate(np.asarray(state["steps"]))}
