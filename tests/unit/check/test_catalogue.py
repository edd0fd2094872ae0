"""The catalogue of errors in the docs is what the code says today."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflex_verl.catalogue import SECTIONS, lines, messages

ENTRIES = [entry for entries in SECTIONS.values() for entry in entries]
DOCUMENT = Path(__file__).parents[3] / "docs" / "errors.md"

pytestmark = pytest.mark.xdist_group("catalogue")  # all messages are made once


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    return {entry.title: messages(entry) for entry in ENTRIES}


def test_the_document_is_generated_from_the_code(said) -> None:
    generated = list(lines(lambda entry: said[entry.title]))
    assert DOCUMENT.read_text(encoding="utf-8").splitlines() == generated


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title.replace(" ", "_"))
def test_an_example_shows_its_own_error_alone(said, entry) -> None:
    assert len(said[entry.title]) == 1
    assert entry.cause.endswith(".") and entry.cure.endswith(".")
