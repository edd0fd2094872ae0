"""More prompts from domains that lag behind."""

from __future__ import annotations

from collections.abc import Sequence

from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, softmax
from dataflex_hooks.registry import register_mixer


@register_mixer("reward_gap")
class RewardGap(BoundedMixer):
    """q = softmax((max_d r_d - r_d) / T), p = floor + (1 - K floor) q.

    r_d is the scorer's mean over the window. A domain without sessions in the window counts as the mean of the others.

    Args:
        temperature: T > 0, in the units of the score; large T approaches equal shares.
        floor, cap: bounds of every share, or of each by domain.
        window: steps looked back on.
    """

    published_with = ("reward_difficulty", "group_solve_rate")

    def __init__(
        self,
        temperature: float = 1.0,
        floor: Bound = 0.05,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self.temperature = checks.number("temperature", temperature, above=0)
        self._bounds(checks, domains, window, floor, cap)
        checks.finish()

    def _shares(self, view: MixView) -> Shares:
        scores = view.filled()
        return softmax(scores.max() - scores, self.temperature)
