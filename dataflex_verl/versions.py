"""Versions of what a run depends on."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("dataflex-verl", "verl", "torch", "ray", "transformers", "TransferQueue", "numpy")


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a training runs on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
