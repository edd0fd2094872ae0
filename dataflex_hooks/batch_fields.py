"""Mappings that give a :class:`~dataflex_hooks.batch.RolloutBatch` the look of a verl ``DataProto``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class PaddedFields(Mapping[str, Tensor]):
    """``batch.batch``: token fields as (bs, Lmax) tensors, 0 on the right of shorter rows, built when first read.

    Args:
        names: the token fields.
        pad: gives the padded tensor of a field by its name or alias; raises FieldError when it is not there.
    """

    def __init__(self, names: tuple[str, ...], pad: Callable[[str], Tensor]) -> None:
        self._names = names
        self._pad = pad
        self._padded: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._padded:
            self._padded[name] = self._pad(name)
        return self._padded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class RowColumns(Mapping[str, NDArray[Any]]):
    """``batch.non_tensor_batch``: per-row columns as read-only (bs,) arrays; ``uid`` is always there.

    Args:
        names: the columns.
        column: gives a column by its name; raises FieldError when it is not there.
    """

    def __init__(self, names: tuple[str, ...], column: Callable[[str], NDArray[Any]]) -> None:
        self._names = names
        self._column = column

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._column(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def as_array(column: Any) -> NDArray[Any]:
    """Return a column given as tensor, array or sequence as a (bs,) array, sequences as objects."""
    if isinstance(column, Tensor):
        return np.asarray(column.detach().cpu())
    if isinstance(column, np.ndarray):
        return np.asarray(column)
    # np.array would turn a list of equally long lists into a matrix.
    return np.fromiter(column, dtype=object, count=len(column))


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that refuses writes, leaving the flags of ``array`` itself alone."""
    view: NDArray[Any] = array.view()
    view.flags.writeable = False
    return view
