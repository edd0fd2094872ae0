"""Self-evolving curriculum: domains as arms of a bandit whose reward is the size of the advantage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, softmax
from dataflex_hooks.registry import register_mixer
from dataflex_hooks.running import RunningValues


@register_mixer("sec")
class Sec(BoundedMixer):
    """Q_d <- (1 - alpha) Q_d + alpha s_d, p = softmax(Q / T), Q_d = 0 at first.

    SEC (arXiv 2505.14970), TD(0) with a Boltzmann policy: s_d is the mean abs(advantage) of the domain's sessions since
    the last decision. A domain without sessions keeps its Q_d. With another scorer s_d is that scorer's mean.

    Args:
        alpha: learning rate in (0, 1].
        temperature: T > 0, in the units of the score.
        floor, cap: bounds of every share, or of each by domain.
        window: steps looked back on, at most, when decisions are further apart than that.
    """

    published_with = ("advantage_magnitude",)

    def __init__(
        self,
        alpha: float = 0.5,
        temperature: float = 1.0,
        floor: Bound = 0.0,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.alpha = checks.number("alpha", alpha, above=0, at_most=1)
        self.temperature = checks.number("temperature", temperature, above=0)
        self._bounds(checks, domains, window, floor, cap)
        checks.finish()
        self._q = RunningValues()

    def _shares(self, view: MixView) -> Shares:
        score, seen = self._q.fresh(view)
        q = self._q.values(view.domains, 0.0)
        q[seen] = (1 - self.alpha) * q[seen] + self.alpha * score[seen]
        self._q.keep(view, q)
        return softmax(q, self.temperature)

    def state_dict(self) -> dict[str, Any]:
        """Return Q by domain and the step of the last decision."""
        return self._q.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self._q.load_state_dict(state)
