"""Proportions that change at given steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, share_problems, shares_of
from dataflex_hooks.registry import register_mixer


@register_mixer("schedule")
class Schedule(BoundedMixer):
    """Piecewise constant proportions: those of the last phase whose step is not after the current one.

    The decision at the end of step t governs the prompts of step t + 1; a phase from step s on is in force for the
    prompts fetched in step s. Prompts that an asynchronous mode fetches before step s belong to the phase before.

    Args:
        phases: first step of each phase to its shares (a list in the order of ``domains``, or a mapping by domain), for
            example ``{0: [1, 1], 100: [1, 3]}``. Before the first phase shares are equal.
        floor, cap: bounds of every share, or of each by domain.
    """

    needs_scorer = False

    def __init__(
        self,
        phases: Mapping[int, Sequence[float] | Mapping[str, float]] | None = None,
        floor: Bound = 0.0,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self._bounds(checks, domains, window, floor, cap)
        self.phases: dict[int, Any] = {}
        if not isinstance(phases, Mapping) or not phases:
            checks.refuse("phases", phases, "a mapping of first steps to shares, such as {0: [1, 1], 100: [1, 3]}")
        else:
            for step, shares in phases.items():
                first = _step(step)
                if first is None:
                    checks.refuse(f"phases.{step}", step, "an integer >= 0, the first step of the phase")
                    continue
                checks.add(share_problems(f"phases.{step}", shares, self.domains))
                self.phases[first] = shares
        checks.finish()

    def _shares(self, view: MixView) -> Shares:
        return self._at(view.step + 1, view.domains)

    def _first(self, domains: tuple[str, ...]) -> Shares:
        return self._at(1, domains)

    def _at(self, step: int, domains: tuple[str, ...]) -> Shares:
        begun = [first for first in self.phases if first <= step]
        return shares_of(self.phases[max(begun)], domains) if begun else super()._first(domains)


def _step(given: object) -> int | None:
    # Hydra's command line may give the key as text.
    if isinstance(given, str) and given.isdecimal():
        return int(given)
    return given if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else None
