"""Aligned columns of text, for lists that people read and scripts cut."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out ``rows`` under ``head``; the last column is not padded."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)
