"""The plugin ``select``: a scorer and a selector decide which sessions stay in the update, or which prompts come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from dataflex_hooks.batch import PromptBatch, RolloutBatch
from dataflex_hooks.components import Selector
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import RewardDecision, RolloutDecision, UpdateDecision
from dataflex_hooks.errors import ConfigError, Problem, did_you_mean, one_of
from dataflex_hooks.markers import hookimpl
from dataflex_hooks.plugins.mechanism import (
    PairState,
    act,
    build_pair,
    candidate_scores,
    earliest_hook,
    pair_fields,
    scores_for,
)

_EFFECTS = ("mask", "drop")
_ADVANTAGES = ("kept", "group")
_TERMS = ("kl", "entropy")


class SelectPlugin(PairState):
    """Mask, or drop, the sessions that the selector does not keep.

    A session is kept, with all its rows, when the selector keeps one of its rows. A mask saves no compute, and without
    ``mask_scale: kept`` it shrinks the policy gradient by the kept share. A drop takes the rows out of the batch:
    before the log-prob passes where scorer and selector need nothing that these compute, else before the updates.

    With a scorer whose timing is ``pre_rollout`` it chooses among candidate prompts before they are generated for:
    those that the selector does not keep are not admitted. That takes a selector with ``on_candidates``.

    Args:
        scorer: a scorer's name, or ``{"name": ..., "params": {...}}``.
        actuator: a selector, likewise.
        effect: ``mask`` or ``drop``.
        advantages: with a drop before the log-prob passes, the rows of a group over which its advantages are computed:
            ``kept`` or ``group`` (all). None: ``kept`` for a selector that chooses within groups, else the host's
            default, ``group`` where that can be computed.
        include: with a mask, ``[kl, entropy]`` takes masked responses out of these terms too.
        domains, window: top-level settings, handed to the components.
        rollouts, response_length: facts of the run, from the host, for components that name them.

    Raises:
        ConfigError: everything wrong with the scorer, the actuator and the settings beside them.
    """

    host_keywords = frozenset({"rollouts", "response_length"})

    def __init__(
        self,
        scorer: object = None,
        actuator: object = None,
        effect: Literal["mask", "drop"] = "mask",
        advantages: Literal["kept", "group"] | None = None,
        include: Sequence[str] = (),
        domains: Sequence[str] | None = None,
        window: int | None = None,
        rollouts: int | None = None,
        response_length: int | None = None,
    ) -> None:
        problems = _setting_problems(effect, advantages, include)
        try:
            self.scorer, built = build_pair("selector", scorer, actuator, domains, window, rollouts, response_length)
        except ConfigError as error:
            problems = error.problems + problems
        if problems:
            raise ConfigError(problems)
        self.actuator = cast(Selector, built)
        self.needs_groups = self.scorer.needs_groups
        self.effect: str = effect
        self.include = tuple(include)
        if self.scorer.timing == "pre_rollout":
            self._choose_candidates(effect)
            return
        hook = "post_advantage" if effect == "mask" else earliest_hook(self.scorer, self.actuator)
        if hook == "post_advantage" and advantages == "kept":
            accepted = "group: its scores are known only after the advantages, which are then those of the whole group"
            raise ConfigError([Problem("advantages", advantages, accepted)])
        if advantages is None and self.actuator.within_group:
            advantages = "kept"
        self.advantages = advantages if hook == "post_reward" else None
        self.hooks = (hook,)
        self.provides = frozenset({"mask" if effect == "mask" else "keep"})
        self.requires = {hook: pair_fields(self.scorer, self.actuator)}

    def _choose_candidates(self, effect: str) -> None:
        problems = []
        unused = (("effect", effect, effect == "drop"), ("include", list(self.include), bool(self.include)))
        for setting, given, wrong in unused:
            if wrong:
                accepted = "nothing with a scorer of candidate prompts: one that is refused is never generated for"
                problems.append(Problem(setting, given, accepted))
        if not self.actuator.on_candidates:
            accepted = "a selector that decides from the scores of candidate prompts alone (threshold_band)"
            hint = f"{self.scorer.name} scores prompts before anything is generated, few or one at a time"
            problems.append(Problem("actuator.name", self.actuator.name, accepted, hint))
        if problems:
            raise ConfigError(problems)
        self.effect, self.advantages = "admit", None
        self.hooks = ("pre_rollout",)
        self.provides = frozenset({"admit"})
        self.requires = {"pre_rollout": tuple(sorted({*self.scorer.requires, *self.actuator.requires}))}

    @hookimpl
    def pre_rollout(self, candidates: PromptBatch, ctx: StepContext) -> RolloutDecision:
        """Return which candidates are admitted, (n,) bool."""
        scores = candidate_scores(self.scorer, candidates, ctx)
        rows = self._checked(act(self.actuator, scores, candidates, ctx), len(candidates), scores.device)
        admit = torch.zeros(len(candidates), dtype=torch.bool, device=scores.device)
        admit[rows] = True
        return RolloutDecision(admit=admit)

    @hookimpl
    def post_reward(self, batch: RolloutBatch, ctx: StepContext) -> RewardDecision:
        """Return the rows that stay, (bs,) bool."""
        keep, scores = self._keep(batch, ctx)
        return RewardDecision(keep=keep, reason=self._reason, advantages=self.advantages, scores=scores)

    @hookimpl
    def post_advantage(self, batch: RolloutBatch, ctx: StepContext) -> UpdateDecision:
        """Return the mask, or the rows that stay, (bs,) bool: True where the row's session is kept."""
        keep, scores = self._keep(batch, ctx)
        if self.effect == "drop":
            return UpdateDecision(keep=keep, reason=self._reason, scores=scores)
        return UpdateDecision(mask=keep, include=self.include, reason=self._reason, scores=scores)

    @property
    def _reason(self) -> str:
        return f"{self.scorer.name}/{self.actuator.name}"

    def _keep(self, batch: RolloutBatch, ctx: StepContext) -> tuple[Tensor, Tensor]:
        scores = scores_for(self.scorer, batch, ctx, self.actuator.accepts, self.actuator.layout)
        rows = self._checked(act(self.actuator, scores, batch, ctx), batch.bs, batch.offsets.device)
        kept = torch.zeros(batch.n_sessions, dtype=torch.bool, device=batch.offsets.device)
        kept[batch.session[rows]] = True
        return batch.expand_sessions(kept), self.actuator.preference(_per_row(scores, batch), batch)

    def _checked(self, given: object, n: int, device: torch.device) -> Tensor:
        """Return the kept rows as (k,) int64, all in [0, n)."""
        rows = torch.as_tensor(given, device=device)
        if rows.numel() == 0:
            return rows.to(torch.int64).flatten()
        if rows.dtype == torch.bool or rows.is_floating_point() or rows.dim() != 1:
            raise TypeError(
                f"selector {self.actuator.name!r} must return the kept row indices as (k,) int64, got "
                f"{tuple(rows.shape)} {rows.dtype}; for a bool mask return mask.nonzero().flatten()"
            )
        if int(rows.min()) < 0 or int(rows.max()) >= n:
            raise ValueError(f"selector {self.actuator.name!r} returned row indices outside [0, {n})")
        return rows.to(torch.int64)


def _per_row(scores: Tensor, batch: RolloutBatch) -> Tensor:
    values, per_token = batch.align(scores)
    return batch.mean_over_tokens(values) if per_token else values


def _setting_problems(effect: object, advantages: object, include: object) -> list[Problem]:
    problems = []
    if effect not in _EFFECTS:
        problems.append(Problem("effect", effect, one_of(_EFFECTS), did_you_mean(effect, _EFFECTS)))
    if advantages is not None and advantages not in _ADVANTAGES:
        problems.append(Problem("advantages", advantages, one_of(_ADVANTAGES), did_you_mean(advantages, _ADVANTAGES)))
    if advantages in _ADVANTAGES and effect == "mask":
        accepted = "nothing with effect: mask, which leaves every row in its group; or set effect: drop"
        problems.append(Problem("advantages", advantages, accepted))
    listed = isinstance(include, (list, tuple))
    if not listed or (include and set(include) != set(_TERMS)):  # type: ignore[call-overload]
        accepted = "[] or [kl, entropy]: both or none, since verl takes both from one mask"
        problems.append(Problem("include", include, accepted))
    elif include and effect == "drop":
        problems.append(Problem("include", include, "nothing with effect: drop, which takes rows out of every term"))
    return problems
