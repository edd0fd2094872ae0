"""Whole runs in which proportions reach the prompts that are generated."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.real.harness import compose_config
from tests.real.prompts import CHEAP, Prompts, mixing, overrides
from tests.real.runs import train

pytestmark = pytest.mark.real

# Two domains of the same size, so that by the data alone each would get half of the prompts.
NINE_TO_ONE = [
    "+dataflex.domains=[add,sort]",
    *mixing("{name:static,params:{proportions:{add:0.9,sort:0.1}}}"),
]
MODES = {
    "sync": CHEAP,
    "fetch_size_1": (*CHEAP, "data.gen_batch_size=1"),
    # Untrained rollouts of two tokens would all earn 0 and be filtered for ever.
    "filter_groups": (
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
    ),
    "colocate_async": (*CHEAP, "trainer.v1.trainer_mode=dataflex_colocate_async"),
}
PUBLISHED = (
    "trainer.v1.trainer_mode=dataflex_mix_sync",
    "+trainer.v1.sampler.custom_sampler={path:'pkg://dataflex_verl.replay_buffer',name:DataFlexMixReplayBuffer}",
    "+dataflex.mechanism=mix",
    "+dataflex.scorer.name=reward_difficulty",
    "+dataflex.actuator.name=reward_gap",
    "+dataflex.actuator.params.temperature=1.0",
    "+dataflex.actuator.params.floor=0.05",
    "+dataflex.window=50",
    "+dataflex.warmup_step=0",
    "+dataflex.update_step=1",
)
"""The published short form of a mixer, with the sampler setting that it names."""


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("sync", 8),
        ("colocate_async", 4),
        pytest.param("sync", 30, marks=pytest.mark.nightly),
        pytest.param("fetch_size_1", 30, marks=pytest.mark.nightly),
        pytest.param("filter_groups", 30, marks=pytest.mark.nightly),
        pytest.param("colocate_async", 30, marks=pytest.mark.nightly),
    ],
)
def test_static_proportions_reach_the_prompts(ray_session, demo, mode, steps):
    prompts = Prompts()
    given = overrides(demo, *NINE_TO_ONE, f"trainer.total_training_steps={steps}", *MODES[mode])
    config = compose_config(given)
    run = train(config, prompts.look)
    names = run.trainer.mixing.domains
    assert names == ("add", "sort")
    assert [len(stream) for stream in run.trainer.mixing.sampler.streams] == [len(demo_rows(demo, "add"))] * 2
    assert len(run.metrics) == steps and len(prompts.rows) >= steps * config.data.train_batch_size
    # The domains of the dataset's rows themselves, in the order of submission.
    assert prompts.domains == prompts.sources
    assert all(shares == pytest.approx([0.9, 0.1]) for shares in prompts.in_force)
    assert prompts.worst(names) < len(names)
    assert np.mean([domain == "add" for domain in prompts.domains]) > 0.75
    for metrics in run.metrics:
        assert sum(metrics[f"dataflex/trained_{name}"] for name in names) == pytest.approx(1)
    fetched = {"sync": config.data.train_batch_size}.get(mode, 1)
    assert run.trainer.mixing.loader.batch_size == fetched


def demo_rows(demo: Any, domain: str) -> list[int]:
    import pyarrow.parquet

    names = pyarrow.parquet.read_table(demo.train_parquet, columns=["domain"]).column("domain").to_pylist()
    return [row for row, name in enumerate(names) if name == domain]


class Slow:
    """A dataset whose items take so long that threads fetch them ahead."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, row: int) -> Any:
        time.sleep(0.004)
        return self.dataset[row]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_very_next_prompt_follows_proportions_that_change(ray_session, demo, workers):
    prompts = Prompts()

    def look(trainer: Any) -> None:
        prompts.look(trainer)
        loader = trainer.mixing.loader
        loader.dataset = loader.dataset if isinstance(loader.dataset, Slow) else Slow(loader.dataset)

    # Six steps of four prompts: by step 5 threads have fetched ahead, for the proportions that change at its end.
    switch = ["+dataflex.plugins.switch.plugin=tests.real.plugins:Switch", "+dataflex.plugins.switch.at=5"]
    more = [*switch, *CHEAP, f"data.dataloader_num_workers={workers}", "trainer.total_training_steps=6"]
    run = train(compose_config(overrides(demo, *more)), look)
    assert prompts.domains == prompts.sources == ["add"] * 20 + ["sort"] * 4
    loader = run.trainer.mixing.loader
    assert (loader._pool is not None) == (workers == 2)
    # What was fetched in vain waits for its turn.
    assert bool(loader._ahead) == (workers == 2)
    assert run.metrics[4]["dataflex/prop_add"] == 1.0 and run.metrics[4]["dataflex/proposed_sort"] == 1.0
    assert run.metrics[5]["dataflex/prop_sort"] == run.metrics[5]["dataflex/generated_sort"] == 1.0


