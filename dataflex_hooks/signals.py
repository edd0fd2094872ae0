"""Which number of a session a scorer looks at: the raw reward, or one that the reward function returned beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.errors import FieldError
from dataflex_hooks.parameters import ParameterChecks

REWARD = "reward"
"""The signal that stands for the raw reward, before any KL penalty; even where a reward function returns such a key."""
_STORED = "extra_fields"
_INFO = "reward_extra_info"
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


def check_signal(checks: ParameterChecks, signal: object) -> str:
    """Return ``signal`` if it may be the name of one."""
    if not isinstance(signal, str) or not signal:
        checks.refuse("signal", signal, f"{REWARD!r}, or a key of what the reward function returns, such as 'acc'")
    return str(signal)


def signal_requires(signal: str) -> tuple[str, ...]:
    """Return the batch fields that hold a signal."""
    return ("rm_scores",) if signal == REWARD else (_STORED,)


def session_signal(batch: RolloutBatch, signal: str) -> Tensor:
    """Return a signal of each session's final output, (n_sessions,) float32.

    verl keeps what a reward function returns as a dict under ``extra_fields.reward_extra_info`` of every row; a reward
    function that returns a bare number has it under ``acc``.

    Raises:
        FieldError: a session lacks the key; the message names the keys that there are.
        TypeError: its values are not numbers.
    """
    if signal == REWARD:
        return batch.session_rewards
    final = batch.is_final.cpu().numpy()
    infos = [_info(stored) for stored in batch.column(_STORED)[final]]
    try:
        given = [info[signal] for info in infos]
    except KeyError:
        raise _missing(signal, infos) from None
    odd = [kind for kind in set(map(type, given)) if not issubclass(kind, _NUMBERS)]
    if odd:
        first = next(value for value in given if type(value) in odd)
        raise TypeError(f"signal {signal!r} has to be a number in every rollout, got {first!r}")
    values = np.array(given)
    signals = torch.empty(batch.n_sessions, dtype=torch.float32, device=batch.offsets.device)
    signals[batch.session[batch.is_final]] = torch.from_numpy(values.astype(np.float32)).to(signals.device)
    return signals


def _info(stored: Any) -> Mapping[str, Any]:
    info = stored.get(_INFO) if isinstance(stored, Mapping) else None
    return info if isinstance(info, Mapping) else {}


def _missing(signal: str, infos: list[Mapping[str, Any]]) -> FieldError:
    lacking = sum(signal not in info for info in infos)
    keys = sorted({str(key) for info in infos for key in info})
    there = f"there is: {', '.join(keys)}" if keys else "the reward function returned nothing beside the reward"
    return FieldError(
        f"no signal {signal!r} in the {_INFO} of {lacking} of {len(infos)} rollouts; {there}. A reward function adds "
        f"keys by returning a dict; signal: {REWARD} is the reward itself"
    )
