"""The plugin: reads the KL of the step before, and damps or skips the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import dataflex_hooks as df
from dataflex_kl_guard.guard import Hysteresis, metrics_like, was_updated

ACTIONS = ("scale", "skip")
PATIENCE = 3
"""Updates without the metric after which the run stops: a guard that never sees anything guards nothing."""
_log = logging.getLogger(__name__)


class KLGuard:
    """Damps or skips updates while a metric of the step before is too high.

    Args:
        metric: name of one of verl's metrics.
        high, low: the guard goes on above ``high`` (or at NaN) and off below ``low``.
        action: what it does while it is on: ``"scale"`` multiplies the policy gradient by ``scale``, ``"skip"`` makes
            no optimizer step.
        scale: factor on the policy gradient, in [0, 1].
        longest_skip: after so many skipped steps in a row one update is made, since only an update is measured.

    Raises:
        ConfigError: with everything wrong with the settings.
    """

    provides = frozenset({"update_scale", "skip_update"})

    def __init__(
        self,
        metric: str = "actor/ppo_kl",
        high: float = 0.1,
        low: float = 0.05,
        action: str = "scale",
        scale: float = 0.1,
        longest_skip: int = 1,
    ) -> None:
        checks = df.ParameterChecks()
        if not isinstance(metric, str) or not metric:
            checks.refuse("metric", metric, "the name of one of verl's metrics, as actor/ppo_kl")
        high, low = checks.number("high", high), checks.number("low", low)
        if not checks.failed and low > high:
            checks.refuse("low", low, f"a number that is at most high={high:g}")
        self.metric, self.guard = metric, Hysteresis(high, low)
        self.action = checks.choice("action", action, ACTIONS)
        self.scale = checks.number("scale", scale, at_least=0.0, at_most=1.0)
        self.longest_skip = checks.integer("longest_skip", longest_skip, at_least=1)
        checks.finish()
        self._step: int | None = None
        self._skipped = 0
        self._absent = 0
        self._seen = False

    def state_dict(self) -> dict[str, Any]:
        """Return whether it is on, and what it has seen."""
        return {"on": self.guard.on, "skipped": self._skipped, "seen": self._seen, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self.guard.on, self._seen = bool(state["on"]), bool(state["seen"])
        self._skipped, self._step = int(state["skipped"]), state["step"]

    @df.hookimpl
    def post_advantage(self, ctx: df.StepContext) -> df.UpdateDecision:
        """Decide on the update by the metric of the step before."""
        if ctx.step != self._step:  # a step may have several updates; they share what is known
            self._step = ctx.step
            self._look(ctx.last_metrics)
            self._skipped = self._skipped + 1 if self._wants_to_skip() else 0
        metrics = {"engaged": float(self.guard.on)}
        value = ctx.last_metrics.get(self.metric)
        if value is not None and math.isfinite(value):
            metrics["kl"] = float(value)
        if not self.guard.on:
            return df.UpdateDecision(metrics=metrics)
        if self.action == "scale":
            return df.UpdateDecision(update_scale=self.scale, metrics=metrics)
        return df.UpdateDecision(skip_update=self._skipped > 0, metrics=metrics)

    def _wants_to_skip(self) -> bool:
        return self.guard.on and self.action == "skip" and self._skipped < self.longest_skip

    def _look(self, last: Mapping[str, Any]) -> None:
        if self.metric in last:
            self._seen, self._absent = True, 0
            self.guard.see(float(last[self.metric]))
        elif was_updated(last) and not last.get("dataflex/skip_update"):
            # Nothing measures an update that was not made: skipped, or before trainer.critic_warmup.
            self._absent += 1
            self._miss(last)

    def _miss(self, last: Mapping[str, Any]) -> None:
        there = ", ".join(metrics_like(self.metric, last)) or "none"
        text = f"metric {self.metric!r} is not among those of the last step; with kl in their name there are: {there}"
        if self._absent == 1:
            _log.warning("%s", text)
        elif self._absent >= PATIENCE and not self._seen:
            raise LookupError(f"{text}. It was in none of {PATIENCE} steps: set `metric` to one that is there")
