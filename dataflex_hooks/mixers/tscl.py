"""Teacher-student curriculum learning: more prompts from domains in which the score changes fastest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataflex_hooks.domain_window import DomainHistory
from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, softmax
from dataflex_hooks.registry import register_mixer


@register_mixer("tscl")
class Tscl(BoundedMixer):
    """p = softmax(abs(b_d) / T), b_d the least-squares slope of the domain's score against the step.

    The window algorithm of TSCL (arXiv 1707.00183). Each step's mean weighs by its sessions, which is the same as
    fitting all sessions. A domain seen in fewer than two steps of the window has slope 0.

    Args:
        temperature: T > 0, in units of the score per step; slopes are small, so T = 1 is close to equal shares.
        signed: True takes b_d itself, so that a falling score lowers the share; the paper's abs(b_d) also returns to
            what is being forgotten.
        floor, cap: bounds of every share, or of each by domain.
        window: steps looked back on, at least 2.
    """

    least_window = 2
    published_with = ("reward_difficulty", "group_solve_rate")

    def __init__(
        self,
        temperature: float = 1.0,
        signed: bool = False,
        floor: Bound = 0.0,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.temperature = checks.number("temperature", temperature, above=0)
        self.signed = checks.flag("signed", signed)
        self._bounds(checks, domains, window, floor, cap)
        checks.finish()

    def _shares(self, view: MixView) -> Shares:
        slope = slopes(view.history)
        return softmax(slope if self.signed else np.abs(slope), self.temperature)


def slopes(history: DomainHistory) -> Shares:
    """Return the count-weighted least-squares slope of each domain's score: (K,) float64, in score per step."""
    weight = history.counts.astype(np.float64)
    total = np.maximum(weight.sum(axis=0), 1)
    step = history.steps.astype(np.float64)[:, None]
    step = step - (weight * step).sum(axis=0) / total
    score = history.scores - (weight * history.scores).sum(axis=0) / total
    spread = (weight * step * step).sum(axis=0)
    product = (weight * step * score).sum(axis=0)
    slope = np.zeros(product.shape, dtype=np.float64)
    np.divide(product, spread, out=slope, where=spread > 1e-12)
    return slope
