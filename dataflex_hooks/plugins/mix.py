"""The plugin ``mix``: a scorer and a mixer decide from which domains the next prompts come."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from dataflex_hooks.batch import DomainStats, RolloutBatch
from dataflex_hooks.components import Mixer, Scorer
from dataflex_hooks.construct import build_component
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import DomainDecision
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, by_domain, session_domains
from dataflex_hooks.domain_window import DomainWindow
from dataflex_hooks.errors import ConfigError, Problem
from dataflex_hooks.markers import hookimpl
from dataflex_hooks.plugins.mechanism import build_pair, scores_for
from dataflex_hooks.scheduled import set_step

_log = logging.getLogger("dataflex_hooks")
WINDOW = 50


class MixPlugin:
    """Set the proportions of the domains from scores of past steps.

    Args:
        scorer: a scorer's name, or ``{"name": ..., "params": {...}}``; a mixer that looks at no scores needs none.
        actuator: a mixer, likewise.
        domains: names; None takes those of the dataset.
        window: how many steps scores are remembered for; the mixer's own ``window`` wins, 50 without either.

    Attributes:
        observes: the hook at which the host hands :meth:`observe` the rows of the step.

    Raises:
        ConfigError: everything wrong with the scorer and the actuator.
    """

    provides = frozenset({"proportions"})

    def __init__(
        self,
        scorer: object = None,
        actuator: object = None,
        domains: Sequence[str] | None = None,
        window: int | None = None,
    ) -> None:
        self._settings = (scorer, actuator, window)
        self.scorer: Scorer | None
        self.actuator: Mixer | None
        try:
            self.scorer, self.actuator = _build(scorer, actuator, domains, window)
        except ConfigError as error:
            # A mixer may need the names in its constructor; without a list they are known when the dataset is.
            if domains is not None or not any(problem.cause for problem in error.problems):
                raise
            self.scorer, self.actuator = cast(Scorer, build_component("scorer", scorer, {"window": window})), None
        listed = getattr(self.actuator, "domains", None)
        self.domains: tuple[str, ...] | None = tuple(domains or listed or ()) or None
        self.needs_groups = self.scorer is not None and self.scorer.needs_groups
        at_reward = self.scorer is None or self.scorer.timing == "post_reward"
        self.observes = "post_reward" if at_reward else "post_advantage"
        fields = {*(self.scorer.requires if self.scorer else ()), "response_mask", DOMAIN_COLUMN}
        self.requires = {self.observes: tuple(sorted(fields))} if self.scorer else {}
        self._window: DomainWindow | None = None
        self._order: tuple[str, ...] = ()
        self._batch: RolloutBatch | None = None
        self._warn_of_pairing()

    def _warn_of_pairing(self) -> None:
        if self.scorer is None or self.actuator is None or not self.actuator.needs_scorer:
            return
        usual = self.actuator.published_with
        if usual and self.scorer.name not in usual:
            _log.warning(
                "mixer %r is published with the scorer %s; it runs with %r, as configured",
                self.actuator.name,
                " or ".join(usual),
                self.scorer.name,
            )

    def start(self, domains: Sequence[str]) -> Sequence[float] | None:
        """Learn the names of the domains; called once, before the first prompt is fetched.

        Returns:
            (K,) proportions to begin with, or None for those of the dataset.

        Raises:
            ConfigError: the mixer cannot have these domains; settings below ``actuator``.
        """
        names = tuple(domains)
        if self.actuator is None or not getattr(self.actuator, "domains", None):
            self.scorer, self.actuator = _build(*self._settings[:2], names, self._settings[2])
        self._order = tuple(getattr(self.actuator, "domains", None) or names)
        if sorted(self._order) != sorted(names):
            given, hint = list(self._order), "leave it out: the mixer is told the domains of the run"
            raise ConfigError([Problem("actuator.params.domains", given, f"the domains {', '.join(names)}", hint)])
        self._window = DomainWindow(names, self.actuator.window or self._settings[2] or WINDOW)
        first = self.actuator.start(self._order)
        return None if first is None else self._aligned(first, names)

    def observe(self, batch: RolloutBatch, ctx: StepContext) -> None:
        """Score rows of the step, warm-up included, and add them to the window."""
        if self.scorer is None or self._window is None:
            return
        code, k = session_domains(batch, self._window.domains), len(self._window.domains)
        scores = batch.per_session(scores_for(self.scorer, batch, ctx, "response", "jagged"))
        self._window.add(ctx.step, by_domain(scores, code, k), np.bincount(code, minlength=k))
        self._batch = batch

    @hookimpl
    def on_domain_stats(self, stats: DomainStats, ctx: StepContext) -> DomainDecision:
        """Return the mixer's proportions, (K,)."""
        if self._window is None or self.actuator is None:
            self.start(stats.domains)
        assert self._window is not None and self.actuator is not None
        history = self._window.history()
        names = self._window.domains
        set_step(self.actuator, ctx.step)
        given = self.actuator.act(
            dict(zip(names, history.mean().tolist(), strict=True)),
            self._batch,
            counts=dict(zip(names, history.total().tolist(), strict=True)),
            step_id=ctx.step,
            history=history,
            proportions=stats.proportions,
            **ctx.keywords(),
        )
        self._batch = None
        return DomainDecision(proportions=torch.tensor(self._aligned(given, names), dtype=torch.float64))

    def scorer_means(self, step: int) -> Mapping[str, float]:
        """Return the scorer's mean of the step by domain, for metrics; only domains with sessions."""
        if self._window is None or self.scorer is None:
            return {}
        now = self._window.history().since(step - 1)
        return {
            name: float(score)
            for name, score, count in zip(self._window.domains, now.mean(), now.total(), strict=True)
            if count
        }

    def _aligned(self, given: Any, names: tuple[str, ...]) -> list[float]:
        values = [float(value) for value in given]
        if len(values) != len(self._order):
            kind = "none" if self.actuator is None else self.actuator.name
            raise ValueError(f"mixer {kind!r} returned {len(values)} proportions for {len(self._order)} domains")
        by_name = dict(zip(self._order, values, strict=True))
        return [by_name[name] for name in names]

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the mixer's own state."""
        own = getattr(self.actuator, "state_dict", None)
        return {
            "window": None if self._window is None else self._window.state_dict(),
            "mixer": None if own is None else own(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; the names of the domains have to be known, so :meth:`start` comes first.

        Raises:
            ValueError: the state is of other domains.
        """
        if state["window"] is not None:
            if self._window is None:
                self.start(state["window"]["domains"])
            assert self._window is not None
            self._window.load_state_dict(state["window"])
        load = getattr(self.actuator, "load_state_dict", None)
        if state["mixer"] is not None and load is not None:
            load(state["mixer"])


def _build(
    scorer: object, actuator: object, domains: Sequence[str] | None, window: int | None
) -> tuple[Scorer | None, Mixer]:
    """Build both; a missing scorer is fine for a mixer that needs none."""
    if scorer is not None:
        built, mixer = build_pair("mixer", scorer, actuator, domains, window)
        return built, cast(Mixer, mixer)
    try:
        mixer = build_component("mixer", actuator, {"domains": domains, "window": window, "scorer": None})
    except ConfigError as error:
        raise ConfigError(error.under("actuator")) from error.__cause__
    if cast(Mixer, mixer).needs_scorer:
        try:
            build_component("scorer", None, {})
        except ConfigError as error:
            raise ConfigError(error.under("scorer")) from None
    return None, cast(Mixer, mixer)
