"""The same rows again: fewer of them, in another order, under other names, with other values or fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.batch_fields import as_array


def take_rows(batch: RolloutBatch, rows: Tensor) -> RolloutBatch:
    """Return the batch of the given rows, in the order given.

    Args:
        batch: any.
        rows: (k,) int64 indices, or (bs,) bool.
    """
    index = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
    lengths = batch.lengths[index]
    tokens = token_index(batch.offsets, index)
    prompts = batch._prompts
    if prompts is not None:
        values, offsets = prompts
        prompts = (values[token_index(offsets, index)], _offsets(offsets.diff()[index]))
    places = index.tolist()
    # Rows beside padding that is wider stay beside it.
    return (WidePadding if isinstance(batch, WidePadding) else RolloutBatch)(
        keys=[batch._keys[place] for place in places],
        offsets=_offsets(lengths),
        fields={name: as_array(column)[np.array(places, dtype=np.int64)] for name, column in batch._fields.items()},
        token_fields={name: values[tokens] for name, values in batch._token_fields.items()},
        prompts=prompts,
    )


def token_index(offsets: Tensor, rows: Tensor) -> Tensor:
    """(k',) int64: places of the tokens of the given rows in jagged values, in the order of ``rows``."""
    lengths = offsets.diff()[rows]
    starts = torch.repeat_interleave(offsets[rows] - _offsets(lengths)[:-1], lengths)
    return starts + torch.arange(int(lengths.sum()))


def only_fields(batch: RolloutBatch, names: Collection[str]) -> RolloutBatch:
    """Return the batch with the named fields only, under the names they are stored by."""
    return _like(
        batch,
        fields={name: column for name, column in batch._fields.items() if name in names},
        token_fields={name: values for name, values in batch._token_fields.items() if name in names},
        prompts="prompts" in names,
    )


def with_values(batch: RolloutBatch, token_fields: Mapping[str, Tensor]) -> RolloutBatch:
    """Return the batch with other (T,) values in some token fields."""
    return _like(batch, token_fields={**batch._token_fields, **token_fields})


def rename_groups(batch: RolloutBatch, names: Mapping[str, str]) -> RolloutBatch:
    """Return the batch with other uids: ``names`` gives the new one for each."""
    parts = [key.rsplit("_", 2) for key in batch._keys]
    renamed = [f"{names[uid]}_{session}_{output}" for uid, session, output in parts]
    return RolloutBatch(renamed, batch.offsets, batch._fields, batch._token_fields, batch._prompts)


class WidePadding(RolloutBatch):
    """The same rows beside a longer one that is not there: padded tensors are wider by ``EXTRA`` columns of padding."""

    EXTRA = 3

    @property
    def longest(self) -> int:
        """Lmax, the width of padded tensors."""
        return super().longest + self.EXTRA

    def with_token_field(self, name: str, values: Tensor) -> RolloutBatch:
        """Return a batch as wide in which the token field ``name`` holds ``values`` (T,)."""
        return with_values(self, {name: values})

    def align(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Read a tensor as any batch does; one as wide as the longest response is right too."""
        if tensor.shape == (self.bs, super().longest):
            return self.to_values(tensor), True
        return super().align(tensor)


def widen_padding(batch: RolloutBatch) -> RolloutBatch:
    """Return the batch with more padding in its padded tensors, and the same in everything else."""
    return WidePadding(batch._keys, batch.offsets, batch._fields, batch._token_fields, batch._prompts)


def copied(batch: RolloutBatch) -> RolloutBatch:
    """Return a batch of the same rows that shares no tensor with this one."""
    token_fields = {name: values.clone() for name, values in batch._token_fields.items()}
    prompts = None if batch._prompts is None else (batch._prompts[0].clone(), batch._prompts[1].clone())
    fields = {name: as_array(column).copy() for name, column in batch._fields.items()}
    return type(batch)(list(batch._keys), batch.offsets.clone(), fields, token_fields, prompts)


def _like(
    batch: RolloutBatch,
    fields: Mapping[str, object] | None = None,
    token_fields: Mapping[str, Tensor] | None = None,
    prompts: bool = True,
) -> RolloutBatch:
    return type(batch)(
        batch._keys,
        batch.offsets,
        batch._fields if fields is None else fields,
        batch._token_fields if token_fields is None else token_fields,
        batch._prompts if prompts else None,
    )


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
