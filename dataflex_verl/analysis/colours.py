"""Colours that readers with any kind of colour vision tell apart, and dashes for more runs than colours.

Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), its yellow last: it is faint on white.
"""

from __future__ import annotations

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def dash(index: int) -> str:
    """A dash for the ``index``-th round through the palette."""
    return DASHES[index % len(DASHES)]
