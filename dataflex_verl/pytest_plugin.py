"""Fixtures for tests of plugins.

pytest imports this module in every run of an environment in which the package is installed, whatever is tested there.
So it stands in a package whose import costs nothing (``dataflex_hooks`` imports torch), and imports the kit when a test
asks for it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def dataflex() -> ModuleType:
    """The kit, :mod:`dataflex_hooks.testing`: ``dataflex.make_groups([1, 0])``, ``dataflex.random_batch()``, ..."""
    import dataflex_hooks.testing

    return dataflex_hooks.testing


@pytest.fixture(scope="session")
def run_hooks(dataflex: ModuleType) -> Any:
    """:func:`dataflex_hooks.testing.run_hooks`."""
    return dataflex.run_hooks


@pytest.fixture(scope="session")
def assert_plugin_contract(dataflex: ModuleType) -> Any:
    """:func:`dataflex_hooks.testing.assert_plugin_contract`."""
    return dataflex.assert_plugin_contract
