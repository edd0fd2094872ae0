"""Proportions that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataflex_hooks.mixing import BoundedMixer, MixView
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, share_problems, shares_of
from dataflex_hooks.registry import register_mixer


@register_mixer("static")
class Static(BoundedMixer):
    """The given proportions, from the first prompt on.

    Args:
        proportions: one share a domain, a list in the order of ``domains`` or a mapping by domain; normalised. None
            gives equal shares.
        floor, cap: bounds of every share, or of each by domain.
    """

    needs_scorer = False

    def __init__(
        self,
        proportions: Sequence[float] | Mapping[str, float] | None = None,
        floor: Bound = 0.0,
        cap: Bound = 1.0,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        **kwargs: object,
    ) -> None:
        checks = ParameterChecks()
        self._bounds(checks, domains, window, floor, cap)
        if proportions is not None:
            checks.add(share_problems("proportions", proportions, self.domains))
        checks.finish()
        self.proportions = proportions

    def _shares(self, view: MixView) -> Shares:
        return self._first(view.domains)

    def _first(self, domains: tuple[str, ...]) -> Shares:
        if self.proportions is None:
            return super()._first(domains)
        return shares_of(self.proportions, domains)
