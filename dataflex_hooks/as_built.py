"""What a plugin or component was built with, for the plan."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from inspect import getattr_static
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

HIDDEN = "***"
"""What the plan has in the place of a secret."""
_SECRET = re.compile(
    r"(^|_)(api_?key|(access|private|secret)_key|secret|password|passwd|credentials?|authorization"
    r"|(access|api|auth|bearer|hf)_token)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class AsBuilt:
    """How a component was built.

    Attributes:
        cls: its class, ``module:Class``.
        params: its parameters as :func:`effective` gives them; a schedule is the mapping that was configured.
        distribution, version: what its class comes from; None where that is no installed plugin package.
    """

    cls: str
    params: Mapping[str, object] = field(default_factory=dict)
    distribution: str | None = None
    version: str | None = None

    def describe(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {
            "class": self.cls,
            "distribution": self.distribution,
            "version": self.version,
            "params": plain(self.params),
        }


def effective(
    defaults: Mapping[str, object],
    keywords: Mapping[str, object],
    offered: Mapping[str, object],
    kept: Mapping[str, object],
) -> dict[str, object]:
    """Return the parameters in force: as configured, else as the host gives them, else the default.

    Where that is None, which often stands for a value that the constructor works out (as long as the longest response,
    as many as there are rollouts), it is what the object keeps under the name, if that is a number or a word.

    Args:
        defaults: of every parameter, in order; None for one without.
        keywords: what was configured.
        offered: what the host gives to parameters that were not.
        kept: attributes of the object that was built.

    Returns:
        Values by name; what is nothing (None, an empty text or collection) is left out.
    """
    given = {**defaults, **{name: value for name, value in offered.items() if name in defaults}, **keywords}
    made = {name: kept[name] for name, value in given.items() if value is None and _is_scalar(kept.get(name))}
    return {name: value for name, value in {**given, **made}.items() if not _is_nothing(value)}


def _is_scalar(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, np.generic))


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, set, frozenset, Mapping)) and not value)


def plain(value: Any) -> Any:
    """Return a value in the types of YAML: numbers that are not finite as its words, other objects as their type.

    What stands under a name of secrets, such as ``api_key`` or ``password``, is :data:`HIDDEN`: the plan is logged.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        names = {key: key if isinstance(key, (int, str)) else str(key) for key in value}
        return {name: _shown(name, value[key]) for key, name in names.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(entry) for entry in value), key=str)
    if isinstance(value, (PurePath, torch.dtype, torch.device)):
        return str(value)
    # An address in memory differs from run to run.
    cls = type(value) if getattr_static(value, "__qualname__", None) is None else value
    return f"{cls.__module__ or 'builtins'}.{cls.__qualname__}"


def _shown(name: int | str, value: Any) -> Any:
    hides = value is not None and isinstance(name, str) and _SECRET.search(name)
    return HIDDEN if hides else plain(value)
