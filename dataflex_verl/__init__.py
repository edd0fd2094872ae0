"""The verl side of DataFlex hooks. Importing this package imports neither verl nor Ray, nor torch."""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    # dataflex_hooks imports torch, which takes seconds; the command line's help and its fork server cannot wait for it.
    if name == "__version__":
        from dataflex_hooks._version import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
