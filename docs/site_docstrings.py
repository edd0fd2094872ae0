"""For Griffe, which reads docstrings: a line ``low, high: text`` describes each of its names, not one of that name."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINE = re.compile(r"^    (\w+(?:, \w+)+): (.*(?:\n {8}.*)*)", re.MULTILINE)


class EachNameByItself(griffe.Extension):
    """Writes the text at the first name and ``likewise`` at the others."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = _LINE.sub(_split, obj.docstring.value)


def _split(line: re.Match[str]) -> str:
    first, *others = line[1].split(", ")
    return "\n".join([f"    {first}: {line[2]}", *(f"    {name}: likewise." for name in others)])
