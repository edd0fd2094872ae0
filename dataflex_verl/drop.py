"""Rows leave a batch: before verl balances it, or after advantages, when padding is already in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from dataflex_verl.added_rows import ADDED
from dataflex_verl.bridge import jagged
from dataflex_verl.deal import Layout, deal, occupied


@dataclass(frozen=True)
class Shape:
    """What the updates of a step ask of a batch.

    Attributes:
        ranks: data-parallel size.
        multiple: verl's; the number of rows has to be a multiple of it.
        actor_mini, critic_mini: rows of a mini-batch, None where the model is not updated.
    """

    ranks: int
    multiple: int
    actor_mini: int | None
    critic_mini: int | None

    @classmethod
    def of(cls, config: DictConfig, step: int, ranks: int, multiple: int, use_critic: bool) -> Shape:
        """Read it from the settings that verl pads by; before ``critic_warmup`` the actor is not updated."""
        n = config.actor_rollout_ref.rollout.n
        updates_actor = config.trainer.critic_warmup <= step
        return cls(
            ranks=ranks,
            multiple=multiple,
            actor_mini=config.actor_rollout_ref.actor.ppo_mini_batch_size * n if updates_actor else None,
            critic_mini=config.critic.ppo_mini_batch_size * n if use_critic else None,
        )

    def layout(self, size: int) -> Layout:
        """The layout of a batch of ``size`` rows."""
        minis = [mini for mini in (self.actor_mini, self.critic_mini) if mini is not None]
        return Layout(size, self.ranks, math.gcd(*minis) if minis else self.multiple)


def is_real(batch: KVBatchMeta) -> NDArray[np.bool_]:
    """(rows,) which rows of the batch are no padding; added rows, which carry its tag, are none."""
    return np.array([not tag.get("is_padding", False) or ADDED in tag for tag in batch.tags], dtype=bool)


def drop(batch: KVBatchMeta, keep: Sequence[bool]) -> KVBatchMeta:
    """Take rows out of a batch without padding, and out of TransferQueue."""
    gone = [key for key, stays in zip(batch.keys, keep, strict=True) if not stays]
    tq.kv_clear(keys=gone, partition_id=batch.partition_id)
    return batch.select_keys([key for key, stays in zip(batch.keys, keep, strict=True) if stays])


def spread(batch: KVBatchMeta, shape: Shape) -> KVBatchMeta:
    """Spread the real rows of a padded batch evenly over ranks and mini-batches, in place."""
    real = is_real(batch)
    lengths = [tag["seq_len"] for tag, stays in zip(batch.tags, real, strict=True) if stays]
    rows = np.concatenate([np.flatnonzero(real), np.flatnonzero(~real)])
    batch.reorder(rows[deal(lengths, shape.layout(len(batch)))].tolist())
    return batch


def drop_padded(batch: KVBatchMeta, keep: Sequence[bool], shape: Shape) -> KVBatchMeta:
    """Take rows out of a batch that has been padded and processed.

    The rows that fill it up to the next multiple are the padding that is there and then the shortest of those dropped,
    with their masks cleared: every field that the passes so far have written is in them, in its right shape.

    Args:
        batch: with padding.
        keep: for each row; padding counts as not kept.
        shape: of the step.
    """
    stays = np.asarray(keep, dtype=bool) & is_real(batch)
    size = math.ceil(int(stays.sum()) / shape.multiple) * shape.multiple
    padding = ~is_real(batch)
    lengths = np.array([tag["seq_len"] for tag in batch.tags])
    candidates = np.flatnonzero(~stays)
    order = np.lexsort((candidates, lengths[candidates], ~padding[candidates]))
    filling = candidates[order][: size - int(stays.sum())]
    blanked = [int(i) for i in filling if not padding[i]]
    chosen = np.concatenate([np.flatnonzero(stays), np.sort(filling)])
    gone = sorted(set(range(len(batch))) - set(chosen.tolist()))
    if gone:
        tq.kv_clear(keys=[batch.keys[i] for i in gone], partition_id=batch.partition_id)
    batch = _blank(batch, blanked)
    return spread(batch.select_keys([batch.keys[i] for i in chosen]), shape)


def with_real_rows(batch: KVBatchMeta, shape: Shape, mini: int) -> KVBatchMeta:
    """The part of a batch whose mini-batches of ``mini`` rows have a real row; the batch itself if all have."""
    rows = occupied(is_real(batch), shape.layout(len(batch)), mini)
    return batch if len(rows) == len(batch) else batch.select_keys([batch.keys[i] for i in rows])


def _blank(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    """Make padding of rows: no token of theirs counts."""
    if not rows:
        return batch
    keys = [batch.keys[i] for i in rows]
    names = ("response_mask", "loss_mask", "advantages", "returns", "rm_scores")
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(names))
    stored = [name for name in names if name in data.keys()]
    zeros = {name: jagged(torch.zeros_like(data[name].values()), data[name].offsets()) for name in stored}
    tags = [{**batch.tags[i], "is_padding": True} for i in rows]
    tq.kv_batch_put(
        keys=keys, partition_id=batch.partition_id, fields=TensorDict(zeros, batch_size=len(keys)), tags=tags
    )
    marked = list(batch.tags)
    for i, tag in zip(rows, tags, strict=True):
        marked[i] = tag
    return replace(batch, tags=marked)
