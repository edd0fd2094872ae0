"""Scales and shifts of rewards reach the stored rewards, the advantages and the gradient of the real trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataflex_hooks import RewardDecision, hookimpl
from tests.real.plugins import ReplaceRewards

pytestmark = pytest.mark.real
FIELDS = ("rm_scores", "advantages")


class Adjust:
    """Gives scales and shifts made by ``make(batch)``."""

    provides = {"reward_scale", "reward_shift"}

    def __init__(self, make: Any) -> None:
        self.make = make

    @hookimpl
    def post_reward(self, batch: Any) -> RewardDecision:
        scale, shift = self.make(batch)
        return RewardDecision(scale=scale, shift=shift, metrics={"rows": batch.bs})


def by_length(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return 1.0 + batch.lengths / 4, -0.25 * batch.lengths


def constant(scale: float, shift: float) -> Adjust:
    return Adjust(lambda batch: (torch.full((batch.bs,), scale), torch.full((batch.bs,), shift)))


def test_adjusted_rewards_reach_rewards_advantages_and_gradient(live, stored):
    plain = live.update(stored, fields=FIELDS)
    plugins = {"length": Adjust(by_length), "twice": constant(2.0, 0.5)}
    outcome = live.update(stored, plugins=plugins, fields=FIELDS)
    groups: dict[str, list[tuple[float, float]]] = {}
    for key, before in plain.of("rm_scores").items():
        after = outcome.of("rm_scores")[key]
        expected = float(before.sum()) * 2.0 * (1.0 + len(before) / 4) + 0.5 - 0.25 * len(before)
        assert float(after.sum()) == pytest.approx(expected, rel=1e-6)
        assert not after[:-1].any()
        groups.setdefault(key.rsplit("_", 2)[0], []).append((expected, float(outcome.of("advantages")[key][0])))
    for rows in groups.values():
        rewards = torch.tensor([reward for reward, _ in rows])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        torch.testing.assert_close(torch.tensor([a for _, a in rows]), expected, rtol=1e-4, atol=1e-5)
    assert outcome.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)
    assert outcome.metrics["dataflex/twice/reward_scale"] == 2.0
    assert outcome.metrics["dataflex/length/rows"] == len(stored.keys)


def test_the_order_of_owner_and_adjusters_changes_no_bit(live, stored):
    plugins = {"owner": ReplaceRewards(), "length": Adjust(by_length), "third": constant(1 / 3, 0.1)}
    one = live.update(stored, plugins=plugins, fields=FIELDS)
    other = live.update(stored, plugins=dict(reversed(plugins.items())), fields=FIELDS)
    assert all(torch.equal(value, other.of("rm_scores")[key]) for key, value in one.of("rm_scores").items())
    assert one.grad_norm == other.grad_norm
    for value in one.of("rm_scores").values():
        n = len(value)
        assert float(value.sum()) == pytest.approx(n * (1.0 + n / 4) / 3 - 0.25 * n + 0.1, rel=1e-6)


def test_a_neutral_adjustment_changes_no_bit(live, stored):
    plain = live.update(stored, fields=FIELDS)
    neutral = live.update(stored, plugins={"neutral": constant(1.0, 0.0)}, fields=FIELDS)
    for name in FIELDS:
        assert all(torch.equal(value, neutral.of(name)[key]) for key, value in plain.of(name).items())
    assert neutral.grad_norm == plain.grad_norm
    assert neutral.metrics["dataflex/reward_adjustment"] == 0.0


def test_a_constant_shift_leaves_group_advantages_where_they_are(live, stored):
    """What commutes with the group's baseline is seen to commute: only the scores move."""
    plain = live.update(stored, fields=FIELDS)
    shifted = live.update(stored, plugins={"shift": constant(1.0, 5.0)}, fields=FIELDS)
    assert shifted.metrics["dataflex/reward_adjustment"] == pytest.approx(5.0, rel=1e-6)
    assert shifted.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    for key, value in plain.of("rm_scores").items():
        assert float(shifted.of("rm_scores")[key].sum()) == pytest.approx(float(value.sum()) + 5.0)


def test_shadow_mode_leaves_rewards_alone(live, stored):
    plain = live.update(stored, fields=FIELDS)
    shadow = live.update(stored, {"apply": False}, plugins={"twice": constant(2.0, 1.0)}, fields=FIELDS)
    assert all(torch.equal(value, shadow.of("rm_scores")[key]) for key, value in plain.of("rm_scores").items())
    assert shadow.metrics["dataflex/reward_adjustment"] != 0.0
