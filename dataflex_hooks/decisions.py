"""What plugins return. Decisions say what should happen; the host checks, merges and applies them.

Tensors in an UpdateDecision or RewardDecision are per response (bs,), per token as jagged values (T,), or per token and
padded (bs, Lmax); ``keep``, ``scores``, ``scale`` and ``shift`` are per response only.

Every decision may bring ``metrics``: finite numbers by name, logged as ``dataflex/<label>/<name>``. Of several calls in
an update the last one counts; names that end in ``_total`` are added up instead. A decision of metrics alone decides
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor


@dataclass(frozen=True)
class UpdateDecision:
    """What enters the update, and how much it counts.

    Attributes:
        mask: bool or 0/1, True keeps. A masked response keeps its place in the loss denominators, in KL and in entropy;
            it saves no compute.
        keep: bool or 0/1, (bs,). A row with False is dropped: it leaves the batch before the critic and the actor are
            updated, and with it the loss denominators, KL and entropy.
        include: ``("kl", "entropy")`` takes the responses that ``mask`` masks out of the KL and entropy terms too. Both
            or none, since verl takes both from one mask; whole responses only.
        reason: why rows are masked or dropped; short and constant, it becomes part of a metric name.
        weights: finite, not negative; values at tool tokens are not looked at.
        normalize: ``"mean"``: only ratios count, the host scales kept weights to average 1; ``"none"``: as they are.
        update_scale: factor on the whole policy gradient, finite, not negative.
        skip_update: True asks for no optimizer step at all in this step.
        scores: (bs,), what the decision was made from, higher is better; ``dataflex.fallback=keep_best`` ranks by it.
        metrics: numbers to log by name.
    """

    mask: Tensor | None = None
    keep: Tensor | None = None
    include: Sequence[str] = ()
    reason: str = ""
    weights: Tensor | None = None
    normalize: Literal["mean", "none"] = "mean"
    update_scale: float | None = None
    skip_update: bool = False
    scores: Tensor | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class AddedRow:
    """A response that no rollout of this step made, to be trained on beside those that were.

    Attributes:
        prompt: text, or token ids as integers.
        response: likewise.
        advantage: written after verl's estimator: one number, or one for every response token. None, only with
            ``uid``: what verl's estimator gives the row as one of that group.
        domain: name of its domain, None for none.
        reward: raw outcome reward; part of no statistics unless ``uid`` is given.
        uid: of a group of this step (``batch.uid``): the row's reward then counts in that group's baseline, as if it
            were one of its rollouts; where the group has been dropped entirely, the row leaves with it. None keeps it
            out of every statistic.
        log_probs: of the policy that wrote it, one for every response token; verl's rollout correction reads them.
            None leaves that correction neutral for this row.
    """

    prompt: str | Sequence[int]
    response: str | Sequence[int]
    advantage: float | Sequence[float] | None
    domain: str | None = None
    reward: float = 0.0
    log_probs: Sequence[float] | None = None
    uid: str | None = None


@dataclass(frozen=True)
class RewardDecision:
    """What happens to the rows before any log-prob pass.

    Attributes:
        rewards: in place of the old ones. One per response goes to the last token of the response, as verl does.
        scale, shift: (bs,), finite: the reward of a response becomes ``reward * scale + shift``. With several plugins
            the scales multiply and the shifts add up, whatever their order: ``reward * (s1 * s2) + (t1 + t2)``, where
            ``reward`` is the owner's, or verl's without one. Rewards per token are each multiplied by the scale; the
            shift goes to the last token. 1 and 0 leave a row's rewards as they are, bit for bit. A plugin that gives
            one says so: ``provides = {"reward_scale", "reward_shift"}``. Rows to add keep the rewards they bring.
        keep: bool or 0/1, (bs,). A row with False is dropped: it leaves the batch before the log-prob passes.
        reason: why rows are dropped; short and constant, it becomes part of a metric name.
        advantages: what a group's advantages are computed over after the drop: ``"kept"``, the rows that stay, or
            ``"group"``, all of them. None is ``"group"`` where the estimator compares rollouts of a prompt and its
            advantages follow from rewards alone, else ``"kept"``.
        add: rows to add.
        scores: (bs,), as in UpdateDecision.
        metrics: numbers to log by name.
    """

    rewards: Tensor | None = None
    keep: Tensor | None = None
    reason: str = ""
    advantages: Literal["kept", "group"] | None = None
    add: Sequence[AddedRow] = ()
    scores: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class RolloutDecision:
    """Which candidate prompts to generate for.

    ``admit`` (n,) bool; ``priority`` (n,), higher first; ``rollouts`` (n,) int64, rollouts per prompt; ``metrics``
    numbers to log by name.
    """

    admit: Tensor | None = None
    priority: Tensor | None = None
    rollouts: Tensor | None = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class DomainDecision:
    """Target ``proportions`` (K,) of the domains, not negative, summing to 1; ``metrics``, numbers to log by name."""

    proportions: Tensor | None = None
    metrics: Mapping[str, float] | None = None


Decision = RolloutDecision | RewardDecision | UpdateDecision | DomainDecision

DECISION_OF: Mapping[str, type[Decision]] = MappingProxyType(
    {
        "pre_rollout": RolloutDecision,
        "post_reward": RewardDecision,
        "post_advantage": UpdateDecision,
        "on_domain_stats": DomainDecision,
    },
)
EXCLUSIVE = frozenset({"rewards", "priority", "rollouts", "proportions"})
"""What one plugin at most may provide in a run."""
ADJUSTING = frozenset({"reward_scale", "reward_shift"})
"""What makes a plugin an adjuster of rewards: it runs after their owner and before the others, so it has to say so."""
SHARED = frozenset({"admit", "mask", "keep", "weights", "update_scale", "skip_update", "add"}) | ADJUSTING
"""What any number of plugins may provide."""
_PART_OF_FIELD: Mapping[str, str] = MappingProxyType({"scale": "reward_scale", "shift": "reward_shift"})


def undeclared_parts(hooks: Iterable[str]) -> frozenset[str]:
    """What a plugin that implements ``hooks`` and declares no ``provides`` may give."""
    names = {_PART_OF_FIELD.get(part.name, part.name) for hook in hooks for part in fields(DECISION_OF[hook])}
    return frozenset(names) & (SHARED - ADJUSTING)


def given_parts(decision: Any) -> set[str]:
    """Names of the parts of a decision that were given: not None, and not the default of a switch."""
    words = {"reason", "normalize", "include", "advantages", "scores", "metrics"}
    parts = {part.name: getattr(decision, part.name) for part in fields(decision) if part.name not in words}
    empty = {name for name, value in parts.items() if isinstance(value, (tuple, list)) and not value}
    given = {name for name, value in parts.items() if value is not None and value is not False} - empty
    return {_PART_OF_FIELD.get(name, name) for name in given}
