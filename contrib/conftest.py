"""Tests of a package here run against the package as installed: by the user, or else its wheel, built when needed.

The wheels are on the path only while such a test is collected or runs: installed is not active, but it is listed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from tests.wheels import CONTRIB, contrib_site


@contextmanager
def _package_installed(test: Path) -> Iterator[None]:
    if not test.is_relative_to(CONTRIB) or _is_installed(test.relative_to(CONTRIB).parts[0]):
        yield
        return
    with contrib_site().on_path():
        yield


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    if not isinstance(collector, pytest.Module):
        return (yield)
    with ExitStack() as stack:
        try:
            stack.enter_context(_package_installed(collector.path))
        except RuntimeError as error:  # a wheel cannot be built: these tests fail, not the session
            yield
            return pytest.CollectReport(collector.nodeid, "failed", str(error), [])
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with _package_installed(item.path):
        return (yield)
