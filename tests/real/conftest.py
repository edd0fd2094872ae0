from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dataflex_verl.demo.build import DemoFiles, build_demo

CACHE = Path.home() / ".cache" / "dataflex-tests"


@pytest.fixture(scope="session")
def demo() -> DemoFiles:
    return build_demo(CACHE, seed=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the live trainer run in one process, so that there is one; in a single process, after whole runs.

    verl's placement groups have fixed names, and the live trainer keeps them to the end.
    """

    def is_live(item: pytest.Item) -> bool:
        return "live" in getattr(item, "fixturenames", ())

    items.sort(key=is_live)
    for item in filter(is_live, items):
        item.add_marker(pytest.mark.xdist_group("live"))


def base_overrides(demo: DemoFiles) -> list[str]:
    """A small GRPO run on the demo task: 8 prompts of 8 rollouts, one mini-batch."""
    return [
        f"data.train_files={demo.train_parquet}",
        f"data.val_files={demo.val_parquet}",
        f"actor_rollout_ref.model.path={demo.model_dir}",
        f"reward.custom_reward_function.path={demo.reward_path}",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "data.shuffle=False",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "algorithm.adv_estimator=grpo",
        "trainer.resume_mode=disable",
    ]


@pytest.fixture(scope="session")
def ray_session(demo: DemoFiles) -> Iterator[None]:
    import ray
    import transfer_queue as tq

    from dataflex_verl.local.forkserver import start_server

    # First of all: the workers' modules load while this process imports its own.
    start_server()
    from tests.real.harness import compose_config, start_ray

    config = compose_config(base_overrides(demo))
    start_ray(config)
    tq.init(config.transfer_queue)
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture(scope="session")
def live(ray_session: None, demo: DemoFiles, tmp_path_factory: pytest.TempPathFactory):
    """The live trainer: one worker, with a critic and a reference policy that cases switch on."""
    from tests.real.harness import LiveTrainer, compose_config

    overrides = [
        *base_overrides(demo),
        "trainer.v1.trainer_mode=dataflex_sync",
        "critic.enable=True",
        f"critic.model.path={demo.model_dir}",
        "actor_rollout_ref.actor.use_kl_loss=True",
    ]
    return LiveTrainer(compose_config(overrides), tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="session")
def stored(live):
    """One generated batch whose rewards vary within groups."""
    return live.collect()


@pytest.fixture(scope="session")
def live_two_workers(live, stored, demo: DemoFiles, tmp_path_factory: pytest.TempPathFactory):
    """The same with two data-parallel workers; it trains on the other's batch and never generates."""
    import ray

    from tests.real.harness import LiveTrainer, compose_config

    # verl gives its reward workers fixed names; the first trainer has its batch and needs them no more.
    for worker in live.trainer.get_reward_handles():
        ray.kill(worker)

    overrides = [
        *base_overrides(demo),
        "trainer.v1.trainer_mode=dataflex_sync",
        "trainer.n_gpus_per_node=2",
    ]
    return LiveTrainer(compose_config(overrides), tmp_path_factory.mktemp("live_two"), generate=False)
