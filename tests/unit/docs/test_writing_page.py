"""The plugins of docs/plugins/writing.md do what the page says, each beside a case in which they do not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dataflex_hooks as dh
from dataflex_hooks.plugins.mechanism import LATE_FIELDS
from dataflex_hooks.testing import random_batch
from dataflex_hooks.testing.rebuild import only_fields
from tests.unit.docs.snippets import ROOT, blocks

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def shown(registry: Any) -> SimpleNamespace:
    names: dict[str, Any] = {"__name__": "shown"}
    exec("\n\n".join(block.text for block in blocks("docs/plugins/writing.md", "python")), names)
    return SimpleNamespace(**names)


def manager(**plugins: object) -> dh.HookManager:
    return dh.HookManager.from_config(None, estimator="grpo", has_groups=True, extra_plugins=plugins)


TEXT = (ROOT / "docs" / "plugins" / "writing.md").read_text(encoding="utf-8")
BATCH = random_batch(1, groups=4, sessions=3, outputs=3, tool_share=0.3)
SIZES = {"bs": BATCH.bs, "bs + 1": BATCH.bs + 1, "T": BATCH.n_tokens, "n_sessions": BATCH.n_sessions}


def attributes(columns: int) -> dict[str, list[str]]:
    """Of the table of attributes with so many columns, the cells behind each name."""
    (table,) = re.findall(
        rf"^\| attribute (?:\|[^|\n]*){{{columns - 1}}}\|\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: cells[1:] for cells in rows for name in re.findall(r"`(\w+)`", cells[0])}


def public(view: object) -> set[str]:
    return {name for name in dir(view) if not name.startswith("_") and not callable(getattr(view, name))}


def kind_of(value: object) -> str:
    """Type of a value as the table says it."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        names = {size: name for name, size in SIZES.items()}
        return f"({', '.join(names[size] for size in value.shape)},) {str(value.dtype).removeprefix('torch.')}"
    return "Mapping" if isinstance(value, Mapping) else type(value).__name__


def test_the_tables_have_every_public_attribute_with_its_type() -> None:
    assert len(set(SIZES.values())) == len(SIZES)
    for view, columns in ((BATCH, 4), (dh.StepContext(step=1), 3)):
        table = attributes(columns)
        assert set(table) == public(view)
        for name, (kind, meaning, *_) in table.items():
            assert kind_of(getattr(view, name)) == kind, name
            assert meaning


def test_what_has_to_be_required_is_not_there_without_and_the_rest_always_is() -> None:
    for name, (_, _, required) in attributes(4).items():
        fields = set(re.findall(r"`(\w+)`", required))
        always = {"response_mask", "rm_scores"}
        assert getattr(only_fields(BATCH, always | fields), name) is not None
        for field in fields:
            with pytest.raises(dh.FieldError):
                getattr(only_fields(BATCH, always | fields - {field}), name)


def test_fields_that_are_not_there_yet_at_post_reward_are_those_of_the_code() -> None:
    (sentence,) = re.findall(r"At `post_reward` nothing is there yet of ([^:.]*)\.", TEXT)
    assert set(re.findall(r"`(\w+)`", sentence)) == LATE_FIELDS - {"token_level_rewards"}


def test_weights_follow_the_probability(shown, batches, ctx, token_mean) -> None:
    rows = [batches.Row(uid="a", log_prob=-0.1), batches.Row(uid="a", session=1, log_prob=-2.1)]
    for power, ratio in ((0.5, np.e), (0.0, 1.0)):
        weights = manager(w=shown.Confident(power)).post_advantage(batches.build(rows), ctx, token_mean).weights
        values = torch.as_tensor(weights).flatten()
        assert float(values[0] / values[-1]) == pytest.approx(ratio, rel=1e-5)
    with pytest.raises(dh.ConfigError, match="power: got -1; accepted: a finite number >= 0"):
        shown.Confident(-1)


def test_empty_responses_leave_and_rewards_are_clipped(shown, batches, ctx) -> None:
    rows = [batches.Row(uid="a", reward=3.0), batches.Row(uid="a", session=1, reward=0.5, mask=0)]
    batch = batches.build(rows)
    assert shown.DropEmpty().post_reward(batch, ctx).keep.tolist() == [True, False]
    assert shown.Clip().post_reward(batch, ctx).rewards.tolist() == [1.0, 0.5]


def test_brevity_is_paid_for(shown, batches, ctx) -> None:
    batch = batches.build([batches.Row(uid="a", length=1), batches.Row(uid="a", session=1, length=4)])
    decision = shown.PayForBrevity(bonus=1.0, longest=2).post_reward(batch, ctx)
    assert decision.shift.tolist() == [0.5, 0.0] and decision.metrics == {"bonus_mean": 0.25}


def test_two_owners_of_the_rewards_are_refused_and_an_adjuster_is_not(shown) -> None:
    with pytest.raises(dh.ConfigError, match="rewards"):
        manager(one=shown.Clip(), two=shown.Clip())
    assert manager(one=shown.Clip(), two=shown.PayForBrevity()).labels == ("one", "two")


def test_long_prompts_are_refused(shown, ctx) -> None:
    candidates = dh.PromptBatch(np.arange(2), None, {"prompt_length": np.array([100, 4000])})
    assert shown.SkipLongPrompts().pre_rollout(candidates, ctx).admit.tolist() == [True, False]


def test_domains_get_equal_shares(shown, ctx) -> None:
    stats = dh.DomainStats(("a", "b", "c", "d"), np.array([5, 1, 0, 2]))
    assert shown.Uniform().on_domain_stats(stats, ctx).proportions.tolist() == [0.25] * 4


def test_the_scorer_measures_the_distance_from_the_groups_mean(shown, batches) -> None:
    batch = batches.groups([1, 0, 0, 0], [1, 1, 1, 1])
    assert shown.Spread().score(batch, 1).tolist() == [0.75, 0.25, 0.25, 0.25, 0, 0, 0, 0]
    assert shown.Spread(power=2.0).score(batch, 1)[0] == 0.75**2


def test_chance_is_the_same_after_a_resume_and_another_in_the_next_step(shown, batches) -> None:
    batch = batches.groups(*[[1, 0]] * 50)
    first, resumed = shown.MaskSome(share=0.5), shown.MaskSome(share=0.5)
    masks = [first.post_advantage(batch, dh.StepContext(step=step)).mask for step in (1, 2)]
    resumed.load_state_dict({"seen": 100})
    again = resumed.post_advantage(batch, dh.StepContext(step=2)).mask
    assert torch.equal(masks[1], again) and not torch.equal(masks[0], again)
    assert resumed.state_dict() == first.state_dict() == {"seen": 200}


def test_each_mistake_that_the_page_lists_is_found(shown) -> None:
    class Undecorated:
        def post_advantage(self, batch, ctx):
            return None

    class Defaulted:
        @dh.hookimpl
        def post_advantage(self, batch, ctx=None):
            return None

    class Unknown:
        provides = {"maks"}

        @dh.hookimpl
        def post_advantage(self, batch, ctx):
            return None

    class HalfState:
        @dh.hookimpl
        def post_advantage(self, batch, ctx):
            return None

        def state_dict(self):
            return {}

    for wrong in (Undecorated(), Defaulted(), shown.KeepShort, Unknown(), HalfState()):
        with pytest.raises(dh.ConfigError):
            manager(wrong=wrong)
    assert manager(right=shown.KeepShort()).labels == ("right",)
