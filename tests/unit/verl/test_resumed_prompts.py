"""Resuming with domains: ``data.pt`` has to be the domain sampler's, and of the same dataset."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dataflex_hooks import ConfigError, HookManager, LossCoefficients, StepContext
from dataflex_verl import checkpoint, state_files
from dataflex_verl.startup import prepare_with

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")

from verl.trainer.ppo.v1.trainer_base import PPOTrainer  # noqa: E402

from dataflex_verl import trainer as trainer_module  # noqa: E402
from dataflex_verl.mixing import DomainMixing  # noqa: E402

MIX = {"mix": {"actuator": "static"}}
MASK = {"select": {"scorer": "group_solve_rate", "actuator": "threshold_band"}}


class Rows:
    """Thirty rows of two domains."""

    def __init__(self, word="p"):
        self.word = word

    def __len__(self):
        return 30

    def __getitem__(self, row):
        return {"prompt": f"{self.word}{row}", "domain": "code" if row % 3 == 0 else "math"}


def collate(items):
    return {name: np.array([item[name] for item in items], dtype=object) for name in items[0]}


def configuration(root, plugins, resume="strict"):
    return OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(root),
                "resume_mode": "auto",
                "default_hdfs_dir": None,
                "del_local_ckpt_after_load": False,
                "v1": {"trainer_mode": "dataflex_sync"},
            },
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"rollout": {"n": 4}},
            "data": {"train_batch_size": 6, "seed": 1, "shuffle": True},
            "dataflex": {"plugins": plugins, "resume": resume},
        }
    )


def manager(plugins, resume="strict"):
    return HookManager.from_config({"plugins": plugins, "resume": resume}, estimator="grpo", has_groups=True)


def loader_of(config, rows, resume="strict"):
    hooks = manager(MIX, resume)
    return DomainMixing(hooks, config, rows, collate, lambda: StepContext(step=1)).loader


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of step 4 as a run with domains leaves it."""
    config = configuration(tmp_path, MIX)
    loader = loader_of(config, Rows())
    next(loader)
    checkpoint_folder = tmp_path / "global_step_4"
    state_files.write(checkpoint_folder, manager(MIX), 4, {})
    torch.save(loader.state_dict(), checkpoint_folder / "data.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    return checkpoint_folder


def refused(config):
    with pytest.raises(ConfigError) as caught:
        prepare_with(config, lambda *_: LossCoefficients("token"))
    return [str(problem) for problem in caught.value.problems]


def accepted(config):
    return prepare_with(config, lambda *_: LossCoefficients("token"))


def test_the_samplers_own_state_is_accepted(folder, tmp_path):
    accepted(configuration(tmp_path, MIX))


def test_a_missing_data_file_is_one_error_before_anything_starts(folder, tmp_path):
    (folder / "data.pt").unlink()
    assert refused(configuration(tmp_path, MIX)) == [
        f"trainer.resume_mode: got a checkpoint whose prompts come from {folder / 'data.pt'}, which is not there; "
        "accepted: a checkpoint of the domain sampler; +dataflex.resume=fresh begins every domain with its first "
        "prompts"
    ]
    accepted(configuration(tmp_path, MIX, resume="fresh"))


@pytest.mark.parametrize("content", [{"_snapshot": {"_snapshot_step": 4}, "_steps_since_snapshot": 0}, None])
def test_a_data_file_of_another_loader_is_one_error(folder, tmp_path, content):
    if content is None:
        (folder / "data.pt").write_bytes(b"damaged")
    else:
        torch.save(content, folder / "data.pt")
    (message,) = refused(configuration(tmp_path, MIX))
    assert (
        f"come from {folder / 'data.pt'}, which another data loader wrote; accepted: a checkpoint of the d" in message
    )
    accepted(configuration(tmp_path, MIX, resume="fresh"))


def test_a_run_without_domains_cannot_go_on_with_the_samplers_state(folder, tmp_path):
    messages = refused(configuration(tmp_path, MASK))
    assert messages[0].startswith(
        f"trainer.resume_mode: got {folder / 'data.pt'} of the domain sampler; accepted: a run"
    )
    assert "in the checkpoint only" in messages[1]


def test_verls_own_checkpoint_and_a_run_without_domains_are_left_alone(folder, tmp_path):
    state_files.write(folder, manager(MASK), 4, {})
    torch.save({"_snapshot": {}}, folder / "data.pt")
    accepted(configuration(tmp_path, MASK))
    (folder / "data.pt").unlink()
    accepted(configuration(tmp_path, MASK))


# -------------------------------------------------------------------- through verl's _load_checkpoint


@pytest.fixture
def resumed(mocker):
    """Build the trainer over verl's own `_load_checkpoint`, with domains of `rows`, and let it load."""

    def load(config, rows, resume="strict"):
        hooks = manager(MIX, resume)
        mocker.patch.object(trainer_module, "prepare", return_value=(hooks, LossCoefficients("token")))
        workers = mocker.Mock()

        class Base:
            _load_checkpoint = PPOTrainer._load_checkpoint

            def __init__(self, config):
                self.config, self.trainer_mode, self.global_steps = config, "sync", 0
                self.use_critic, self.actor_rollout_wg = False, workers

            def _init_dataloader(self):
                self.train_dataset = rows
                self.train_dataloader = SimpleNamespace(collate_fn=collate)
                self.replay_buffer = mocker.Mock()

        trainer = type("Trainer", (trainer_module.DataFlexTrainer, Base), {})(config)
        trainer._init_dataloader()
        trainer._load_checkpoint()
        return trainer

    return load


def test_a_resumed_trainer_goes_on_with_the_next_prompts(folder, tmp_path, resumed):
    config = configuration(tmp_path, MIX)
    whole = loader_of(config, Rows())
    first, second = (next(whole)["prompt"].tolist() for _ in range(2))
    trainer = resumed(config, Rows())
    assert trainer.global_steps == 4
    assert next(trainer.train_dataloader)["prompt"].tolist() == second != first
    assert trainer.mixing._counted.sum() == 6


def test_another_dataset_is_an_error_that_names_both_fingerprints(folder, tmp_path, resumed):
    config = configuration(tmp_path, MIX)
    here, there = (loader_of(config, Rows(word)).sampler.dataset.fingerprint for word in ("q", "p"))
    assert here != there
    with pytest.raises(ConfigError) as caught:
        resumed(config, Rows("q"))
    message = str(caught.value)
    assert f"data.train_files: got a dataset with fingerprint {here}; accepted: the dataset of the c" in message
    assert f"fingerprint {there}" in message


def test_fresh_begins_anew_over_another_loaders_state_and_says_so(folder, tmp_path, resumed, caplog):
    torch.save({"_snapshot": {}}, folder / "data.pt")
    with pytest.raises(ConfigError, match="a checkpoint that another data loader wrote"):
        resumed(configuration(tmp_path, MIX), Rows())
    config = configuration(tmp_path, MIX, resume="fresh")
    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        trainer = resumed(config, Rows(), resume="fresh")
    assert "data.pt is another data loader's; every domain begins anew" in caplog.text
    assert next(trainer.train_dataloader)["prompt"].tolist() == next(loader_of(config, Rows()))["prompt"].tolist()


def test_the_folder_is_asked_for_its_data_file_without_unpickling(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    assert checkpoint.problems(configuration(tmp_path, MIX), manager(MIX)) == []
