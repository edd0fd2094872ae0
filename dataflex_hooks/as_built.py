"""What a plugin or component was built with, for the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    return isinstance(value, (bool, int, float, str))


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, set, frozenset, Mapping)) and not value)


def plain(value: Any) -> Any:
    """Return a value in the types of YAML: numbers that are not finite as its words, other objects as their type."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, (int, str)) else str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(entry) for entry in value), key=str)
    # An address in memory differs from run to run.
    cls = value if hasattr(value, "__qualname__") else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
