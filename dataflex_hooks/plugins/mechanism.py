"""What the built-in mechanisms share: one scorer, one actuator, and the scores in the form the actuator wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dataflex_hooks.batch import PromptBatch, RolloutBatch
from dataflex_hooks.components import Accepts, Component, Layout, Reweighter, Scorer, Selector
from dataflex_hooks.construct import build_component
from dataflex_hooks.context import StepContext
from dataflex_hooks.errors import ConfigError, Problem
from dataflex_hooks.scheduled import set_step

LATE_FIELDS = frozenset(
    {"advantages", "returns", "old_log_probs", "ref_log_prob", "entropy", "values", "token_level_rewards"}
)
"""Fields that are written after ``post_reward``."""


def build_pair(
    kind: str,
    scorer: object,
    actuator: object,
    domains: Sequence[str] | None,
    window: int | None,
    rollouts: int | None = None,
    response_length: int | None = None,
) -> tuple[Scorer, Component]:
    """Build a scorer and the actuator of the given kind that it feeds.

    Args:
        kind: ``selector``, ``reweighter`` or ``mixer``.
        scorer, actuator: names, or ``{"name": ..., "params": {...}}``.
        domains, window: top-level settings.
        rollouts, response_length: facts of the run, for components that name them in ``host_keywords``.

    Raises:
        ConfigError: everything wrong with either, with settings below ``scorer`` and ``actuator``.
    """
    problems: list[Problem] = []
    host: dict[str, object] = {
        "domains": domains,
        "window": window,
        "rollouts": rollouts,
        "response_length": response_length,
    }
    built_scorer: Scorer | None = None
    try:
        built_scorer = cast(Scorer, build_component("scorer", scorer, host))
    except ConfigError as error:
        problems += error.under("scorer")
    else:
        problems += _timing_problems(built_scorer)
    try:
        built_actuator = build_component(kind, actuator, {**host, "scorer": built_scorer})
    except ConfigError as error:
        problems += error.under("actuator")
    else:
        if built_actuator.needs_groups and rollouts == 1:
            hint = "it compares rollouts of one prompt, and a prompt has one: set actor_rollout_ref.rollout.n > 1"
            problems.append(Problem("actuator.name", built_actuator.name, f"a {kind} that needs no groups", hint))
    if problems or built_scorer is None:
        raise ConfigError(problems)
    return built_scorer, built_actuator


class PairState:
    """State of a mechanism plugin: that of its scorer and of its actuator, where they have a ``state_dict``."""

    def _components(self) -> dict[str, Any]:
        pair = {role: getattr(self, role) for role in ("scorer", "actuator")}
        return {role: component for role, component in pair.items() if hasattr(component, "state_dict")}

    @property
    def stateful(self) -> bool:
        """Whether there is anything to save."""
        return bool(self._components())

    def state_dict(self) -> dict[str, Any]:
        """Return the components' states under ``scorer`` and ``actuator``."""
        return {role: component.state_dict() for role, component in self._components().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the components their states; raises ValueError when ``state`` is of other components."""
        components = self._components()
        if state.keys() != components.keys():
            saved, here = (", ".join(sorted(names)) or "nothing" for names in (state, components))
            raise ValueError(f"the saved state is that of {saved}, and here {here} has state")
        for role, component in components.items():
            component.load_state_dict(state[role])


def _timing_problems(scorer: Scorer) -> list[Problem]:
    if scorer.timing != "in_loss":
        return []
    reason = "it needs the forward pass of the update itself, which starts after the last hook"
    return [Problem("scorer.name", scorer.name, "a scorer that can run before the loss", reason)]


def pair_fields(scorer: Scorer, actuator: Component) -> tuple[str, ...]:
    """Return the fields that both read."""
    return tuple(sorted({*scorer.requires, *actuator.requires, "response_mask"}))


def earliest_hook(scorer: Scorer, actuator: Component) -> str:
    """The first hook at which scorer and actuator have everything they read."""
    late = LATE_FIELDS.intersection(pair_fields(scorer, actuator))
    return "post_advantage" if late or scorer.timing == "post_advantage" else "post_reward"


def scores_for(scorer: Scorer, batch: RolloutBatch, ctx: StepContext, accepts: Accepts, layout: Layout) -> Tensor:
    """Run the scorer and bring its scores to the granularity and layout that an actuator takes.

    Token scores become response scores as means over valid tokens, response scores session scores as means over the
    rows of a session; coarser scores are broadcast.

    Returns:
        float32: (bs,); or per token, (T,) for ``jagged`` and (bs, Lmax) for ``padded``.

    Raises:
        TypeError, ValueError: the scorer returned no tensor, a wrong shape, or values that are not finite.
    """
    set_step(scorer, ctx.step)
    given = scorer.score(batch, ctx.step, **ctx.keywords())
    if not isinstance(given, Tensor):
        raise TypeError(f"scorer {scorer.name!r} must return a torch.Tensor, got {type(given).__name__}")
    try:
        scores, per_token = batch.align(given.detach().to(torch.float32))
    except ValueError as error:
        raise ValueError(f"scorer {scorer.name!r} returned scores of a wrong shape: {error}") from error
    if not _is_finite(scores, batch.response_mask if per_token else None):
        raise ValueError(f"scorer {scorer.name!r} returned NaN or infinite scores")
    if per_token and accepts == "response":
        scores, per_token = batch.mean_over_tokens(scores), False
    if not per_token and scorer.granularity in ("token", "response"):
        scores = batch.expand_sessions(batch.per_session(scores))
    if not per_token and accepts == "token":
        scores, per_token = batch.expand_rows(scores), True
    return batch.to_padded(scores) if per_token and layout == "padded" else scores


def candidate_scores(scorer: Scorer, candidates: PromptBatch, ctx: StepContext) -> Tensor:
    """Run a ``pre_rollout`` scorer on candidate prompts.

    Returns:
        (n,) float32.

    Raises:
        TypeError, ValueError: the scorer returned no tensor, a wrong shape, or values that are not finite.
    """
    set_step(scorer, ctx.step)
    given = scorer.score(cast(Any, candidates), ctx.step, **ctx.keywords())
    if not isinstance(given, Tensor):
        raise TypeError(f"scorer {scorer.name!r} must return a torch.Tensor, got {type(given).__name__}")
    if given.shape != (len(candidates),):
        text = f"must return ({len(candidates)},), a score for each candidate, got shape {tuple(given.shape)}"
        raise ValueError(f"scorer {scorer.name!r} {text}")
    scores = given.detach().to(torch.float32)
    if not _is_finite(scores, None):
        raise ValueError(f"scorer {scorer.name!r} returned NaN or infinite scores")
    return scores


def act(actuator: Selector | Reweighter, scores: Tensor, batch: RolloutBatch | PromptBatch, ctx: StepContext) -> Tensor:
    """Run the actuator with its parameters as they are at this step."""
    set_step(actuator, ctx.step)
    return actuator.act(scores, cast(RolloutBatch, batch), step_id=ctx.step, **ctx.keywords())


def _is_finite(scores: Tensor, valid: Tensor | None) -> bool:
    # One cheap pass settles the usual case: a sum is finite only if all its terms are.
    if bool(torch.isfinite(scores.sum())):
        return True
    # At tool tokens a log-prob or an advantage may be anything, and finite numbers can add up to infinity.
    return bool(torch.isfinite(scores if valid is None else scores[valid]).all())
