"""DUMP: an upper confidence bound on how much there is to learn in each domain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, softmax
from dataflex_hooks.registry import register_mixer


@register_mixer("dump_ucb")
class DumpUcb(BoundedMixer):
    """u_d = s_d + c sqrt(2 ln(N + 1) / (n_d + 1)), p = softmax(u / T).

    DUMP (arXiv 2504.09710): s_d is the mean abs(advantage) of the domain over the window, n_d its number of sessions
    there, N their sum. With another scorer s_d is that scorer's mean. The authors' code has T = 0.1 and a window of
    300 samples; a window here counts steps.

    Args:
        c: weight of the bonus for rarely sampled domains, >= 0.
        temperature: T > 0, in the units of the score.
        floor, cap: bounds of every share, or of each by domain.
        window: steps looked back on.
    """

    published_with = ("advantage_magnitude",)

    def __init__(
        self,
        c: float = 1.0,
        temperature: float = 1.0,
        floor: Bound = 0.0,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = 50,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.c = checks.number("c", c, at_least=0)
        self.temperature = checks.number("temperature", temperature, above=0)
        self._bounds(checks, domains, window, floor, cap)
        checks.finish()

    def _shares(self, view: MixView) -> Shares:
        n = view.counts.astype(np.float64)
        bonus = np.sqrt(2 * np.log(n.sum() + 1) / (n + 1))
        return softmax(view.scores + self.c * bonus, self.temperature)
