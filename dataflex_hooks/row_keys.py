"""Row keys ``{uid}_{session}_{index}`` and a content order that uses neither position nor uuid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.segments import row_blocks

# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014) and, as polynomial base, of PCG (O'Neill 2014).
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BASE = np.uint64(6364136223846793005)


@dataclass(frozen=True)
class RowKeys:
    """Parsed keys: ``uid`` (bs,) object, ``session_number`` and ``output_index`` (bs,) int64."""

    uid: NDArray[np.object_]
    session_number: NDArray[np.int64]
    output_index: NDArray[np.int64]


def parse_keys(keys: Sequence[str]) -> RowKeys:
    """Split ``{uid}_{session}_{index}`` keys; the uid may hold underscores.

    Raises:
        ValueError: a key has another form; the message shows the first one.
    """
    parts = [key.rsplit("_", 2) for key in keys]
    for part in parts:
        if len(part) != 3 or not (part[1].isdecimal() and part[2].isdecimal()):
            raise ValueError(f"row key {'_'.join(part)!r} does not read '<uid>_<session number>_<output index>'")
    uid, session, output = zip(*parts, strict=True) if parts else ((), (), ())
    return RowKeys(
        uid=np.fromiter(uid, dtype=object, count=len(parts)),
        session_number=np.array(session, dtype=np.int64),
        output_index=np.array(output, dtype=np.int64),
    )


def content_hash(values: Tensor, offsets: Tensor) -> NDArray[np.int64]:
    """Hash each row's token ids to 64 bits: a polynomial over mixed tokens, modulo 2**64.

    Args:
        values: (T,) integer token ids, all rows one after the other.
        offsets: (bs + 1,) int64, where each row starts.

    Returns:
        (bs,) int64; rows with equal tokens have equal hashes on every machine.
    """
    starts = offsets.cpu().numpy()
    lengths = np.diff(starts)
    tokens = values.cpu().numpy()
    block_size = max((len(range(*block.indices(len(tokens)))) for _, block, _ in row_blocks(starts)), default=0)
    powers = np.cumprod(np.full(block_size, _BASE, dtype=np.uint64))
    # Every row counts its powers from its first token; within a block they count on, and are divided back out at the
    # end: an odd number has an inverse modulo 2**64.
    inverse = np.uint64(pow(int(_BASE), -1, 1 << 64))
    back = np.cumprod(np.concatenate([[np.uint64(1)], np.full(max(block_size - 1, 0), inverse, dtype=np.uint64)]))
    hashes = lengths.astype(np.uint64)
    for rows, block, first in row_blocks(starts):
        if not len(first):
            continue
        mixed = tokens[block].astype(np.uint64)
        mixed += np.uint64(1)
        mixed *= _MIX_1
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX_2
        mixed *= powers[: len(mixed)]
        hashes[rows][lengths[rows] > 0] += np.add.reduceat(mixed, first) * back[first]
    return hashes.view(np.int64)
