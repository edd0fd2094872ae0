"""What the built-in mixers share: their view of the window, and shares with floors and caps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Mixer
from dataflex_hooks.domain_window import DomainHistory
from dataflex_hooks.errors import Problem
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.proportions import Bound, Shares, bound_of, bound_problems, bounded


@dataclass(frozen=True)
class MixView:
    """What a mixer decides from.

    Attributes:
        domains: (K,) names.
        scores: (K,) float64, mean score over the window, 0 for a domain without sessions.
        counts: (K,) int64, sessions in the window; 1 each where the caller gave no counts.
        history: the window step by step; one step when the caller gave only scores.
        step: global training step, 0 where the caller gave none.
    """

    domains: tuple[str, ...]
    scores: Shares
    counts: NDArray[np.int64]
    history: DomainHistory
    step: int

    @property
    def seen(self) -> NDArray[np.bool_]:
        """(K,) bool: domains with sessions in the window."""
        return self.counts > 0

    def filled(self) -> Shares:
        """(K,) scores in which a domain without sessions has the mean of the others; 0 when none has any."""
        if not self.seen.any():
            return np.zeros(len(self.domains), dtype=np.float64)
        return np.where(self.seen, self.scores, self.scores[self.seen].mean())


class BoundedMixer(Mixer):
    """A mixer whose shares have floors and caps. Its constructor calls :meth:`_bounds`; it defines :meth:`_shares`."""

    least_window = 1

    def _bounds(
        self,
        checks: ParameterChecks,
        domains: Sequence[str] | None,
        window: int | None,
        floor: Bound,
        cap: Bound,
    ) -> None:
        self.domains = None if domains is None else tuple(domains)
        self.window = window
        self.floor, self.cap = floor, cap
        if window is not None and not (isinstance(window, int) and not isinstance(window, bool)):
            checks.refuse("window", window, f"an integer >= {self.least_window}")
        elif window is not None and window < self.least_window:
            checks.refuse("window", window, f"an integer >= {self.least_window}")
        before = checks.failed
        for name, bound in (("floor", floor), ("cap", cap)):
            if isinstance(bound, Mapping):
                for domain, value in bound.items():
                    checks.number(f"{name}.{domain}", value, at_least=0, at_most=1)
            else:
                checks.number(name, bound, at_least=0, at_most=1)
        if self.domains is not None and len(set(self.domains)) < len(self.domains):
            checks.refuse("domains", list(self.domains), "each name once")
        elif self.domains is not None and checks.failed == before:
            checks.add(self._domain_problems(self.domains))

    def _domain_problems(self, domains: tuple[str, ...]) -> list[Problem]:
        return bound_problems(self.floor, self.cap, domains) if domains else []

    def start(self, domains: Sequence[str]) -> Sequence[float]:
        """Return what :meth:`act` returns before anything was observed, in the order of ``domains``."""
        names = tuple(domains)
        return self._within(names, self._first(names))

    def act(
        self,
        scores: Mapping[str, float],
        batch: RolloutBatch | None,
        *,
        counts: Mapping[str, int] | None = None,
        **ctx: Any,
    ) -> Sequence[float]:
        """Return K proportions that sum to 1 and keep floors and caps, in the order of ``domains`` (or ``scores``)."""
        domains = self.domains or tuple(scores)
        return self._within(domains, self._shares(_view(domains, scores, counts, ctx)))

    @abstractmethod
    def _shares(self, view: MixView) -> Shares:
        """Return (K,) shares that sum to 1, before floors and caps."""

    def _first(self, domains: tuple[str, ...]) -> Shares:
        return np.full(len(domains), 1 / len(domains))

    def _within(self, domains: tuple[str, ...], shares: Shares) -> list[float]:
        floor, cap = bound_of(self.floor, domains, 0.0), bound_of(self.cap, domains, 1.0)
        return [float(share) for share in bounded(shares, floor, cap)]


def _view(
    domains: tuple[str, ...],
    scores: Mapping[str, float],
    counts: Mapping[str, int] | None,
    ctx: Mapping[str, Any],
) -> MixView:
    number = [1 if domain in scores else 0 for domain in domains]
    if counts is not None:
        number = [int(counts.get(domain, 0)) for domain in domains]
    n = np.array(number, dtype=np.int64)
    value = np.where(n > 0, np.array([scores.get(domain, 0.0) for domain in domains], dtype=np.float64), 0.0)
    step = int(ctx.get("step_id", 0))
    history = ctx.get("history")
    if history is None:
        history = DomainHistory(np.array([step], dtype=np.int64), value[None, :], n[None, :])
    return MixView(domains, value, n, history, step)
