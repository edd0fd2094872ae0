"""What a route does to rewards, and how it is read from the configuration."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dataflex_hooks import Problem


@dataclass(frozen=True)
class Route:
    """Adjustment of the reward of a response.

    Attributes:
        scale, shift: reward * scale + shift.
        length_penalty: taken off for every valid token beyond ``free_length``.
        free_length: tokens that cost nothing.
        clip: least and most that the result may be, None for no bounds.
    """

    scale: float = 1.0
    shift: float = 0.0
    length_penalty: float = 0.0
    free_length: int = 0
    clip: tuple[float, float] | None = None


_KEYS = tuple(field.name for field in fields(Route))
_ACCEPTED = f"one of {', '.join(sorted(_KEYS))}"


def read_route(path: str, given: Any, problems: list[Problem]) -> Route:
    """Read one route; what is wrong with it is added to ``problems`` under ``path``."""
    if not isinstance(given, Mapping):
        problems.append(Problem(path, given, f"a mapping with keys out of {', '.join(sorted(_KEYS))}"))
        return Route()
    values: dict[str, Any] = {}
    for key, value in given.items():
        setting = f"{path}.{key}"
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, n=1)
            problems.append(Problem(setting, value, _ACCEPTED, f"did you mean {close[0]!r}?" if close else None))
        elif key == "clip":
            if _is_clip(value):
                values[key] = None if value is None else (float(value[0]), float(value[1]))
            else:
                problems.append(Problem(setting, value, "[low, high] with low <= high, or null"))
        elif key == "free_length" and not (_is_number(value) and value >= 0 and value == int(value)):
            problems.append(Problem(setting, value, "a number of tokens >= 0"))
        elif not _is_number(value):
            problems.append(Problem(setting, value, "a finite number"))
        else:
            values[key] = value
    return Route(**values)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_clip(value: Any) -> bool:
    if value is None:
        return True
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        return False
    return _is_number(value[0]) and _is_number(value[1]) and value[0] <= value[1]
