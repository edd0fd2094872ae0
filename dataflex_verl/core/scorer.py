"""The base class of scorers."""

from dataflex_hooks.components import Scorer

__all__ = ["Scorer"]
