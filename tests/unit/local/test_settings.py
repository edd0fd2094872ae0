"""The overrides and variables of the local backend; what the user gives wins."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from dataflex_verl.local import settings
from dataflex_verl.local.settings import local_environment, local_overrides, override_key


def compose(given: list[str]):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*local_overrides(given), *given])


def test_overrides_fit_verls_configuration():
    config = compose([])
    assert config.trainer.device == "cpu"
    assert config.actor_rollout_ref.rollout.name == "transformers"
    for engine in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        assert OmegaConf.select(config, f"{engine}.strategy") == "fsdp2"
    for key in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
        precision = OmegaConf.select(config, f"{key}.mixed_precision")
        assert set(precision.values()) == {"fp32"}
    assert "forkserver.py" in config.ray_kwargs.ray_init.runtime_env.py_executable


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("trainer.n_gpus_per_node=2", "trainer.n_gpus_per_node", 2),
        ("reward.num_workers=3", "reward.num_workers", 3),
        ("++critic.fsdp.mixed_precision.param_dtype=bf16", "critic.fsdp.mixed_precision.param_dtype", "bf16"),
        ("trainer.logger=[console,file]", "trainer.logger", ["console", "file"]),
        (
            "ray_kwargs.ray_init.runtime_env.py_executable=python",
            "ray_kwargs.ray_init.runtime_env.py_executable",
            "python",
        ),
        ("++ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_gpus", 2),
    ],
)
def test_the_users_override_replaces_ours(given, key, value):
    assert OmegaConf.select(compose([given]), key) == value
    assert key not in [override_key(text) for text in local_overrides([given])]
    assert key in [override_key(text) for text in local_overrides()]


def test_command_of_the_fork_server_survives_quotes_and_spaces(monkeypatch):
    command = "'/a b/it\"s=x/python' -I -S /some/file.py"
    monkeypatch.setattr(settings, "py_executable", lambda: command)
    assert compose([]).ray_kwargs.ray_init.runtime_env.py_executable == command


@pytest.mark.parametrize("text", ["a.b=1", "+a.b=1", "++a.b=[1,2]", "~a.b", "a.b='x=y'"])
def test_key_of_an_override_has_no_prefix(text):
    assert override_key(text) == "a.b"


def test_environment_selects_the_backend_and_one_thread():
    environment = local_environment()
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert all(isinstance(value, str) for value in environment.values())
