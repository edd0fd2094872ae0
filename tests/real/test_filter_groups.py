"""verl's own group filter and our drop: verl evicts and refills first, and a drop causes no refill."""

from __future__ import annotations

import pytest
import torch

from dataflex_hooks import RewardDecision, hookimpl
from tests.real.conftest import base_overrides
from tests.real.harness import compose_config
from tests.real.runs import train

pytestmark = pytest.mark.real

SEEN: list[tuple[int, int, float]] = []


class DropHalfFromStepTwo:
    """Drops half of every group from step 2 on; keeps (step, rows, least spread of a group's rewards) in SEEN."""

    provides = {"keep"}
    requires = {"post_reward": ("rm_scores",)}

    @hookimpl
    def post_reward(self, batch, ctx) -> RewardDecision | None:
        solved = batch.per_group((batch.session_rewards > batch.session_rewards.mean()).float())
        SEEN.append((ctx.step, batch.bs, float(torch.minimum(solved, 1 - solved).min())))
        return RewardDecision(keep=batch.session_number < 4) if ctx.step > 1 else None


def test_filtered_groups_are_refilled_before_a_drop_and_not_after(ray_session, demo):
    overrides = [
        *base_overrides(demo),
        "trainer.v1.trainer_mode=dataflex_sync",
        "algorithm.filter_groups.enable=True",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=False",
        f"+dataflex.plugins.half.plugin={__name__}:DropHalfFromStepTwo",
    ]
    submitted: list[int] = []
    SEEN.clear()

    def count(trainer) -> None:
        submit = trainer._submit_batch_to_rollout

        def counting(batch):
            submitted.append(len(batch))
            return submit(batch)

        trainer._submit_batch_to_rollout = counting

    run = train(compose_config(overrides), look=lambda trainer: None if submitted else count(trainer))
    assert [(step, rows) for step, rows, _ in SEEN] == [(1, 32), (2, 32), (3, 32)]
    assert [round(metrics.get("dataflex/dropped_frac", 0.0), 3) for metrics in run.metrics] == [0.0, 0.5, 0.5]
    assert all("actor/grad_norm" in metrics for metrics in run.metrics)
    evicted = sum(metrics.get("training/filter_groups/evicted_samples", 0) for metrics in run.metrics)
    surplus = sum(metrics.get("training/filter_groups/discarded_surplus_samples", 0) for metrics in run.metrics)
    assert evicted > 0
    # Every prompt submitted was trained on, evicted or surplus of verl's own: none was asked for because of a drop.
    assert sum(submitted) == 3 * 4 + evicted + surplus
