"""A plugin's state in two parts: a tree that strict JSON can hold, and tensors beside it.

Types come back as they were: floats exactly (JSON writes ``repr``), integers of any size, tuples as tuples, keys that
are not strings as they are, numpy arrays and scalars as numpy, torch tensors as torch, on the CPU. NaN and infinities
are words in the tree, as strict JSON has no such numbers; the payload bits of a NaN in a plain float are not kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflex_hooks.errors import DataFlexError

TAG = "$"
"""Key that marks a mapping of the tree as something else than a dict with string keys."""

STORABLE = "dict, list, tuple, bool, int, float, str, None, numpy arrays and scalars, torch tensors"
_DTYPES = frozenset(
    [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64"),
    ]
)
_DEEPEST = 100
_KEYS = (str, int, float, bool, tuple, type(None))


class StateValueError(DataFlexError, TypeError):
    """A value of a state that cannot be stored, or a stored tree that cannot be read. ``path`` says where."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(path, text)
        self.path = path
        self.text = text

    def __str__(self) -> str:
        return f"state{self.path} {self.text}"


@dataclass(frozen=True)
class Packed:
    """A state ready to be written.

    Attributes:
        tree: nested dicts, lists, strings, integers, finite floats, booleans and None.
        tensors: by the names that the tree refers to; contiguous CPU copies that share no memory.
    """

    tree: Any
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def pack(value: object) -> Packed:
    """Split a state into tree and tensors.

    Args:
        value: nested dicts, lists and tuples of scalars, strings, None, numpy arrays and torch tensors.

    Raises:
        StateValueError: something else is in it, with the path to it.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(_pack(value, "", tensors, 0), tensors)


def unpack(packed: Packed) -> Any:
    """Return the state that :func:`pack` was given, in memory of its own.

    Raises:
        StateValueError: the tree refers to a tensor that is not there, or was written by something else.
    """
    return _unpack(packed.tree, "", packed.tensors)


def _pack(value: object, path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > _DEEPEST:
        raise StateValueError(path, f"is nested deeper than {_DEEPEST} levels; does it hold itself?")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        items = [_pack(item, f"{path}[{i}]", tensors, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {TAG: "tuple", "items": items}
    if isinstance(value, dict) and kind in (dict, OrderedDict):
        return _pack_dict(value, path, tensors, depth)
    if isinstance(value, Tensor):
        return {TAG: "tensor", "name": _keep(_plain(value, path), path, tensors)}
    if isinstance(value, (np.ndarray, np.generic)):
        return _pack_numpy(value, path, tensors)
    raise StateValueError(path, f"is {_named(kind)}, which cannot be stored; accepted: {STORABLE}")


def _pack_dict(value: Mapping[Any, object], path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    items = [(key, _pack(item, f"{path}[{key!r}]", tensors, depth + 1)) for key, item in value.items()]
    if all(type(key) is str for key in value) and TAG not in value:
        return dict(items)
    for key in value:
        if type(key) not in _KEYS:
            text = f"has a key of type {_named(type(key))}, {key!r}; accepted: str, int, float, bool, None and tuples"
            raise StateValueError(path, text)
    return {
        TAG: "dict",
        "items": [[_pack(key, f"{path} key {key!r}", tensors, depth + 1), item] for key, item in items],
    }


def _pack_numpy(value: np.ndarray[Any, Any] | np.generic, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
        raise StateValueError(path, f"is {_named(type(value))}, which cannot be stored; use a plain numpy array")
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        return {TAG: "strings", "dtype": value.dtype.str, "shape": list(value.shape), "items": value.ravel().tolist()}
    try:
        # np.array, unlike np.ascontiguousarray, keeps an array of no dimensions as it is.
        tensor = torch.from_numpy(np.array(value, order="C", copy=True))
    except TypeError:
        raise StateValueError(
            path, f"is numpy {value.dtype}, which cannot be stored; accepted: {_accepted()}"
        ) from None
    name = _keep(_plain(tensor, path), path, tensors)
    return {TAG: "array" if isinstance(value, np.ndarray) else "scalar", "name": name}


def _plain(tensor: Tensor, path: str) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        raise StateValueError(path, "is no plain tensor (parameter, sparse, nested, ...); store its values")
    if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
        raise StateValueError(path, f"is {tensor.dtype}, which cannot be stored; accepted: {_accepted()}")
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _keep(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    name = f"{len(tensors)}{path}"
    tensors[name] = tensor
    return name


def _unpack(tree: Any, path: str, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, f"{path}[{i}]", tensors) for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: _unpack(item, f"{path}[{key!r}]", tensors) for key, item in tree.items()}
    kind = tree[TAG]
    if kind == "float":
        return float(tree["value"])
    if kind == "tuple":
        return tuple(_unpack(item, f"{path}[{i}]", tensors) for i, item in enumerate(tree["items"]))
    if kind == "dict":
        return dict(_unpacked_items(tree["items"], path, tensors))
    if kind == "strings":
        return np.array(tree["items"], dtype=tree["dtype"]).reshape(tree["shape"])
    if kind not in ("tensor", "array", "scalar"):
        raise StateValueError(path, f"is of kind {kind!r}, which this version does not know")
    if tree["name"] not in tensors:
        raise StateValueError(path, f"refers to the tensor {tree['name']!r}, which is not there")
    tensor = tensors[tree["name"]].clone()
    if kind == "tensor":
        return tensor
    array = tensor.numpy()
    return array if kind == "array" else array[()]


def _unpacked_items(items: list[Any], path: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Any, Any]]:
    for key, item in items:
        name = _unpack(key, path, tensors)
        yield name, _unpack(item, f"{path}[{name!r}]", tensors)


def _named(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _accepted() -> str:
    return ", ".join(sorted(_DTYPES))
