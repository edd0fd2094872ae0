"""A package as ``dataflex new`` writes it and pip installs it: in a job of two steps, and in the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dataflex_hooks as dh
from dataflex_verl.cli import app
from dataflex_verl.demo.build import DemoFiles
from tests.real.conftest import base_overrides
from tests.real.harness import compose_config
from tests.real.runs import train
from tests.wheels import Site, pip

pytestmark = pytest.mark.real

LONGEST = 3


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("new")
    result = CliRunner().invoke(app, ["new", "demo-x", "--out", str(folder / "demo-x")])
    assert result.exit_code == 0, result.output
    pip("install", "--no-build-isolation", "--no-compile", "--target", folder / "site", folder / "demo-x")
    return Site(folder / "site")


@pytest.fixture
def installed(site: Site) -> Iterator[Path]:
    """Only the trainer's process, this one, runs hooks."""
    with site.on_path() as folder:
        yield folder


def test_a_job_of_two_steps_masks_what_is_too_long(ray_session, demo: DemoFiles, installed: Path) -> None:
    short = [
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
    ]
    mode = ["trainer.v1.trainer_mode=dataflex_sync", f"+dataflex.plugins.demo_x.longest={LONGEST}"]
    steps = ["trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1"]
    run = train(compose_config([*base_overrides(demo), *short, *mode, *steps]))
    logged = [metrics for metrics in run.metrics if "actor/grad_norm" in metrics]
    assert len(logged) == 2
    for metrics in logged:
        masked = metrics["dataflex/demo_x/masked_rows_total/too_long"]
        assert 0 < masked < 16
        assert metrics["dataflex/demo_x/kept_frac"] == pytest.approx(1 - masked / 16)
        assert metrics["dataflex/applied"] == 1.0 and metrics["dataflex/demo_x/decided_total"] == 1.0


def test_its_mask_reaches_the_gradient(live, stored, installed: Path) -> None:
    plain = live.update(stored)
    short = live.update(stored, {"plugins": {"demo_x": {"longest": LONGEST}}})
    lengths = {key: len(mask) for key, mask in short.of("response_mask").items()}
    assert min(lengths.values()) <= LONGEST < max(lengths.values())
    for key, weights in short.of("rollout_is_weights").items():
        assert (weights == float(lengths[key] <= LONGEST)).all()
    assert short.grad_norm > 0 and short.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)


def test_a_limit_that_nothing_exceeds_changes_nothing(live, stored, installed: Path) -> None:
    everything = live.update(stored, {"plugins": {"demo_x": {}}})
    assert everything.metrics["dataflex/demo_x/kept_frac"] == 1.0
    assert everything.grad_norm == pytest.approx(live.update(stored).grad_norm, rel=1e-6)


def test_it_is_there_only_where_it_is_installed(live, stored) -> None:
    with pytest.raises(dh.ConfigError, match="dataflex.plugins.demo_x.plugin: got 'demo_x'"):
        live.update(stored, {"plugins": {"demo_x": {}}})
