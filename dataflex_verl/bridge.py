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
        keys: of these rows.
        missing: requested fields that no row has.
        verl_weights: (T,) importance weights that verl put there, None without.
    """

    view: RolloutBatch
    keys: list[str]
    missing: frozenset[str]
    verl_weights: torch.Tensor | None

    def of(self, values: torch.Tensor) -> RowValues:
        """Values (T,) of these rows."""
        return RowValues(self.keys, self.view.lengths, values)


def fetch(batch: KVBatchMeta, fields: Iterable[str], with_weights: bool = False) -> FetchedRows:
    """Read the union of ``fields`` for all real rows in one TransferQueue call.

    Args:
        batch: rows of a step; padding rows (tag ``is_padding``) are left out.
        fields: names as stored.
        with_weights: also read verl's own importance weights, where stored.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    wanted = {*ALWAYS, *fields}
    data = tq.kv_batch_get(
        keys=keys,
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
    view = RolloutBatch(keys, offsets, columns, token_fields, prompts)
    return FetchedRows(view, keys, frozenset(wanted - set(data.keys())), verl_weights)


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


@dataclass(frozen=True)
class RowValues:
    """A value for every response token of some rows: their keys, numbers of tokens (k,) and the values (T,)."""

    keys: list[str]
    lengths: torch.Tensor
    values: torch.Tensor

    def select(self, keep: torch.Tensor) -> RowValues:
        """The rows marked in ``keep`` (k,) bool."""
        keys = [key for key, stays in zip(self.keys, keep.tolist(), strict=True) if stays]
        return RowValues(keys, self.lengths[keep], self.values[keep.repeat_interleave(self.lengths)])

    def times(self, factors: torch.Tensor) -> RowValues:
        """Multiply each row's values by its factor (k,)."""
        return replace(self, values=self.values * factors.to(self.values.dtype).repeat_interleave(self.lengths))

    def times_values(self, factors: torch.Tensor) -> RowValues:
        """Multiply by a factor for each token (T,)."""
        return replace(self, values=self.values * factors)

    @property
    def nested(self) -> torch.Tensor:
        """The values as a jagged tensor."""
        return jagged(self.values, torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)]))


def write_weights(batch: KVBatchMeta, weights: RowValues) -> KVBatchMeta:
    """Store ``weights`` of the real rows as the loss's importance weights.

    Every row of the batch needs the field, padding too: those get 1, and their response mask is 0.

    Returns:
        The meta to pass on. Workers fetch only the fields their meta lists, so going on with the older one would
        silently ignore the weights.
    """
    have = set(weights.keys)
    padding = [(key, tag["response_len"]) for key, tag in zip(batch.keys, batch.tags, strict=True) if key not in have]
    if padding:
        lengths = torch.tensor([length for _, length in padding], dtype=torch.int64)
        ones = torch.ones(int(lengths.sum()), dtype=weights.values.dtype)
        weights = RowValues(
            [*weights.keys, *(key for key, _ in padding)],
            torch.cat([weights.lengths, lengths]),
            torch.cat([weights.values, ones]),
        )
    return put(batch, weights.keys, {_VERL_WEIGHTS: weights.nested})


def write_field(batch: KVBatchMeta, name: str, values: RowValues) -> KVBatchMeta:
    """Store a token field of some rows; the others keep theirs."""
    return put(batch, values.keys, {name: values.nested})


def put(batch: KVBatchMeta, keys: list[str], fields: dict[str, torch.Tensor]) -> KVBatchMeta:
    """Store fields of the rows ``keys``; returns the meta of the whole batch that lists them."""
    stored = tq.kv_batch_put(
        keys=keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(keys))
    )
    # The returned meta knows the new field but has lost extra_info, and covers only the rows written.
    return replace(batch, fields=stored.fields)


def jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Jagged tensor of ``values`` (T,) with ``offsets`` (k + 1,)."""
    lengths = offsets.diff()
    return torch.nested.nested_tensor_from_jagged(
        values.contiguous(), offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )
