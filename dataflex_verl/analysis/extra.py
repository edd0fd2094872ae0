"""Libraries of the optional extra ``analysis``, imported where they are used."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

EXTRA = "analysis"


class MissingLibrary(Exception):
    """A library of the extra is not installed; the text says how to get it."""


def library(name: str) -> ModuleType:
    """Import ``name``, a module of one of the extra's libraries.

    Raises:
        MissingLibrary: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        top = name.split(".")[0]
        if error.name is None or error.name.split(".")[0] != top:
            raise
        raise MissingLibrary(f"this needs {top}: pip install 'dataflex-verl[{EXTRA}]'") from error
