"""Decisions reach the gradient of the real trainer."""

from __future__ import annotations

import torch

from dataflex_hooks import UpdateDecision, hookimpl


class Mask:
    """Masks every response, or none."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep

    @hookimpl
    def post_advantage(self, batch, ctx):
        return UpdateDecision(mask=torch.full((batch.bs,), self.keep))


def test_everything_masked_gives_a_gradient_of_exactly_zero(live, stored):
    rewards = stored.fields["rm_scores"].values()
    assert rewards.unique().numel() > 1
    assert live.update(stored, plugins={"mask": Mask(False)}).grad_norm == 0.0
    assert live.update(stored, plugins={"mask": Mask(True)}).grad_norm > 0.0
