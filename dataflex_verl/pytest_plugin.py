"""Fixtures for tests of plugins.

pytest imports this module in every run of an environment in which the package is installed, whatever is tested there.
So it stands in a package whose import costs nothing (``dataflex_hooks`` imports torch), and imports the kit when a test
asks for it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def _kit() -> ModuleType:
    import dataflex_hooks.testing

    return dataflex_hooks.testing


@pytest.fixture
def dataflex_testing() -> ModuleType:
    """The kit, :mod:`dataflex_hooks.testing`: ``dataflex_testing.make_groups([1, 0])``, ``random_batch()``, ..."""
    return _kit()


@pytest.fixture
def run_hooks() -> Any:
    """:func:`dataflex_hooks.testing.run_hooks`."""
    return _kit().run_hooks


@pytest.fixture
def assert_plugin_contract() -> Any:
    """:func:`dataflex_hooks.testing.assert_plugin_contract`."""
    return _kit().assert_plugin_contract
