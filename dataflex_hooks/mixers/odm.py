"""Online data mixing: EXP3 over domains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, softmax
from dataflex_hooks.registry import register_mixer
from dataflex_hooks.running import RunningValues


@register_mixer("odm")
class Odm(BoundedMixer):
    """R_d <- alpha R_d + (1 - alpha) s_d / p_d, p = (1 - K eps_t) softmax(eps_(t-1) R) + eps_t.

    Online data mixing (arXiv 2312.02406, algorithm 1): t counts decisions, eps_t = max(least, min(1/K, sqrt(ln K /
    (K t)))), at most 1/K, so that it also makes sense with more than 1/least domains. s_d is the scorer's mean over the
    domain's sessions since the last decision, p_d its share when that decision was made; a domain without sessions
    keeps its R_d. The paper's reward is the training loss of pre-training; any scorer does here.

    Args:
        alpha: smoothing of the reward estimates, in [0, 1).
        least_exploration: smallest eps, >= 0.
        floor, cap: bounds of every share, or of each by domain, beyond eps.
        window: steps looked back on, at most, when decisions are further apart than that.
    """

    def __init__(
        self,
        alpha: float = 0.9,
        least_exploration: float = 0.03,
        floor: Bound = 0.0,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.alpha = checks.number("alpha", alpha, at_least=0)
        if self.alpha >= 1:
            checks.refuse("alpha", alpha, "a number >= 0 and < 1")
        self.least_exploration = checks.number("least_exploration", least_exploration, at_least=0, at_most=1)
        self._bounds(checks, domains, window, floor, cap)
        checks.finish()
        self._rewards = RunningValues()
        self._in_force: dict[str, float] = {}
        self._decisions = 0

    def _shares(self, view: MixView) -> Shares:
        k = len(view.domains)
        score, seen = self._rewards.fresh(view)
        rewards = self._rewards.values(view.domains, 0.0)
        first = dict(zip(view.domains, self.start(view.domains), strict=True))
        share = np.array([self._in_force.get(domain, first[domain]) for domain in view.domains])
        # A domain with share 0 can still have sessions that were generated before it got that share.
        used = seen & (share > 0)
        rewards[used] = self.alpha * rewards[used] + (1 - self.alpha) * score[used] / share[used]
        self._rewards.keep(view, rewards)
        before, self._decisions = self._exploration(k, self._decisions), self._decisions + 1
        exploration = self._exploration(k, self._decisions)
        shares = (1 - k * exploration) * softmax(before * rewards, 1.0) + exploration
        self._in_force = dict(zip(view.domains, self._within(view.domains, shares), strict=True))
        return shares

    def _exploration(self, k: int, decisions: int) -> float:
        annealed = math.sqrt(math.log(k) / (k * decisions)) if decisions else math.inf
        return min(1 / k, max(self.least_exploration, min(1 / k, annealed)))

    def state_dict(self) -> dict[str, Any]:
        """Return reward estimates, shares in force, number of decisions, and the step of the last one."""
        return {**self._rewards.state_dict(), "in_force": dict(self._in_force), "decisions": self._decisions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self._rewards.load_state_dict(state)
        self._in_force = {str(domain): float(share) for domain, share in state["in_force"].items()}
        self._decisions = int(state["decisions"])
