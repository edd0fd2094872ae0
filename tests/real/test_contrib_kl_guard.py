"""The guard on the real trainer: how far parameters move over several updates, on verl's own metric."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataflex_hooks import UpdateDecision
from tests.real.plugins import Decide
from tests.wheels import contrib_site

pytestmark = pytest.mark.real

UPDATES = 6
METRIC = "actor/kl_loss"
LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl"}


@pytest.fixture(scope="module")
def guard():
    with contrib_site().on_path():
        from dataflex_kl_guard import KLGuard

        yield KLGuard


@pytest.fixture(scope="module")
def moves(live, stored):
    """Make updates one after another from the first weights; how far parameters moved in each, and the metrics."""
    trainer = live.trainer
    trainer.use_reference_policy = live.has_reference

    def run(plugin: Any, updates: int = UPDATES) -> tuple[list[float], list[dict[str, Any]]]:
        moved, metrics = [], []
        trainer._last_metrics = {}
        for step in range(1, updates + 1):
            before = parameters(live) if step > 1 else None
            outcome = live.update(stored, plugins={"guard": plugin}, step=step, keep_weights=step > 1, loss=LOSS)
            if before is not None:
                moved.append(float((parameters(live) - before).norm()))
            trainer._last_metrics = outcome.metrics
            metrics.append(outcome.metrics)
        return moved, metrics

    yield run
    trainer.use_reference_policy = False
    trainer._last_metrics = {}


def parameters(live: Any) -> torch.Tensor:
    path = live.checkpoint / "look"
    live.trainer.actor_rollout_wg.save_checkpoint(str(path), None, 0)
    (file,) = path.rglob("model_*.pt")
    tensors = torch.load(file, weights_only=False).values()
    return torch.cat([getattr(t, "to_local", lambda t=t: t)().double().flatten() for t in tensors])


@pytest.fixture(scope="module")
def free(moves):
    return moves(Decide(lambda batch: None))


def test_the_kl_of_the_trainer_rises_and_the_guard_sees_it(moves, guard, free):
    _, metrics = free
    kl = [step[METRIC] for step in metrics]
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[-1] > kl[1] > 0
    _, seen = moves(guard(metric=METRIC, high=1e9, low=1e8), updates=3)
    assert [step["dataflex/guard/engaged"] for step in seen] == [0.0] * 3
    assert [step["dataflex/guard/kl"] for step in seen[1:]] == pytest.approx(kl[:2], rel=1e-3, abs=1e-7)


@pytest.mark.nightly
def test_scaling_damps_how_far_parameters_move(moves, guard, free):
    high = (free[1][0][METRIC] + free[1][1][METRIC]) / 2
    moved, metrics = moves(guard(metric=METRIC, high=high, low=0.0, scale=0.01))
    assert [step["dataflex/guard/engaged"] for step in metrics] == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert moved[0] == pytest.approx(free[0][0], rel=1e-4)
    ratios = [one / other for one, other in zip(moved[1:], free[0][1:], strict=True)]
    assert ratios == pytest.approx([0.82, 0.69, 0.60, 0.53], abs=0.1)  # the figures of the README
    assert ratios[-1] < 0.7 and sum(moved[1:]) < 0.8 * sum(free[0][1:])


@pytest.mark.nightly
def test_a_constant_scale_cancels_which_is_why_the_guard_has_to_change(moves, free):
    moved, _ = moves(Decide(lambda batch: UpdateDecision(update_scale=0.01)), updates=4)
    assert moved == pytest.approx(free[0][:3], rel=0.2)


def test_skipping_moves_nothing_and_lets_one_update_through(moves, guard, free):
    high = (free[1][0][METRIC] + free[1][1][METRIC]) / 2
    moved, metrics = moves(guard(metric=METRIC, high=high, low=0.0, action="skip"), updates=5)
    assert [step["dataflex/skip_update"] for step in metrics] == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert [distance == 0.0 for distance in moved] == [False, True, False, True]
