"""Domain-aware dynamic sampling: more prompts from domains that are short of a target reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, softmax
from dataflex_hooks.registry import register_mixer
from dataflex_hooks.running import RunningValues

_DECAYS = ("harmonic", "ewma")


@register_mixer("dads")
class Dads(BoundedMixer):
    """q = softmax(max(0, target - r_d) / T), p = floor + (1 - K floor) q.

    Dads of RuleReasoner (arXiv 2506.08672): r_d is the domain's decayed mean score. ``harmonic`` weighs the window's
    steps 1, 1/2, 1/3, ... from the latest back, times their sessions; ``ewma`` is r <- alpha r + (1 - alpha) s once a
    decision, s the mean since the last one. A domain without sessions counts as the mean of the others. The authors
    decide every 8 steps: ``dataflex.update_step=8``. In their code epsilon stands inside the exponent, where it
    cancels; here it is the floor that the paper describes.

    Args:
        target: reward at which a domain needs no extra share, in the units of the score.
        temperature: T > 0, in the units of the score.
        decay: ``harmonic`` or ``ewma``.
        alpha: weight of the past under ``ewma``, in [0, 1).
        floor, cap: bounds of every share, or of each by domain.
        window: steps looked back on.
    """

    published_with = ("reward_difficulty", "group_solve_rate")

    def __init__(
        self,
        target: float = 1.0,
        temperature: float = 0.3,
        decay: str = "harmonic",
        alpha: float = 0.5,
        floor: Bound = 0.1,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.target = checks.number("target", target)
        self.temperature = checks.number("temperature", temperature, above=0)
        self.decay = checks.choice("decay", decay, _DECAYS)
        self.alpha = checks.number("alpha", alpha, at_least=0)
        if self.alpha >= 1:
            checks.refuse("alpha", alpha, "a number >= 0 and < 1")
        self._bounds(checks, domains, window, floor, cap)
        checks.finish()
        self._average = RunningValues()

    def _shares(self, view: MixView) -> Shares:
        reward = self._harmonic(view) if self.decay == "harmonic" else self._ewma(view)
        known = np.isfinite(reward)
        if not known.any():
            return self._first(view.domains)
        reward = np.where(known, reward, reward[known].mean())
        return softmax(np.maximum(0.0, self.target - reward), self.temperature)

    def _harmonic(self, view: MixView) -> Shares:
        history = view.history
        rank = np.arange(len(history.steps), 0, -1, dtype=np.float64)[:, None]
        weight = history.counts / rank
        total = weight.sum(axis=0)
        counted = (weight * history.scores).sum(axis=0)
        mean = np.full(len(total), np.nan)
        np.divide(counted, total, out=mean, where=total > 0)
        return mean

    def _ewma(self, view: MixView) -> Shares:
        score, seen = self._average.fresh(view)
        average = self._average.values(view.domains, np.nan)
        again = seen & np.isfinite(average)
        average[again] = self.alpha * average[again] + (1 - self.alpha) * score[again]
        average[seen & ~again] = score[seen & ~again]
        self._average.keep(view, average)
        return average

    def state_dict(self) -> dict[str, Any]:
        """Return the averages of ``ewma`` by domain and the step of the last decision."""
        return self._average.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self._average.load_state_dict(state)
