"""The reference of the configuration is what the code says today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dataflex_hooks.config import _TOP
from dataflex_verl import reference

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_document_is_generated_from_the_code() -> None:
    """``python -m dataflex_verl.reference > docs/configuration.md`` brings it up to date."""
    assert DOCUMENT.read_text(encoding="utf-8").splitlines() == list(reference.lines())


def test_every_setting_and_parameter_has_a_type_a_default_and_a_meaning() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \| .*\|$", text, re.MULTILINE)
    assert len(rows) > 80
    assert not [row for row in rows if not all(row)]
    assert set(_TOP) <= {name for name, *_ in rows}


@pytest.mark.parametrize("kind", ["scorer", "selector", "reweighter", "mixer"])
def test_every_component_of_ours_is_there_with_its_methods(kind: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in reference.built_in(kind):
        (part,) = re.findall(
            rf"^### `{name}`\n((?:(?!^### ).*\n)+)", text.split(f"## {dict(reference.KINDS)[kind]}")[1], re.M
        )
        assert "Used by [" in part
    for page in re.findall(r"\]\((methods/\w+\.md)\)", text):
        assert (DOCUMENT.parent / page).is_file()


def test_what_is_accepted_is_what_the_code_says() -> None:
    assert reference.component_rows("selector", "topk_fraction")["fraction"] == (
        "`0.5`",
        "share to keep, in (0, 1]",
        "number",
        "a finite number > 0 and <= 1",
    )
    assert reference.block()["update_step"][3] == "an integer >= 1"
    assert reference.plugin_rows("select")["effect"][3] == "one of drop, mask"


def test_a_meaning_keeps_a_less_than_sign_out_of_html_and_code_as_it_is() -> None:
    assert reference._flat("o_<t <= ``a<b`` and :class:`~x.Y`.") == "o_&lt;t <= `a<b` and `Y`"
