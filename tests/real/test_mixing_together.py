"""Select, reweight and mix in one run; the mixer is somebody else's, from an installed wheel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.harness import compose_config
from tests.real.plugins import ScriptRewards
from tests.real.prompts import CHEAP, Prompts, Updates, mixing, overrides
from tests.real.runs import Run, train
from tests.unit.contract.acme_package import installed

pytestmark = pytest.mark.real

NAMES, FLOOR, LIMIT = ("add", "middle", "sort"), 0.1, 0.4


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """pip has installed the wheel for this module: only the trainer's process, this one, runs hooks."""
    with installed(tmp_path_factory.mktemp("acme")) as site:
        yield site


once = pytest.mark.xdist_group("mixing_together")  # one run serves all tests of it


@pytest.fixture(scope="module")
def together(ray_session, demo, acme) -> tuple[Run, Prompts, Updates]:
    """Four steps in which rewards are scripted, low ones masked, and rollouts weighed by their advantage."""
    return run_together(demo, "dataflex_sync", 4)


def run_together(demo: Any, mode: str, steps: int) -> tuple[Run, Prompts, Updates]:
    prompts, updates = Prompts(), Updates()

    def look(trainer: Any) -> None:
        prompts.look(trainer)
        updates.look(trainer)

    band = f"{{name:threshold_band,params:{{low:{LIMIT},high:9.0}}}}"
    more = [
        "+dataflex.plugins.script.plugin=tests.real.plugins:ScriptRewards",
        f"+dataflex.plugins.band={{plugin:select,scorer:reward_difficulty,actuator:{band}}}",
        "+dataflex.plugins.per={plugin:reweight,scorer:advantage_magnitude,actuator:per_advantage}",
        *mixing(f"{{name:acme_inverse,params:{{floor:{FLOOR},window:1}}}}", "reward_difficulty"),
        *CHEAP,
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"trainer.total_training_steps={steps}",
        f"trainer.v1.trainer_mode={mode}",
    ]
    return train(compose_config(overrides(demo, *more)), look), prompts, updates


@once
def test_a_mixer_from_somebody_elses_wheel_steers_the_run(together, acme):
    run, prompts, _ = together
    mixer = run.trainer.hooks._entries["mix"].plugin.actuator
    assert type(mixer).__module__ == "acme_dataflex.components"
    assert str(acme) in str(sys.modules["acme_dataflex.components"].__file__)
    targets = []
    for step, metrics in enumerate(run.metrics, start=1):
        raw = [1 / (1 + metrics.get(f"dataflex/reward_{name}", 0.0)) for name in NAMES]
        expected = [FLOOR + (1 - 3 * FLOOR) * value / sum(raw) for value in raw]
        targets.append([metrics[f"dataflex/proposed_{name}"] for name in NAMES])
        assert targets[-1] == pytest.approx(expected, abs=1e-6)
        for shares in prompts.in_force[6 * step : 6 * (step + 1)]:
            assert shares == pytest.approx(expected, abs=1e-6)
    assert len({tuple(target) for target in targets}) == 4
    assert prompts.domains == prompts.sources and prompts.worst(NAMES) < len(NAMES)


@once
def test_select_masks_and_reweight_weighs_in_the_same_run(together):
    run, _, updates = together
    assert len(updates.steps) == 4
    masked_and_weighed(run, updates)


def test_all_three_act_in_colocate_async(ray_session, demo, acme):
    """Prompts are fetched ahead there, so a target acts on those fetched after it; masks and weights act at once."""
    run, prompts, updates = run_together(demo, "dataflex_colocate_async", 3)
    assert type(run.trainer).__name__ == "DataFlexColocateAsync" and len(updates.steps) == 3
    masked_and_weighed(run, updates)
    targets = {tuple(metrics[f"dataflex/proposed_{name}"] for name in NAMES) for metrics in run.metrics}
    assert len(targets) == 3 and len({tuple(shares) for shares in prompts.in_force}) >= 3
    assert prompts.worst(NAMES) < len(NAMES)


def masked_and_weighed(run: Run, updates: Updates) -> None:
    for rows, metrics in zip(updates.steps, run.metrics, strict=True):
        masked = [weight for reward, weight, _ in rows if reward <= LIMIT]
        kept = [weight for reward, weight, _ in rows if reward > LIMIT]
        tokens = [number for reward, _, number in rows if reward > LIMIT]
        assert masked and set(masked) == {0.0}
        assert min(kept) > 0 and max(kept) > 1.2 * min(kept)
        # Weights average 1 over the tokens that are kept.
        total = sum(weight * number for weight, number in zip(kept, tokens, strict=True))
        assert total / sum(tokens) == pytest.approx(1, abs=1e-5)
        assert metrics["dataflex/band/kept_frac"] == pytest.approx(len(kept) / len(rows))


@once
def test_each_of_the_three_has_its_metrics(together):
    run, _, _ = together
    for metrics in run.metrics:
        assert 0 < metrics["dataflex/band/kept_frac"] < 1
        assert metrics["dataflex/per/weight_mean"] > 0
        for name in NAMES:
            assert {f"dataflex/{key}_{name}" for key in ("prop", "proposed", "generated", "trained")} <= metrics.keys()
        # The script owns the rewards, and statistics see the rewards that apply.
        level, slope, _ = ScriptRewards.SCRIPT["add"]
        assert metrics["dataflex/reward_add"] == pytest.approx(level, abs=1e-6) and slope == 0.0
        assert metrics["dataflex/applied"] == 1.0
