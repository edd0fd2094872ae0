"""Base classes of scorers and actuators: what a component declares, and what it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import Tensor

from dataflex_hooks.as_built import AsBuilt
from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.errors import did_you_mean, one_of
from dataflex_hooks.schedules import Schedule

Layout = Literal["padded", "jagged"]
Timing = Literal["pre_rollout", "post_reward", "post_advantage", "in_loss"]
Granularity = Literal["domain", "prompt", "response", "token"]
Accepts = Literal["response", "token", "any"]
Normalize = Literal["mean", "none"]


class Component:
    """What scorers and actuators have in common.

    A constructor takes the component's parameters as keywords, plus ``**kwargs`` for what the host adds: ``domains``
    and ``window`` (top-level settings, or None), and for an actuator ``scorer`` (the scorer it is paired with).
    Parameter names are those in the signature; a name that ``**kwargs`` would swallow is refused. A wrong value raises
    :class:`~dataflex_hooks.errors.ParameterError`, best through :class:`~dataflex_hooks.parameters.ParameterChecks`.

    Attributes:
        name: the name it was asked for by, set by the host.
        requires: batch fields it reads, a tuple or list.
        layout: how per-token scores are handed over: ``"padded"`` (bs, Lmax), 0 on the right, or ``"jagged"`` (T,).
        open_params: True admits parameters that are not in the signature.
        needs_groups: True if it compares sessions of one prompt, so that ``rollout.n`` has to exceed 1.
        host_keywords: facts of the run that its constructor takes as keywords, each None where the host does not know
            it: ``rollouts`` (``actor_rollout_ref.rollout.n``) and ``response_length``
            (``actor_rollout_ref.rollout.response_length``, in tokens). They are no parameters. A plugin may ask in the
            same way for these and for ``prompt_length``, ``tokenizer_path`` and ``rollout_log_probs``.
        schedules: of parameters that change with the step, set by the host; each changes the attribute of its name.
        as_built: its parameters and where it comes from, set by the host for the plan.
    """

    name: str = ""
    requires: Sequence[str] = ()
    layout: Layout = "padded"
    open_params: bool = False
    needs_groups: bool = False
    host_keywords: frozenset[str] = frozenset()
    schedules: Mapping[str, Schedule] = MappingProxyType({})
    as_built: AsBuilt | None = None

    def __init__(self, **kwargs: object) -> None:
        """Take what the host adds; a component without parameters needs no constructor of its own."""


class Scorer(Component, ABC):
    """Gives every response (or token, prompt, domain) a number.

    Attributes:
        timing: the earliest hook that can run it; ``"in_loss"`` is refused at start, no hook serves it. Under
            ``select`` one with ``"pre_rollout"`` scores candidate prompts: its ``requires`` are dataset columns,
            ``score`` gets a :class:`~dataflex_hooks.batch.PromptBatch` and returns (n,), on which the selector decides
            who is admitted.
        granularity: what one score belongs to; prompt and domain scores are given per row, equal within prompt or
            domain.

    Raises (from the class statement):
        ValueError: a ``timing`` or ``granularity`` that does not exist.
    """

    timing: Timing = "post_advantage"
    granularity: Granularity = "response"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for attribute, words in (("timing", get_args(Timing)), ("granularity", get_args(Granularity))):
            given = getattr(cls, attribute)
            if given not in words:
                hint = did_you_mean(given, words)
                text = f"{cls.__qualname__}.{attribute} = {given!r}; accepted: {one_of(words)}"
                raise ValueError(f"{text}; {hint}" if hint else text)

    @abstractmethod
    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return scores, finite floats: (bs,), or per token as padded (bs, Lmax) or jagged (T,) values."""


class Selector(Component, ABC):
    """Decides which responses stay in the update.

    Attributes:
        accepts: granularity of the scores it wants; finer ones are averaged, coarser ones broadcast.
        within_group: True if it chooses among the rollouts of one prompt. Where rows are dropped, advantages are then
            computed over those that stay, as the papers of such methods define.
        on_candidates: True if it also decides which candidate prompts are admitted, from their scores and nothing else
            of a batch: it is then given a :class:`~dataflex_hooks.batch.PromptBatch`, of a single prompt where the host
            draws one at a time.
    """

    accepts: Accepts = "response"
    within_group: bool = False
    on_candidates: bool = False

    @abstractmethod
    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return the kept row indices, (k,) int64 in [0, bs), in any order.

        ``scores`` is (bs,) float32; rows of one session have the same score. A session is kept, with all its rows, when
        one of its rows is.
        """

    def preference(self, scores: Tensor, batch: RolloutBatch) -> Tensor:
        """Return (bs,) how gladly each row would be kept, higher is better, for ``dataflex.fallback=keep_best``.

        Override it where a higher score is not a better one; ``scores`` is (bs,).
        """
        return scores


class Reweighter(Component, ABC):
    """Decides how much each response or token counts.

    Attributes:
        accepts: granularity of the scores it wants; ``"any"`` takes them as the scorer gives them.
        normalize: ``"mean"`` if only ratios of its weights matter, ``"none"`` if they act as they are.
    """

    accepts: Accepts = "any"
    normalize: Normalize = "mean"

    @abstractmethod
    def act(self, scores: Tensor, batch: RolloutBatch, **ctx: Any) -> Tensor:
        """Return weights, finite and not negative: (bs,), padded (bs, Lmax) or jagged (T,).

        ``scores`` is (bs,) float32, or per token in the component's ``layout``. The host normalises.
        """


class Mixer(Component, ABC):
    """Decides from which domains the next prompts come.

    A mixer with state between decisions has ``state_dict`` and ``load_state_dict``, with plain values and arrays.

    Attributes:
        window: how many steps ``scores`` looks back on; None takes the host's.
        needs_scorer: False if it works without scores, so that no scorer need be configured.
        published_with: scorers that its source pairs it with; another one runs with a warning. Empty: any.
    """

    window: int | None = None
    needs_scorer: bool = True
    published_with: Sequence[str] = ()

    def start(self, domains: Sequence[str]) -> Sequence[float] | None:
        """Return the proportions before the first decision, in the order of ``domains``; None: as in the dataset."""
        return None

    @abstractmethod
    def act(
        self,
        scores: Mapping[str, float],
        batch: RolloutBatch | None,
        *,
        counts: Mapping[str, int] | None = None,
        **ctx: Any,
    ) -> Sequence[float]:
        """Return proportions that sum to 1, in the order of ``domains``.

        ``scores`` gives each domain's score over the window, ``counts`` the number of sessions behind it; a domain
        without any has score 0 and count 0. A run also passes, in ``ctx``, ``step_id``, ``history`` (a
        :class:`~dataflex_hooks.domain_window.DomainHistory`: the window step by step) and ``proportions``, (K,) those
        in force. The host normalises what is returned.
        """
