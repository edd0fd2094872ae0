"""The verl side of DataFlex hooks. Importing this package imports neither verl nor Ray."""

from dataflex_hooks._version import __version__

__all__ = ["__version__"]
