"""The plan's lines below a plugin's own: its parameters in force, those of its scorer and actuator, their packages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 110
"""How long these lines may be, in characters, unless one parameter alone is longer."""
_LONGEST = 80
_BARE = r"[\w./:@%+-]+"


def part_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a row of ``HookManager.plan()``, indented.

    Of a plugin that is made of a scorer and an actuator only those parameters of its own are shown that were
    configured; its line says the rest in words. A component's package is named where it is not the plugin's.
    """
    own = row["params"]
    if row["components"]:
        own = {name: value for name, value in own.items() if name in row["keywords"]}
    if own:
        yield from _wrapped("parameters:", [f"{name}={shown(value)}" for name, value in own.items()])
    for role, built in row["components"].items():
        source = _source(built, row["distribution"])
        shapes = built["schedules"]
        params = [f"{name}={_parameter(value, shapes.get(name))}" for name, value in built["params"].items()]
        if source or params:
            yield from _wrapped(f"{role} {built['name']}{source}{':' if params else ''}", params)


def shown(value: Any) -> str:
    """Return a value as one would write it in the configuration, cut where it is long."""
    text = _yaml(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _parameter(value: Any, shape: str | None) -> str:
    """A component's parameter; a schedule has its shape before its knots, ``linear{0: 1.0, 100: 0.5}``."""
    return shown(value) if shape is None else f"{shape}{shown(value.get('at', value))}"


def _source(built: Mapping[str, Any], distribution: str | None) -> str:
    if built["distribution"] == distribution:
        return ""
    if built["distribution"]:
        return f" ({built['distribution']} {built['version']})"
    return "" if built["name"] == built["class"] else f" ({built['class']})"


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_yaml(key)}: {_yaml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str) and not re.fullmatch(_BARE, value):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _wrapped(head: str, items: Sequence[str]) -> Iterator[str]:
    """Lines of at most WIDTH characters, broken between items."""
    line = f"  {head}"
    for place, item in enumerate(items, start=1):
        piece = item if place == len(items) else f"{item},"
        if len(line) + 1 + len(piece) > WIDTH and place > 1:
            yield line
            line = f"    {piece}"
        else:
            line = f"{line} {piece}"
    yield line
