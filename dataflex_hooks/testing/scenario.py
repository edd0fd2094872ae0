"""The steps that a plugin is taken through when its contract is checked, and the same steps looked at differently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflex_hooks.batch import PromptBatch, RolloutBatch
from dataflex_hooks.context import StepContext
from dataflex_hooks.testing.inputs import make_prompts
from dataflex_hooks.testing.random_batches import random_batch
from dataflex_hooks.testing.rebuild import copied, rename_groups, take_rows, widen_padding, with_values

_READ_BY_CONTENT = frozenset({"rm_scores", "responses", "response_mask"})
_DIVERGENCE = (0.01, 0.2, 0.9, 0.02, 0.01)

Pools = Mapping[str, Sequence[Any]]
MADE_UP = 5
"""How many batches :func:`make_steps` makes up."""


@dataclass(frozen=True)
class Step:
    """One step's input, and how to find the rows of the step that it was made from.

    Attributes:
        name: what is particular about its batch, for messages.
        batch, prompts, ctx: what the hooks are given.
        rows: (bs,) int64: where row i of the original batch stands in this one; None: at i.
        prompt_rows: (n,) int64, likewise.
        uids: original uid by the one here; empty where they are the same.
    """

    name: str
    batch: RolloutBatch
    prompts: PromptBatch
    ctx: StepContext
    rows: Tensor | None = None
    prompt_rows: Tensor | None = None
    uids: Mapping[str, str] = field(default_factory=dict)

    def copy(self) -> Step:
        """The same in memory of its own, so that nothing which happens to one step is seen in another."""
        columns = {name: column.copy() for name, column in self.prompts.columns.items()}
        domains = None if self.prompts.domains is None else self.prompts.domains.copy()
        prompts = PromptBatch(self.prompts.dataset_rows.copy(), domains, columns)
        return replace(self, batch=copied(self.batch), prompts=prompts)


Variant = Callable[[Step], Step]


def make_steps(
    batches: Sequence[RolloutBatch] | None,
    prompts: PromptBatch | None,
    contexts: Sequence[StepContext] | None,
    domains: Sequence[str],
    columns: Pools,
    row_columns: Pools,
) -> list[Step]:
    """Return the steps, each batch twice; what is None is made up, and differs from step to step."""
    named = _batches(domains, columns, row_columns) if batches is None else _numbered(batches)
    steps = []
    for place, (name, batch) in enumerate([*named, *named]):
        ctx = StepContext(step=place + 1, last_metrics=_metrics(place)) if contexts is None else contexts[place]
        steps.append(Step(name, batch, _prompts(place, domains, columns) if prompts is None else prompts, ctx))
    return steps


def shuffled(step: Step) -> Step:
    """The same rows and candidates in another order."""
    random = np.random.default_rng(step.ctx.step)
    order = torch.from_numpy(random.permutation(step.batch.bs))
    prompt_order = random.permutation(len(step.prompts))
    prompts = PromptBatch(
        step.prompts.dataset_rows[prompt_order],
        None if step.prompts.domains is None else step.prompts.domains[prompt_order],
        {name: column[prompt_order] for name, column in step.prompts.columns.items()},
    )
    return replace(
        step,
        batch=take_rows(step.batch, order),
        prompts=prompts,
        rows=torch.argsort(order),
        prompt_rows=torch.from_numpy(np.argsort(prompt_order)),
    )


def renamed(step: Step) -> Step:
    """The same groups under other uids, which sort the other way round."""
    uids = sorted(set(step.batch.uid))
    names = {uid: f"renamed-{len(uids) - place:04d}" for place, uid in enumerate(uids)}
    return replace(step, batch=rename_groups(step.batch, names), uids={new: old for old, new in names.items()})


def padded_otherwise(step: Step) -> Step:
    """More padding on the right of padded tensors, and other numbers at tokens that the response mask leaves out.

    Rewards and token ids stay: a reward is the sum over all tokens, and a response is told from another by all of it.
    """
    batch, random = step.batch, torch.Generator().manual_seed(step.ctx.step)
    outside = ~batch.response_mask
    fields = {
        name: torch.where(outside, 50.0 * torch.rand(batch.n_tokens, generator=random) - 40.0, batch.values(name))
        for name in batch.batch
        if name not in _READ_BY_CONTENT and batch.values(name).is_floating_point()
    }
    return replace(step, batch=widen_padding(with_values(batch, fields)))


def _batches(domains: Sequence[str], columns: Pools, row_columns: Pools) -> list[tuple[str, RolloutBatch]]:
    common: dict[str, Any] = {"domains": domains, "columns": columns, "row_columns": row_columns}
    k = len(domains)
    return [
        ("groups of 4", random_batch(0, groups=max(4, k), **common)),
        (
            "several outputs a rollout, tokens of tools",
            random_batch(
                1, groups=max(4, k), sessions=3, outputs=3, lengths=(3, 12), tool_share=0.3, rewards="graded", **common
            ),
        ),
        ("equal rewards", random_batch(2, groups=max(3, k), lengths=(2, 5), rewards=[1.0], **common)),
        ("one group of two", random_batch(3, groups=1, sessions=2, rewards="graded", lengths=(2, 9), **common)),
        ("many ties", random_batch(4, groups=max(8, k), lengths=(2, 4), rewards=[0.0, 0.5, 1.0], **common)),
    ]


def _numbered(batches: Sequence[RolloutBatch]) -> list[tuple[str, RolloutBatch]]:
    return [(f"batches[{place}]", batch) for place, batch in enumerate(batches)]


def _prompts(place: int, domains: Sequence[str], columns: Pools) -> PromptBatch:
    random, n = np.random.default_rng(100 + place), 8
    rows = random.choice(1000, size=n, replace=False)
    drawn = {name: [values[i] for i in random.integers(0, len(values), n)] for name, values in columns.items()}
    sources = [domains[i % len(domains)] for i in range(n)]
    return make_prompts(
        rows=rows.tolist(), domains=domains, columns={"data_source": sources, "domain": sources, **drawn}
    )


def _metrics(place: int) -> dict[str, float]:
    """What verl logs and plugins look at; the first step has no step before it."""
    if place == 0:
        return {}
    kl = _DIVERGENCE[place % len(_DIVERGENCE)]
    reward = 0.3 + 0.02 * place
    return {
        "actor/ppo_kl": kl,
        "actor/kl_loss": kl,
        "actor/entropy": 1.0 - 0.05 * place,
        "actor/grad_norm": 0.5 + 0.1 * place,
        "actor/pg_loss": 0.1 / (place + 1),
        "actor/lr": 1e-6,
        "critic/score/mean": reward,
        "critic/rewards/mean": reward,
        "critic/advantages/mean": 0.0,
        "response_length/mean": 6.0,
        "training/global_step": float(place),
    }
