"""It masks what is too long, and nothing else."""

from __future__ import annotations

import torch
from dataflex_example import KeepShort

from dataflex_hooks import RolloutBatch, StepContext


def test_responses_longer_than_the_limit_are_masked() -> None:
    mask = torch.ones(9)
    batch = RolloutBatch(["a_0_0", "a_1_0", "b_0_0"], torch.tensor([0, 2, 6, 9]), {}, {"response_mask": mask})
    assert KeepShort(longest=3).post_advantage(batch, StepContext(step=1)).mask.tolist() == [True, False, True]
    assert KeepShort().post_advantage(batch, StepContext(step=1)).mask.all()
