"""Short whole runs: without a plugin ours is verl's own, and every process knows the trainer modes.

verl gives placement groups fixed names, so these run before the trainer that stays alive (``test_reach.py``) starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.real.conftest import base_overrides
from tests.real.harness import compose_config
from tests.real.runs import train

pytestmark = pytest.mark.real


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_run_without_plugins_is_verls_own(ray_session, demo, tmp_path):
    runs = {}
    for mode in ("sync", "dataflex_sync"):
        overrides = [
            *base_overrides(demo),
            f"trainer.v1.trainer_mode={mode}",
            "trainer.total_training_steps=2",
            "trainer.save_freq=2",
            "trainer.val_before_train=False",
            f"trainer.default_local_dir={tmp_path / mode}",
        ]
        runs[mode] = train(compose_config(overrides))
    verls, ours = runs["sync"].trainer, runs["dataflex_sync"].trainer
    assert type(ours).__name__ == "DataFlexSync" and type(verls) in type(ours).__mro__
    assert ours.config.data.train_batch_size == verls.config.data.train_batch_size
    assert ours.config.data.gen_batch_size == verls.config.data.gen_batch_size
    assert ours.train_dataloader.batch_size == verls.train_dataloader.batch_size == 8
    assert type(ours.replay_buffer) is type(verls.replay_buffer)
    assert files_below(tmp_path / "dataflex_sync") == files_below(tmp_path / "sync") != set()
    for one, other in zip(runs["sync"].metrics, runs["dataflex_sync"].metrics, strict=True):
        for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss"):
            assert one[name] == other[name]


def test_the_published_sanity_check_holds_inside_a_ray_actor(ray_session):
    @ray.remote(num_cpus=0)
    class Somewhere:
        def modes(self) -> list[str]:
            import verl  # noqa: F401
            from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

            return sorted(TRAINER_REGISTRY)

    actor = Somewhere.remote()
    assert {"dataflex_sync", "dataflex_mix_sync"} <= set(ray.get(actor.modes.remote()))
    ray.kill(actor)
