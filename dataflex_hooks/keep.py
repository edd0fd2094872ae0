"""How many rows stay: drops of several plugins become one, and too few left become the named fallback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.errors import FieldError

Fallback = Literal["skip_update", "keep_all", "keep_best"]
FALLBACKS: tuple[Fallback, ...] = ("skip_update", "keep_all", "keep_best")


@dataclass(frozen=True)
class KeepRules:
    """The least that has to stay, and what happens when less would.

    Attributes:
        min_keep: rollouts (sessions): a number of them from 1, or a share in (0, 1) of those generated. None: 1 where
            rows are dropped, nothing where they are masked.
        fallback: ``skip_update``: every row stays as it is and no optimizer step is made; ``keep_all``: as if nobody
            had dropped or masked a whole response; ``keep_best``: the best others stay as well, as many as are missing.
    """

    min_keep: int | float | None = None
    fallback: Fallback = "skip_update"

    def least(self, generated: int, dropping: bool) -> int:
        """Rollouts that have to stay of ``generated``."""
        if self.min_keep is None:
            return 1 if dropping else 0
        if isinstance(self.min_keep, int):
            return min(self.min_keep, generated)
        return math.ceil(self.min_keep * generated - 1e-9)


@dataclass(frozen=True)
class RowKeep:
    """One plugin's say on whole rows: ``keep`` (bs,) bool, and the ``scores`` (bs,) behind it, None without."""

    label: str
    keep: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True)
class Shortfall:
    """What the fallback does: ``lifted`` (bs,) bool rows that stay whatever was decided, or no update at all."""

    lifted: Tensor
    skip_update: bool


def shortfall(said: Sequence[RowKeep], kept: Tensor, least: int, rules: KeepRules, batch: RolloutBatch) -> Shortfall:
    """Apply the fallback if fewer than ``least`` sessions have a row in ``kept`` (bs,) bool.

    ``keep_best`` ranks the sessions that were not kept by the number of plugins against them, then by the mean of their
    ranks under each plugin's scores, then by content (``tie_rank``).
    """
    none = torch.zeros(batch.bs, dtype=torch.bool, device=batch.offsets.device)
    session_kept = sessions_of(kept, batch)
    missing = least - int(session_kept.sum())
    if missing <= 0:
        return Shortfall(none, False)
    if rules.fallback == "skip_update":
        return Shortfall(~none, True)
    if rules.fallback == "keep_all":
        return Shortfall(~none, False)
    order = _best_first(said, session_kept, batch)[:missing]
    lifted = torch.zeros(batch.n_sessions, dtype=torch.bool, device=batch.offsets.device)
    lifted[torch.from_numpy(order).to(lifted.device)] = True
    return Shortfall(batch.expand_sessions(lifted), False)


def sessions_of(rows: Tensor, batch: RolloutBatch) -> Tensor:
    """(n_sessions,) bool: sessions that have one of the marked (bs,) rows."""
    return torch.bincount(batch.session[rows], minlength=batch.n_sessions) > 0


def groups_of(rows: Tensor, batch: RolloutBatch) -> Tensor:
    """(n_groups,) bool: groups that have one of the marked (bs,) rows."""
    return torch.bincount(batch.group[rows], minlength=batch.n_groups) > 0


def lone_rows(batch: RolloutBatch, keep: Tensor) -> Tensor:
    """(bs,) bool: rows in ``keep`` (bs,) bool whose group had several sessions and is left with one."""
    left = batch.sessions_per_group(sessions_of(keep, batch))
    return keep & batch.expand_groups((left == 1) & (batch.sessions_per_group() > 1))


def _best_first(said: Sequence[RowKeep], session_kept: Tensor, batch: RolloutBatch) -> np.ndarray:
    """Sessions that were not kept, best first."""
    final = batch.is_final
    session = batch.session[final]
    against = torch.zeros(batch.n_sessions, dtype=torch.int64, device=batch.offsets.device)
    rank = torch.zeros(batch.n_sessions, dtype=torch.float64, device=batch.offsets.device)
    for one in said:
        against[session] += (~one.keep[final]).to(torch.int64)
        if one.scores is not None:
            # Dense ranks, so that equal scores stay equal and plugins of different units can be averaged.
            _, dense = torch.unique(one.scores[final], return_inverse=True)
            rank[session] += dense.to(torch.float64) / max(1, int(dense.max()))
    tie = torch.zeros(batch.n_sessions, dtype=torch.int64, device=batch.offsets.device)
    try:
        tie[session] = batch.tie_rank[final]
    except FieldError:
        tie[session] = batch.session[final]
    keys = (tie.cpu().numpy(), -rank.cpu().numpy(), against.cpu().numpy(), session_kept.cpu().numpy())
    order = np.lexsort(keys)
    return order[: int((~session_kept).sum())]
