"""It is the README's plugin word by word, masks what is too long, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import dataflex_example
import pytest
import torch
from dataflex_example import KeepShort

from dataflex_hooks import HookManager, LossCoefficients, PluginError
from dataflex_hooks.testing import assert_plugin_contract, make_context, make_groups, run_hooks

README = Path(__file__).parents[3] / "README.md"


def test_the_module_is_the_block_of_the_readme_word_by_word() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert [block for block in blocks if "class KeepShort" in block] == [inspect.getsource(dataflex_example)]


def test_responses_longer_than_the_limit_are_masked() -> None:
    batch = make_groups([1, 0], [1], lengths=[[2, 4], 3])
    outcome = run_hooks(KeepShort(longest=3), batch)
    assert outcome.kept.tolist() == [True, False, True]
    assert outcome.row_weights.tolist() == [1.0, 0.0, 1.0]


def test_with_room_for_all_nothing_changes() -> None:
    outcome = run_hooks(KeepShort(), make_groups([1, 0], [1], lengths=256))
    assert torch.equal(outcome.weights, torch.ones_like(outcome.weights))


def test_it_keeps_the_contract() -> None:
    assert_plugin_contract(lambda: KeepShort(longest=5))


def test_an_error_of_it_names_the_installed_package() -> None:
    block = {"plugins": {"example": {"longest": "many"}}}
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    with pytest.raises(PluginError, match=r"plugin 'example' \(dataflex-example 0\.1\.0\) in post_advantage at step 7"):
        manager.post_advantage(make_groups([1]), make_context(7), LossCoefficients("token"))
