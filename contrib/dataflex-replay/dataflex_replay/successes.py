"""What a batch says about prompts: their keys, the groups that failed, and the responses that succeeded."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray

from dataflex_hooks import RolloutBatch
from dataflex_replay.pool import Ints, Responses


def prompt_keys(batch: RolloutBatch, identity: str | None) -> Ints:
    """Return a key for each row's prompt, (bs,) int64: a hash of its tokens, and of a column's value where named."""
    keys = np.array(batch.prompt_hash)
    if identity is None:
        return keys
    values, code = np.unique(batch.column(identity).astype(str), return_inverse=True)
    digests = [hashlib.blake2b(value.encode(), digest_size=8).digest() for value in values]
    hashes = np.array([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=np.int64)
    return keys ^ hashes[code.reshape(-1)]


def failed_groups(batch: RolloutBatch, threshold: float) -> Ints:
    """Return for each group of which no session's reward exceeds ``threshold`` its first row, in the order of contents.

    The first row is that of the lowest session number and output index: in an agent loop with several outputs it is the
    one that has the prompt of the dataset.
    """
    best = torch.full((batch.n_groups,), -torch.inf)
    best = best.scatter_reduce(0, batch.group_of_session.cpu(), batch.session_rewards.cpu(), "amax")
    order = np.lexsort(
        (batch.output_index.cpu().numpy(), batch.session_number.cpu().numpy(), batch.group.cpu().numpy())
    )
    _, first = np.unique(batch.group.cpu().numpy()[order], return_index=True)
    rows: Ints = order[first][(best <= threshold).numpy()]
    return rows[np.argsort(batch.tie_rank.cpu().numpy()[rows])]


def successes(batch: RolloutBatch, threshold: float, keys: Ints, step: int, with_log_probs: bool) -> Responses:
    """Return the responses whose reward exceeds ``threshold``, as far as they can be trained on again.

    Left out are sessions of several outputs, whose later prompts hold earlier outputs, and responses with tokens that
    the model did not write: an added row has no mask of its own.
    """
    outputs = torch.bincount(batch.session, minlength=batch.n_sessions)[batch.session]
    whole = (batch.n_valid == batch.lengths) & (batch.lengths > 0) & (outputs == 1)
    rows = np.flatnonzero((whole & (batch.rewards > threshold)).cpu().numpy())
    tokens = batch.values("responses").cpu().numpy().astype(np.int32)
    log_probs = np.zeros(0, dtype=np.float32)
    if with_log_probs:
        # An engine's rounding may leave a probability just above 1.
        given: NDArray[np.float32] = batch.values("rollout_log_probs").to(torch.float32).cpu().numpy()
        log_probs = np.minimum(given, np.float32(0))
    everything = Responses(
        prompt=keys,
        content=np.array(batch.response_hash),
        step=np.full(batch.bs, step, dtype=np.int64),
        reward=batch.rewards.cpu().numpy().astype(np.float32),
        offsets=batch.offsets.cpu().numpy(),
        tokens=tokens,
        log_probs=log_probs,
    )
    return everything.select(rows)
