"""The plugin ``select``: a scorer and a selector decide which sessions stay in the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Selector
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import UpdateDecision
from dataflex_hooks.markers import hookimpl
from dataflex_hooks.plugins.mechanism import build_pair, pair_requires, scores_for


class SelectPlugin:
    """Mask the sessions that the selector does not keep.

    A session is kept, with all its rows, when the selector keeps one of its rows. A mask saves no rollout cost, and
    without ``mask_scale: kept`` it shrinks the policy gradient by the kept share.

    Args:
        scorer: a scorer's name, or ``{"name": ..., "params": {...}}``.
        actuator: a selector, likewise.
        domains, window: top-level settings, handed to the components.

    Raises:
        ConfigError: everything wrong with the scorer and the actuator.
    """

    provides = frozenset({"mask"})

    def __init__(
        self,
        scorer: object = None,
        actuator: object = None,
        domains: Sequence[str] | None = None,
        window: int | None = None,
    ) -> None:
        self.scorer, built = build_pair("selector", scorer, actuator, domains, window)
        self.actuator = cast(Selector, built)
        self.needs_groups = self.scorer.needs_groups
        self.requires = pair_requires(self.scorer, self.actuator)

    @hookimpl
    def post_advantage(self, batch: RolloutBatch, ctx: StepContext) -> UpdateDecision:
        """Return the mask (bs,) bool, True where the row's session is kept."""
        scores = scores_for(self.scorer, batch, ctx, self.actuator.accepts, self.actuator.layout)
        rows = self._kept_rows(self.actuator.act(scores, batch, step_id=ctx.step, **ctx.keywords()), batch)
        kept = torch.zeros(batch.n_sessions, dtype=torch.bool, device=batch.offsets.device)
        kept[batch.session[rows]] = True
        return UpdateDecision(mask=batch.expand_sessions(kept), reason=f"{self.scorer.name}/{self.actuator.name}")

    def _kept_rows(self, given: object, batch: RolloutBatch) -> Tensor:
        rows = torch.as_tensor(given, device=batch.offsets.device)
        if rows.numel() == 0:
            return rows.to(torch.int64).flatten()
        if rows.dtype == torch.bool or rows.is_floating_point() or rows.dim() != 1:
            raise TypeError(
                f"selector {self.actuator.name!r} must return the kept row indices as (k,) int64, got "
                f"{tuple(rows.shape)} {rows.dtype}; for a bool mask return mask.nonzero().flatten()"
            )
        if int(rows.min()) < 0 or int(rows.max()) >= batch.bs:
            raise ValueError(f"selector {self.actuator.name!r} returned row indices outside [0, {batch.bs})")
        return rows.to(torch.int64)
