"""DoReMi's multiplicative weights, driven by a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, shares_of
from dataflex_hooks.registry import register_mixer
from dataflex_hooks.running import RunningValues

_CLIP = 5.0


@register_mixer("doremi")
class Doremi(BoundedMixer):
    """a_d <- w_d exp(eta l_d), w = (1 - c) a / sum(a) + c / K, p = w, starting from equal shares.

    The domain update of DoReMi (arXiv 2305.10429, algorithm 1). There l_d is the loss in excess of a reference model;
    here it is the scorer's mean over the domain's sessions since the last decision, less the mean over the domains
    seen, clipped to [-5, 5]: a higher score raises the share. A domain without sessions has l_d = 0.

    Args:
        eta: step size >= 0, in 1 over the units of the score.
        c: smoothing in [0, 1].
        floor, cap: bounds of every share, or of each by domain; they do not enter the weights that are carried on.
        window: steps looked back on, at most, when decisions are further apart than that.
    """

    def __init__(
        self,
        eta: float = 1.0,
        c: float = 1e-3,
        floor: Bound = 0.0,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.eta = checks.number("eta", eta, at_least=0)
        self.c = checks.number("c", c, at_least=0, at_most=1)
        self._bounds(checks, domains, window, floor, cap)
        checks.finish()
        self._weights = RunningValues()

    def _shares(self, view: MixView) -> Shares:
        k = len(view.domains)
        score, seen = self._weights.fresh(view)
        excess = np.zeros(k)
        if seen.any():
            excess[seen] = np.clip(score[seen] - score[seen].mean(), -_CLIP, _CLIP)
        grown = self._weights.values(view.domains, 1 / k) * np.exp(self.eta * excess - (self.eta * excess).max())
        weights = (1 - self.c) * shares_of(grown.tolist(), view.domains) + self.c / k
        self._weights.keep(view, weights)
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by domain and the step of the last decision."""
        return self._weights.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self._weights.load_state_dict(state)
