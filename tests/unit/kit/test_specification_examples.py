"""The example in each hook's contract works as written."""

from __future__ import annotations

import inspect
import textwrap

import numpy as np
import pytest
import torch

import dataflex_hooks
from dataflex_hooks import hookspecs
from dataflex_hooks.testing import make_groups, make_prompts, make_stats, run_hooks


@pytest.fixture
def example(request: pytest.FixtureRequest):
    text = inspect.getdoc(getattr(hookspecs, request.param))
    code = textwrap.dedent(text.split("Example::")[1].split("Since:")[0])
    names = {**vars(dataflex_hooks), "torch": torch}
    exec(code, names)
    (plugin,) = [value for name, value in names.items() if isinstance(value, type) and f"class {name}" in code]
    return plugin()


@pytest.mark.parametrize("example", ["pre_rollout"], indirect=True)
def test_long_prompts_are_skipped(example):
    prompts = make_prompts(2, columns={"prompt_length": [10, 4096]})
    assert run_hooks(example, prompts=prompts).admitted.tolist() == [True, False]


@pytest.mark.parametrize("example", ["post_reward"], indirect=True)
def test_rewards_are_halved(example):
    assert run_hooks(example, make_groups([1, 0])).rewards.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("example", ["post_advantage"], indirect=True)
def test_the_unrewarded_are_masked(example):
    assert run_hooks(example, make_groups([1, 0])).kept.tolist() == [True, False]


@pytest.mark.parametrize("example", ["on_domain_stats"], indirect=True)
def test_proportions_are_uniform(example):
    stats = make_stats(("a", "b", "c"), proportions=[0.8, 0.1, 0.1])
    assert np.allclose(run_hooks(example, stats=stats).proportions, 1 / 3)
