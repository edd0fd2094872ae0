"""What became of each rollout, in a word, and which plugins did not keep it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.decision_log.rows import own_keep
from dataflex_hooks.decision_log.schema import STATES

if TYPE_CHECKING:
    from dataflex_hooks.decision_log.columns import UpdateRecord

Flags = NDArray[np.bool_]
ALONE = "host: the only rollout of its prompt that is left"
_TRAINED, _MASKED, _DROPPED = (STATES.index(name) for name in ("trained", "masked", "dropped"))


@dataclass(frozen=True)
class Verdict:
    """``state`` and ``why`` (bs,) as Arrow text; ``in_update`` (bs,) bool: rows that are not dropped."""

    state: Any
    why: Any
    in_update: Flags


def judge(record: UpdateRecord, place: NDArray[np.int64]) -> Verdict:
    """Say what became of the rows of a rollout.

    Args:
        record: what the host noted.
        place: (bs,) where each row stands at ``post_advantage``, -1 if it never came there.
    """
    n, decided = record.rewarded.bs, record.decided
    early = np.zeros(n, dtype=bool) if record.reward.row_keep is None else ~_flags(record.reward.row_keep)
    there = place >= 0
    # The host drops rows that lost all others of their group: they keep no baseline.
    alone = ~early & ~there if decided is not None else np.zeros(n, dtype=bool)
    state = np.full(n, _TRAINED, dtype=np.int64)
    if decided is not None:
        state[there & ~_spread(_flags(decided.row_keep), place, True)] = _MASKED
        if decided.in_batch is not None:
            state[~_spread(_flags(decided.in_batch), place, True)] = _DROPPED
    state[early | alone] = _DROPPED
    text = pa.array(STATES).take(pa.array(state))
    return Verdict(text, _why(record, place, alone), state != _DROPPED)


def _why(record: UpdateRecord, place: NDArray[np.int64], alone: Flags) -> Any:
    against = list(_against(record, place))
    if alone.any():
        against.append((ALONE, alone))
    if not against:
        return pa.nulls(record.rewarded.bs, pa.string())
    code = np.zeros(record.rewarded.bs, dtype=np.int64)
    for bit, (_, rows) in enumerate(against[:62]):
        code |= rows.astype(np.int64) << bit
    codes, index = np.unique(code, return_inverse=True)
    texts = [
        "; ".join(text for bit, (text, _) in enumerate(against[:62]) if given >> bit & 1) or None
        for given in codes.tolist()
    ]
    return pa.array(texts, pa.string()).take(pa.array(index.reshape(-1)))


def _against(record: UpdateRecord, place: NDArray[np.int64]) -> Iterator[tuple[str, Flags]]:
    """Who did not keep which rows, by plugin."""
    for early in record.reward.decisions:
        if early.keep is not None:
            yield _text(early), ~_flags(early.keep)
    if record.decided is None or record.advantaged is None:
        return
    batch = record.advantaged
    for decision in record.decided.decisions:
        own = own_keep(decision, batch)
        if own is not None:
            yield _text(decision), ~_spread(_flags(own), place, True)


def _text(decision: Any) -> str:
    return f"{decision.label}: {decision.reason}" if decision.reason else str(decision.label)


def _flags(values: Tensor) -> Flags:
    return np.asarray(values.cpu().numpy(), dtype=bool)


def _spread(values: Flags, place: NDArray[np.int64], otherwise: bool) -> Flags:
    """Bring values of the rows at ``post_advantage`` into the order of ``post_reward``."""
    if not len(values):
        return np.full(len(place), otherwise)
    return np.where(place >= 0, values[place], otherwise)
