"""The plugin ``reweight``: a scorer and a reweighter decide how much each response or token counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Normalize, Reweighter
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import UpdateDecision
from dataflex_hooks.errors import ConfigError, Problem, did_you_mean, one_of
from dataflex_hooks.markers import hookimpl
from dataflex_hooks.plugins.mechanism import PairState, act, build_pair, pair_fields, scores_for

_NORMALIZE = ("mean", "none")


class ReweightPlugin(PairState):
    """Weight the policy-gradient terms of responses or tokens.

    Args:
        scorer: a scorer's name, or ``{"name": ..., "params": {...}}``.
        actuator: a reweighter, likewise.
        normalize: ``"mean"`` scales the kept weights to average 1, ``"none"`` applies them as they are; None is the
            reweighter's own default.
        domains, window: top-level settings, handed to the components.
        rollouts, response_length: facts of the run, from the host, for components that name them.

    Raises:
        ConfigError: everything wrong with the scorer, the actuator and ``normalize``.
    """

    host_keywords = frozenset({"rollouts", "response_length"})
    provides = frozenset({"weights"})

    def __init__(
        self,
        scorer: object = None,
        actuator: object = None,
        normalize: Normalize | None = None,
        domains: Sequence[str] | None = None,
        window: int | None = None,
        rollouts: int | None = None,
        response_length: int | None = None,
    ) -> None:
        problems: list[Problem] = []
        if normalize not in (None, *_NORMALIZE):
            problems.append(Problem("normalize", normalize, one_of(_NORMALIZE), did_you_mean(normalize, _NORMALIZE)))
        try:
            self.scorer, built = build_pair("reweighter", scorer, actuator, domains, window, rollouts, response_length)
        except ConfigError as error:
            problems = error.problems + problems
        if problems:
            raise ConfigError(problems)
        self.actuator = cast(Reweighter, built)
        self.normalize = normalize or self.actuator.normalize
        self.needs_groups = self.scorer.needs_groups
        accepts = self.actuator.accepts
        self.per_token = accepts == "token" or (accepts == "any" and self.scorer.granularity == "token")
        self.requires = {"post_advantage": pair_fields(self.scorer, self.actuator)}

    @hookimpl
    def post_advantage(self, batch: RolloutBatch, ctx: StepContext) -> UpdateDecision:
        """Return the reweighter's weights, (bs,), (T,) or (bs, Lmax)."""
        scores = scores_for(self.scorer, batch, ctx, self.actuator.accepts, self.actuator.layout)
        weights = act(self.actuator, scores, batch, ctx)
        return UpdateDecision(weights=weights, normalize=self.normalize, scores=self._per_row(scores, batch, ctx))

    @staticmethod
    def _per_row(scores: Tensor, batch: RolloutBatch, ctx: StepContext) -> Tensor | None:
        values, per_token = batch.align(scores)
        if not per_token:
            return values
        return batch.mean_over_tokens(values) if ctx.explain else None
