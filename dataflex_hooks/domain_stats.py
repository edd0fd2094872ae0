"""Sums per domain over the rollouts of one step, and the statistics they give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import DomainStats, RolloutBatch
from dataflex_hooks.keep import sessions_of
from dataflex_hooks.segments import segment_max

DOMAIN_COLUMN = "dataflex_domain"
"""Column in which the host gives every row the name of its domain, whatever the dataset's own column is called."""

ROW_COLUMN = "dataflex_row"
"""Column in which the host gives every row the dataset row of its prompt."""

SOLVED_ABOVE = 0.5

Sums = NDArray[np.float64]
Codes = NDArray[np.int64]

_COUNTED = ("responses", "groups", "reward", "solved", "length", "scored", "abs_advantage", "kept")


def session_domains(batch: RolloutBatch, domains: Sequence[str]) -> Codes:
    """Return the index in ``domains`` of each session's domain: (n_sessions,) int64.

    Raises:
        ValueError: a row of another domain.
    """
    names, code = np.unique(batch.column(DOMAIN_COLUMN).astype(str), return_inverse=True)
    known = {domain: index for index, domain in enumerate(domains)}
    unknown = [str(name) for name in names if name not in known]
    if unknown:
        raise ValueError(f"rows of domain {', '.join(unknown)}; this run has {', '.join(domains)}")
    index = np.array([known[str(name)] for name in names], dtype=np.int64)
    of_session = np.zeros(batch.n_sessions, dtype=np.int64)
    of_session[batch.session.cpu().numpy()] = index[code.reshape(-1)]
    return of_session


def group_domains(batch: RolloutBatch, code: Codes) -> Codes:
    """Return the index of each group's domain, (n_groups,) int64, from those of its sessions, (n_sessions,)."""
    of_group = np.zeros(batch.n_groups, dtype=np.int64)
    of_group[batch.group_of_session.cpu().numpy()] = code
    return of_group


def by_domain(values: Tensor | NDArray[np.generic], code: Codes, k: int) -> Sums:
    """Add up (n_sessions,) values by domain: (K,) float64."""
    array = values.cpu().numpy() if isinstance(values, Tensor) else values
    return np.bincount(code, weights=array.astype(np.float64), minlength=k).astype(np.float64)


class DomainSums:
    """Sums of one step, over all its local updates and all that was evicted on the way.

    Args:
        domains: names, in the order of every array.
    """

    def __init__(self, domains: Sequence[str]) -> None:
        self.domains = tuple(domains)
        self._sums = {name: np.zeros(len(self.domains)) for name in _COUNTED}

    def add_rewarded(self, batch: RolloutBatch) -> None:
        """Count rows whose rewards are known, before any is dropped. Needs ``rm_scores`` and the domain column."""
        code, k = session_domains(batch, self.domains), len(self.domains)
        length = torch.zeros(batch.n_sessions, dtype=torch.int64, device=batch.offsets.device)
        length.index_add_(0, batch.session, batch.n_valid)
        rewards = batch.session_rewards
        self._add("responses", np.bincount(code, minlength=k))
        self._add("groups", np.bincount(group_domains(batch, code), minlength=k))
        self._add("reward", by_domain(rewards, code, k))
        self._add("solved", by_domain(rewards > SOLVED_ABOVE, code, k))
        self._add("length", by_domain(length, code, k))

    def add_advantages(self, batch: RolloutBatch, kept: Tensor | None = None) -> None:
        """Count rows that have an advantage, out of those that were counted before.

        Args:
            batch: needs ``advantages`` and the domain column.
            kept: (bs,) bool, rows that enter the update; None is all.
        """
        code, k = session_domains(batch, self.domains), len(self.domains)
        size = batch.per_session(batch.magnitude("advantages"))
        in_update = sessions_of(batch.n_valid >= 0 if kept is None else kept, batch)
        self._add("scored", np.bincount(code, minlength=k))
        self._add("abs_advantage", by_domain(size, code, k))
        self._add("kept", by_domain(in_update, code, k))

    def add_evicted(self, batch: RolloutBatch) -> None:
        """Count rows that a filter evicted before an advantage was computed; where rewards are equal it is 0."""
        self.add_rewarded(batch)
        code, k = session_domains(batch, self.domains), len(self.domains)
        flat = equal_rewards(batch)[batch.group.cpu().numpy()]
        of_session = np.zeros(batch.n_sessions, dtype=bool)
        of_session[batch.session.cpu().numpy()] = flat
        self._add("scored", by_domain(of_session, code, k))

    def _add(self, name: str, sums: NDArray[Any]) -> None:
        self._sums[name] = self._sums[name] + sums

    def stats(self, proportions: Sums) -> DomainStats:
        """Return the statistics of everything added; ``proportions`` (K,) were in force."""
        sums = self._sums
        counts, scored = sums["responses"].astype(np.int64), sums["scored"].astype(np.int64)
        many = np.maximum(counts, 1)
        scores = {
            "reward": sums["reward"] / many,
            "abs_advantage": sums["abs_advantage"] / np.maximum(scored, 1),
            "solve_rate": sums["solved"] / many,
            "kept": sums["kept"] / many,
            "length": sums["length"] / many,
        }
        groups = sums["groups"].astype(np.int64)
        return DomainStats(self.domains, counts, scores, groups, counts - scored, np.asarray(proportions, dtype=float))


def equal_rewards(batch: RolloutBatch) -> NDArray[np.bool_]:
    """Return which groups have the same reward in every session: (n_groups,) bool."""
    group, rewards = batch.group_of_session, batch.session_rewards
    highest = segment_max(rewards, group, batch.n_groups)
    lowest = -segment_max(-rewards, group, batch.n_groups)
    return np.asarray((highest == lowest).cpu().numpy(), dtype=bool)
