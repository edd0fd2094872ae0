"""Builders of what the other hooks are given: candidate prompts, the step's context, statistics by domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataflex_hooks.batch import DomainStats, PromptBatch
from dataflex_hooks.context import StepContext


def make_prompts(
    n: int = 8,
    *,
    rows: Sequence[int] | None = None,
    domains: str | Sequence[str] | None = ("math", "code"),
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> PromptBatch:
    """Build candidate prompts for ``pre_rollout``.

    Args:
        n: how many; ``rows`` decides where it is given.
        rows: rows of the dataset; None counts from 0.
        domains: names, repeated in turn over the prompts; one name for all; None for a run without domains.
        columns: dataset columns by name, each of length n.

    Raises:
        ValueError: a column of another length.
    """
    number = np.arange(n) if rows is None else np.array(rows, dtype=np.int64)
    for name, column in (columns or {}).items():
        if len(column) != len(number):
            raise ValueError(f"column {name!r} has {len(column)} entries for {len(number)} prompts")
    names = [domains] if isinstance(domains, str) else domains
    return PromptBatch(
        dataset_rows=number.astype(np.int64),
        domains=None if names is None else np.array(list(names), dtype=object)[np.arange(len(number)) % len(names)],
        columns={name: np.array(column) for name, column in (columns or {}).items()},
    )


def make_context(step: int = 1, *, metrics: Mapping[str, float] | None = None, **facts: Any) -> StepContext:
    """Build the context of a step.

    Args:
        step: global training step, from 1.
        metrics: the previous step's metrics, ``ctx.last_metrics``; None gives none.
        **facts: others of :class:`~dataflex_hooks.StepContext`: ``local_update``, ``mode``, ``estimator``, ``seed``.
    """
    return StepContext(step=step, last_metrics=metrics or {}, **facts)


def make_stats(
    domains: Sequence[str] = ("math", "code"),
    *,
    counts: Sequence[int] | None = None,
    proportions: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    unscored: Sequence[int] | None = None,
    **scores: Sequence[float],
) -> DomainStats:
    """Build the statistics of a step for ``on_domain_stats``: ``make_stats(("a", "b"), reward=[0.9, 0.1])``.

    Args:
        domains: K names.
        counts: sessions; None: 16 each.
        proportions: in force; None: even.
        groups: prompts; None: a quarter of ``counts``.
        unscored: sessions without an advantage; None: 0 each.
        **scores: means over sessions by name: ``reward``, ``abs_advantage``, ``solve_rate``, ``kept``, ``length``;
            those not given are 0.5, ``kept`` 1, ``length`` 8.

    Raises:
        ValueError: a list of another length than ``domains``.
    """
    k = len(domains)
    number = np.array([16] * k if counts is None else counts, dtype=np.int64)
    usual = {"reward": 0.5, "abs_advantage": 0.5, "solve_rate": 0.5, "kept": 1.0, "length": 8.0}
    means = {name: np.full(k, value) for name, value in usual.items()}
    means |= {name: np.array(values, dtype=np.float64) for name, values in scores.items()}
    stats = DomainStats(
        domains=tuple(domains),
        counts=number,
        scores=means,
        groups=np.array(number // 4 if groups is None else groups, dtype=np.int64),
        unscored=np.array([0] * k if unscored is None else unscored, dtype=np.int64),
        proportions=np.array([1 / k] * k if proportions is None else proportions, dtype=np.float64),
    )
    named = {"counts": number, "groups": stats.groups, "unscored": stats.unscored, "proportions": stats.proportions}
    for name, values in {**named, **means}.items():
        if len(values) != k:
            raise ValueError(f"{name} has {len(values)} entries for {k} domains")
    return stats
