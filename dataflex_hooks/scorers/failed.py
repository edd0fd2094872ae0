"""Rollouts that went wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.components import Scorer
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import register_scorer
from dataflex_hooks.segments import segment_sum
from dataflex_hooks.signals import REWARD, check_signal, session_signal, signal_requires


@register_scorer("failed")
class Failed(Scorer):
    """1 for a session that went wrong, else 0: (bs,) float32.

    A session went wrong if the model wrote no token in any of its outputs, or if ``signal`` says so. With ``reward``, a
    reward that is NaN or infinite does; with any other key of the dict that the reward function returns, a value other
    than 0 or false does: a sandbox that timed out, an answer that could not be judged. Groups in which a session raised
    an exception never get here: verl leaves them out of the batch.

    Args:
        signal: ``reward``, or a key such as ``timeout``.
    """

    timing = "post_reward"
    layout = "jagged"

    def __init__(self, signal: str = "reward", **kwargs: object) -> None:
        checks = ParameterChecks()
        self.signal = check_signal(checks, signal)
        checks.finish()
        self.requires = (*signal_requires(self.signal), "response_mask")

    def score(self, batch: RolloutBatch, step_id: int, **ctx: Any) -> Tensor:
        """Return (bs,) float32, 0 or 1, equal within a session."""
        values = session_signal(batch, self.signal)
        wrong = ~torch.isfinite(values) if self.signal == REWARD else values != 0
        wrote = segment_sum(batch.n_valid, batch.session, batch.n_sessions) > 0
        return batch.expand_sessions((wrong | ~wrote).to(torch.float32))
