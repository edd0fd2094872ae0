"""Reward variance of a prompt's group, as a share of the largest possible."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_scorer
from dataflex_hooks.segments import segment_count, segment_sum
from dataflex_hooks.signals import check_signal, session_signal, signal_requires


@register_scorer("vcrl")
class Vcrl(Scorer):
    """``p = k(G - k) / (floor(G/2) * ceil(G/2))`` for a group with k of G sessions solved: (bs,) float32 in [0, 1].

    The unbiased variance k(G - k) / (G(G - 1)) of VCRL (arXiv 2509.19803) over the largest that G sessions can have. 1
    for prompts that are solved half of the time, 0 for those always or never solved and for groups of one. VCRL trains
    on groups with p at or above a threshold that rises during training, and replays groups from a memory, which this
    does not.

    Args:
        success_threshold: value above which a session counts as solved, in the units of the signal.
        signal: ``reward``, or a key of the dict that the reward function returns, such as ``acc``.
    """

    timing = "post_reward"
    granularity = "prompt"
    needs_groups = True
    layout = "jagged"

    def __init__(self, success_threshold: float = 0.5, signal: str = "reward", **kwargs: object) -> None:
        checks = ParameterChecks()
        self.success_threshold = checks.number("success_threshold", success_threshold)
        self.signal = check_signal(checks, signal)
        checks.finish()
        self.requires = signal_requires(self.signal)

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (bs,) float32, equal within a group."""
        solved = session_signal(batch, self.signal) > self.success_threshold
        k = segment_sum(solved, batch.group_of_session, batch.n_groups)
        size = segment_count(batch.group_of_session, batch.n_groups)
        largest = ((size // 2) * (size - size // 2)).clamp(min=1)
        return batch.expand_groups((k * (size - k) / largest).to(torch.float32))
