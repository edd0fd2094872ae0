"""Whole runs in which proportions reach the prompts that are generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.real.conftest import base_overrides
from tests.real.harness import compose_config
from tests.real.runs import train

pytestmark = pytest.mark.real


def overrides(demo, mixer, *more):
    return [
        *base_overrides(demo),
        "trainer.v1.trainer_mode=dataflex_sync",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        f"+dataflex.plugins.mix.actuator={mixer}",
        *more,
    ]


class Prompts:
    """Counts what is submitted, from the prompts themselves, and what was in force at that moment."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.domains: list[str] = []
        self.sources: list[str] = []
        self.in_force: list[Any] = []

    def look(self, trainer: Any) -> None:
        if self.rows:
            return
        submit = trainer._submit_batch_to_rollout

        def counted(batch):
            self.rows += [int(getattr(row, "data", row)) for row in batch["dataflex_row"]]
            self.domains += [str(getattr(name, "data", name)) for name in batch["dataflex_domain"]]
            self.sources += [str(getattr(name, "data", name)) for name in batch["data_source"]]
            self.in_force += [trainer.mixing.sampler.proportions] * len(batch)
            return submit(batch)

        trainer._submit_batch_to_rollout = counted

    def worst(self, names) -> float:
        """Largest distance between realised and target counts at any prompt, in prompts."""
        realised = np.cumsum([[domain == name for name in names] for domain in self.domains], axis=0)
        return float(np.abs(realised - np.cumsum(self.in_force, axis=0)).max())


STATIC = "{name:static,params:{proportions:{add:0.7,middle:0.2,sort:0.1},domains:[add,middle,sort]}}"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="sync"),
        pytest.param(("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"), id="filter"),
        pytest.param(("trainer.v1.trainer_mode=dataflex_colocate_async",), id="colocate_async"),
    ],
)
def test_static_proportions_reach_the_prompts(ray_session, demo, more):
    prompts = Prompts()
    run = train(compose_config(overrides(demo, STATIC, "trainer.total_training_steps=4", *more)), prompts.look)
    names = run.trainer.mixing.domains
    assert names == ("add", "middle", "sort")
    assert len(prompts.rows) >= 32
    assert prompts.domains == prompts.sources
    assert prompts.worst(names) < len(names)
    assert prompts.in_force[0] == pytest.approx([0.7, 0.2, 0.1])
    for metrics in run.metrics:
        assert sum(metrics[f"dataflex/trained_{name}"] for name in names) == pytest.approx(1)
    print({key: value for key, value in run.metrics[-1].items() if key.startswith("dataflex")})


def test_every_target_is_the_mixers_on_the_logged_statistics(ray_session, demo):
    prompts = Prompts()
    mixer = "{name:reward_gap,params:{temperature:0.3,window:2}}"
    more = ["trainer.total_training_steps=4", "+dataflex.plugins.mix.scorer=reward_difficulty"]
    run = train(compose_config(overrides(demo, mixer, *more)), prompts.look)
    names = run.trainer.mixing.domains
    sums = []
    for step, metrics in enumerate(run.metrics):
        counts = [metrics[f"dataflex/responses_{name}"] for name in names]
        sums.append(
            [[metrics.get(f"dataflex/reward_{name}", 0.0) * n, n] for name, n in zip(names, counts, strict=True)]
        )
        total = np.array(sums[-2:]).sum(axis=0)
        mean = total[:, 0] / total[:, 1]
        q = np.exp((mean.max() - mean) / 0.3)
        target = 0.05 + 0.85 * q / q.sum()
        assert [metrics[f"dataflex/proposed_{name}"] for name in names] == pytest.approx(target, abs=1e-6)
        if step:
            of_step = prompts.in_force[8 * step]
            before = [run.metrics[step - 1][f"dataflex/proposed_{name}"] for name in names]
            assert of_step == pytest.approx(before, abs=1e-6)
    assert prompts.worst(names) < len(names)
    assert len({tuple(shares) for shares in prompts.in_force}) == 4


def test_a_resumed_run_fetches_the_same_prompts(ray_session, demo, tmp_path):
    mixer = "{name:tscl,params:{temperature:0.02}}"
    score = "+dataflex.plugins.mix.scorer=reward_difficulty"
    where = (f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=2", score, "trainer.resume_mode=auto")
    whole, first, second = Prompts(), Prompts(), Prompts()
    plain = overrides(demo, mixer, score, "trainer.total_training_steps=4")
    train(compose_config(plain), whole.look)
    train(compose_config(overrides(demo, mixer, *where, "trainer.total_training_steps=2")), first.look)
    train(compose_config(overrides(demo, mixer, *where, "trainer.total_training_steps=4")), second.look)
    assert first.rows == whole.rows[:16]
    assert [shares.tolist() for shares in first.in_force] == [shares.tolist() for shares in whole.in_force[:16]]
    # Proportions after step 2 were set before the checkpoint was written.
    assert second.rows[:8] == whole.rows[16:24]
    assert second.in_force[0].tolist() == whole.in_force[16].tolist()