def test_select_by_scores_of_candidates_decides_which_prompts_come(ray_session, demo):
    prompts = Prompts()
    pair = (
        "{plugin:select,scorer:'tests.real.plugins:EvenRows',actuator:{name:threshold_band,params:{low:0.5,high:2.0}}}"
    )
    static = mixing("{name:static,params:{proportions:{add:0.5,middle:0.25,sort:0.25}}}")
    more = [f"+dataflex.plugins.even={pair}", *static, *CHEAP, "trainer.total_training_steps=5"]
    run = train(compose_config(overrides(demo, *more)), prompts.look)
    names = run.trainer.mixing.domains
    odd = {domain for row, domain in zip(prompts.rows, prompts.domains, strict=True) if row % 2}
    # A prompt of another domain in an odd row is never generated for, and shares are as without the plugin.
    assert odd == {"add"} and prompts.domains == prompts.sources
    assert [prompts.domains.count(name) for name in names] == [10, 5, 5]
    sampler = run.trainer.mixing.sampler
    assert sampler.drawn[0] == sampler.admitted[0] == 10 and sampler.forced.tolist() == [0, 0, 0]
    assert (sampler.drawn > sampler.admitted)[1:].all() and (sampler.admitted >= 5)[1:].all()
    shares = [metrics[f"dataflex/admitted_{name}"] for metrics in run.metrics for name in ("middle", "sort")]
    assert all(metrics["dataflex/admitted_add"] == 1.0 for metrics in run.metrics) and min(shares) < 1.0


def test_a_resumed_run_fetches_the_same_prompts(ray_session, demo, tmp_path):
    """Within one process; killed runs and another Ray: test_mixing_killed.py."""
    mixer = mixing("{name:tscl,params:{temperature:0.02}}", "reward_difficulty")
    script = "+dataflex.plugins.script.plugin=tests.real.plugins:ScriptRewards"
    given = [*mixer, script, *CHEAP, f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=4"]
    whole, resumed = Prompts(), Prompts()
    train(compose_config(overrides(demo, *given, "trainer.save_freq=2")), whole.look)
    path = [f"trainer.resume_from_path={tmp_path}/global_step_2", "trainer.resume_mode=resume_path"]
    train(compose_config(overrides(demo, *given, *path)), resumed.look)
    assert len(whole.rows) == 16 and resumed.rows == whole.rows[8:]
    # Proportions after step 2 were set before the checkpoint was written.
    shares = [[one.tolist() for one in prompts.in_force] for prompts in (whole, resumed)]
    assert shares[1] == shares[0][8:] and shares[0][8] != shares[0][0]


def test_the_published_mixing_configuration_runs_verbatim(ray_session, demo):
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    prompts = Prompts()
    config = compose_config(overrides(demo, *PUBLISHED, *CHEAP, "trainer.total_training_steps=3"))
    run = train(config, prompts.look)
    # In the sync mode verl's own buffer hands out what was generated; proportions act where prompts are drawn.
    assert isinstance(run.trainer.replay_buffer, ReplayBuffer) and run.trainer.trainer_mode == "sync"
    names = run.trainer.mixing.domains
    targets = [[metrics[f"dataflex/proposed_{name}"] for name in names] for metrics in run.metrics]
    assert all(min(target) >= 0.05 and sum(target) == pytest.approx(1) for target in targets)
    # The prompts of a step are drawn by what the step before proposed.
    for step in (2, 3):
        for shares in prompts.in_force[4 * (step - 1) : 4 * step]:
            assert shares == pytest.approx(targets[step - 2])
    assert prompts.domains == prompts.sources
