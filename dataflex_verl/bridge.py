"""Between TransferQueue and the hooks: stored rows become a RolloutBatch, merged decisions become stored fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from dataflex_hooks import RolloutBatch

ALWAYS = ("response_mask",)
_VERL_WEIGHTS = "rollout_is_weights"


@dataclass(frozen=True)
class FetchedRows:
    """Real rows of a batch.

    Attributes:
        view: what plugins see.
        real: positions of these rows in the batch meta; the others are padding.
        missing: requested fields that no row has.
        verl_weights: (T,) importance weights that verl put there, None without.
    """

    view: RolloutBatch
    real: list[int]
    missing: frozenset[str]
    verl_weights: torch.Tensor | None


def fetch(batch: KVBatchMeta, fields: Iterable[str], with_weights: bool = False) -> FetchedRows:
    """Read the union of ``fields`` for all real rows in one TransferQueue call.

    Args:
        batch: rows of a step; padding rows (tag ``is_padding``) are left out.
        fields: names as stored.
        with_weights: also read verl's own importance weights, where stored.
    """
    real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
    wanted = {*ALWAYS, *fields}
    data = tq.kv_batch_get(
        keys=[batch.keys[i] for i in real],
        partition_id=batch.partition_id,
        select_fields=sorted(wanted | ({_VERL_WEIGHTS} if with_weights else set())),
    )
    offsets = data["response_mask"].offsets()
    token_fields: dict[str, torch.Tensor] = {}
    columns: dict[str, Any] = {}
    prompts = None
    for name in data.keys():
        value = data[name]
        if name == "prompts":
            prompts = (value.values(), value.offsets())
        elif isinstance(value, torch.Tensor) and value.is_nested:
            token_fields[name] = value.values()
        else:
            columns[name] = _column(value)
    verl_weights = token_fields.get(_VERL_WEIGHTS) if with_weights else None
    if _VERL_WEIGHTS not in wanted:
        token_fields.pop(_VERL_WEIGHTS, None)
    view = RolloutBatch([batch.keys[i] for i in real], offsets, columns, token_fields, prompts)
    return FetchedRows(view, real, frozenset(wanted - set(data.keys())), verl_weights)


def stored_fields(batch: KVBatchMeta) -> list[str]:
    """Names of all fields of the first row, for messages."""
    return sorted(tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id).keys())


def _column(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    items = value.tolist() if hasattr(value, "tolist") else list(value)
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def write_weights(batch: KVBatchMeta, rows: FetchedRows, weights: torch.Tensor) -> KVBatchMeta:
    """Store ``weights`` (T,) as the loss's importance weights, multiplied into verl's own.

    Every row of the batch needs the field, padding too: those get 1, and their response mask is 0.

    Returns:
        The meta to pass on. Workers fetch only the fields their meta lists, so going on with the older one would
        silently ignore the weights.
    """
    if rows.verl_weights is not None:
        weights = weights * rows.verl_weights
    return _put(batch, batch.keys, {_VERL_WEIGHTS: _spread(batch, rows, weights)})


def scale_advantages(batch: KVBatchMeta, rows: FetchedRows, weights: torch.Tensor) -> KVBatchMeta:
    """Multiply the stored advantages by ``weights`` (T,); returns stay as they are."""
    advantages = rows.view.values("advantages") * weights
    keys = [batch.keys[i] for i in rows.real]
    return _put(batch, keys, {"advantages": _jagged(advantages, rows.view.offsets)})


def write_rewards(batch: KVBatchMeta, rows: FetchedRows, rewards: torch.Tensor) -> KVBatchMeta:
    """Store ``rewards`` (T,) in place of the reward model's."""
    keys = [batch.keys[i] for i in rows.real]
    return _put(batch, keys, {"rm_scores": _jagged(rewards, rows.view.offsets)})


def _put(batch: KVBatchMeta, keys: list[str], fields: dict[str, torch.Tensor]) -> KVBatchMeta:
    stored = tq.kv_batch_put(
        keys=keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(keys))
    )
    # The returned meta knows the new field but has lost extra_info, and covers only the rows written.
    return replace(batch, fields=stored.fields)


def _spread(batch: KVBatchMeta, rows: FetchedRows, values: torch.Tensor) -> torch.Tensor:
    if len(rows.real) == len(batch):
        return _jagged(values, rows.view.offsets)
    lengths = torch.tensor([tag["response_len"] for tag in batch.tags], dtype=torch.int64)
    lengths[rows.real] = rows.view.lengths
    is_real = torch.zeros(len(batch), dtype=torch.bool)
    is_real[rows.real] = True
    spread = torch.ones(int(lengths.sum()), dtype=values.dtype)
    spread[is_real.repeat_interleave(lengths)] = values
    return _jagged(spread, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


def _jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    lengths = offsets.diff()
    return torch.nested.nested_tensor_from_jagged(
        values.contiguous(), offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )
