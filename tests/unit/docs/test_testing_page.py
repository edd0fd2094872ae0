"""docs/plugins/testing.md: its assertions run with the other documents' code; here what it says about the kit."""

from __future__ import annotations

import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dataflex_hooks as df
from dataflex_hooks.testing import PROPERTIES, ContractError, Outcome, assert_plugin_contract
from tests.unit.docs.snippets import ROOT, blocks

PAGE = "docs/plugins/testing.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


class KeepShort:
    provides = {"mask"}

    def __init__(self, longest: int = 256) -> None:
        self.longest = longest

    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(mask=batch.lengths <= self.longest, reason="too_long")


def test_short_responses_are_kept(dataflex_testing, run_hooks, assert_plugin_contract):
    batch = dataflex_testing.make_groups([1.0, 0.0], lengths=[[3, 5]])
    assert run_hooks(KeepShort(longest=4), batch).kept_rows == [0]
    assert_plugin_contract(lambda: KeepShort(longest=4))


class ByPosition:
    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(mask=torch.arange(batch.bs) < batch.bs // 2)


def test_the_shown_failure_is_what_the_check_says() -> None:
    with pytest.raises(ContractError) as caught:
        assert_plugin_contract(ByPosition)
    (shown,) = blocks(PAGE, "text")
    assert shown.text == f"{caught.value}\n"


def test_all_properties_and_attributes_are_explained() -> None:
    def named(head: str) -> list[str]:
        table = TEXT.split(f"\n| {head} |")[1].split("\n\n")[0]
        return [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)", line.split("|")[1])]

    assert named("property") == list(PROPERTIES)
    outcome = {field.name for field in fields(Outcome)} | {"kept_rows"}
    assert outcome - set(named("attribute")) == {"excluded"}


CHECKED: dict[str, dict[str, Any]] = {
    "KeepShort": {"plugin": lambda shown: lambda: shown.KeepShort(longest=4)},
    "Confident": {},
    # No response of the kit's is without a token of the model's own, and no reward is above 1.
    "DropEmpty": {"skip": ("acts",)},
    "Clip": {"skip": ("acts",)},
    "PayForBrevity": {},
    "SkipLongPrompts": {"columns": {"prompt_length": [10, 4000]}},
    "Uniform": {},
    "MaskSome": {"plugin": lambda shown: lambda: shown.MaskSome(share=0.5)},
}


@pytest.fixture
def shown(registry: Any) -> SimpleNamespace:
    names: dict[str, Any] = {"__name__": "shown"}
    exec("\n\n".join(block.text for block in blocks("docs/plugins/writing.md", "python")), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("name", CHECKED)
def test_the_plugins_of_the_writing_page_keep_the_contract(name: str, shown: SimpleNamespace) -> None:
    arguments = dict(CHECKED[name])
    make = arguments.pop("plugin", lambda shown: getattr(shown, name))
    assert_plugin_contract(make(shown), **arguments)


def test_every_plugin_of_the_writing_page_is_among_them(shown: SimpleNamespace) -> None:
    hooks = df.hookspecs.HOOKS
    plugins = {name for name, value in vars(shown).items() if isinstance(value, type) and set(hooks) & set(vars(value))}
    assert plugins == set(CHECKED)
