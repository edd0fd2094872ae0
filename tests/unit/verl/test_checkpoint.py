"""The files of the hooks in verl's checkpoints; no verl needed."""

from __future__ import annotations

import json
import logging
import os

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dataflex_hooks import ConfigError, HookManager, hookimpl
from dataflex_verl import checkpoint, state_files
from dataflex_verl.startup import prepare_with
from dataflex_verl.state_files import CheckpointError


class Stateful:
    def __init__(self, **state):
        self.state = state

    @hookimpl
    def post_advantage(self, batch):
        return None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


STATE = {"history": np.arange(4.0), "seen": {7: ("math", 1 / 3)}, "t": torch.tensor([1, 2], dtype=torch.bfloat16)}


def hooks(resume="strict", **plugins):
    return HookManager.from_config({"resume": resume}, estimator="grpo", has_groups=True, extra_plugins=plugins)


def saved(tmp_path, **plugins):
    folder = tmp_path / "global_step_4"
    state_files.write(folder, hooks(**plugins), 4, {"reward": 0.25, "count": np.int64(3), "text": "no number"})
    return folder


def test_state_comes_back_from_the_files_bit_for_bit(tmp_path):
    folder = saved(tmp_path, a=Stateful(**STATE), b=Stateful(history=np.ones(2)))
    a, b = Stateful(), Stateful()
    metrics = checkpoint.restore(folder, hooks(a=a, b=b))
    assert a.state["history"].tobytes() == STATE["history"].tobytes()
    assert a.state["seen"] == STATE["seen"] and torch.equal(a.state["t"], STATE["t"])
    assert b.state["history"].tolist() == [1.0, 1.0]
    assert metrics == {"reward": 0.25, "count": 3.0}


def test_the_files_are_strict_json_and_safetensors_and_nothing_else(tmp_path):
    folder = saved(tmp_path, a=Stateful(**STATE, worst=float("nan"))) / "dataflex"
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "state.json" and names[1].endswith(".safetensors") and len(names) == 2

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    record = json.loads((folder / "state.json").read_text(), parse_constant=refuse)
    assert (record["format"], record["version"], record["step"]) == ("dataflex state", 1, 4)
    assert record["tensors"]["file"] == names[1]


def test_the_metrics_of_the_step_are_completed_later(tmp_path):
    folder = saved(tmp_path, a=Stateful())
    state_files.write_metrics(folder / "dataflex", 4, {"reward": 0.25, "late": float("inf"), "x": np.float32(0.1)})
    assert checkpoint.restore(folder, hooks(a=Stateful())) == {
        "reward": 0.25,
        "late": float("inf"),
        "x": float(np.float32(0.1)),
    }
    # Another save of the same step begins anew.
    saved(tmp_path, a=Stateful())
    assert checkpoint.restore(folder, hooks(a=Stateful())) == {"reward": 0.25, "count": 3.0}


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_save_that_dies_half_way_leaves_the_earlier_state(tmp_path, monkeypatch, fails_at):
    folder = saved(tmp_path, a=Stateful(x=np.zeros(2)))
    calls = []
    real = os.fsync

    def die(descriptor):
        calls.append(descriptor)
        # Two for each file: its content and its folder.
        if len(calls) == 1 + 2 * fails_at:
            raise KeyboardInterrupt
        real(descriptor)

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, a=Stateful(x=np.ones(2)))
    monkeypatch.undo()
    again = Stateful()
    checkpoint.restore(folder, hooks(a=again))
    assert again.state["x"].tolist() == [0.0, 0.0]
    # And with nothing there before, nothing is found.
    assert state_files.read(tmp_path / "global_step_9") is None


def test_a_new_save_replaces_the_old_tensors(tmp_path):
    saved(tmp_path, a=Stateful(x=np.zeros(2)))
    folder = saved(tmp_path, a=Stateful(x=np.ones(2)))
    assert len(list((folder / "dataflex").glob("*.safetensors"))) == 1
    saved(tmp_path, a=Stateful(x=1))
    assert not list((folder / "dataflex").glob("*.safetensors"))


def test_damaged_and_newer_files_are_refused(tmp_path):
    folder = saved(tmp_path, a=Stateful(**STATE))
    (tensors,) = (folder / "dataflex").glob("*.safetensors")
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged: its checksum"):
        checkpoint.restore(folder, hooks(a=Stateful()))
    tensors.unlink()
    with pytest.raises(CheckpointError, match="which state.json names, is not there"):
        checkpoint.restore(folder, hooks(a=Stateful()))
    path = folder / "dataflex" / "state.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="cannot be read: JSONDecodeError"):
        checkpoint.restore(folder, hooks(a=Stateful()))
    path.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match="version 2, written by dataflex-verl .* install the newer"):
        checkpoint.restore(folder, hooks(a=Stateful()))


def test_a_checkpoint_without_our_files_is_adopted_with_a_warning(tmp_path, caplog):
    (tmp_path / "global_step_4").mkdir()
    plugin = Stateful(n=1)
    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        assert checkpoint.restore(tmp_path / "global_step_4", hooks(a=plugin)) == {}
    assert plugin.state == {"n": 1}
    (record,) = caplog.records
    assert "has no dataflex folder: all plugins start afresh" in record.getMessage()


def test_fresh_ignores_even_damaged_state_and_says_so(tmp_path, caplog):
    folder = saved(tmp_path, a=Stateful(n=1))
    (folder / "dataflex" / "state.json").write_text("{")
    plugin = Stateful(n=0)
    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        assert checkpoint.restore(folder, hooks("fresh", a=plugin)) == {}
    assert plugin.state == {"n": 0} and "dataflex.resume=fresh" in caplog.text


def test_matching_warns_of_what_it_leaves_out(tmp_path, caplog):
    folder = saved(tmp_path, a=Stateful(n=1), gone=Stateful(n=2))
    a = Stateful()
    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        checkpoint.restore(folder, hooks("matching", a=a, new=Stateful()))
    assert a.state == {"n": 1}
    assert "plugins new start afresh" in caplog.text and "plugins gone are in the checkpoint" in caplog.text


def config(tmp_path, mode="auto", path=None, **trainer):
    given = {"default_local_dir": str(tmp_path), "resume_mode": mode, "resume_from_path": path, **trainer}
    return OmegaConf.create(
        {
            "trainer": given,
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"rollout": {"n": 4}},
            "dataflex": {"plugins": {"a": {"plugin": f"{__name__}:Stateful"}}},
        }
    )


def test_the_folder_to_resume_from_is_the_one_verl_takes(tmp_path):
    assert checkpoint.resume_folder(config(tmp_path)) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert checkpoint.resume_folder(config(tmp_path)) is None
    (tmp_path / "global_step_4").mkdir()
    assert checkpoint.resume_folder(config(tmp_path)) == tmp_path / "global_step_4"
    assert checkpoint.resume_folder(config(tmp_path, "disable")) is None
    other = str(tmp_path / "global_step_2")
    assert checkpoint.resume_folder(config(tmp_path, "resume_path", other)) == tmp_path / "global_step_2"


def test_a_changed_plugin_list_is_refused_before_anything_starts(tmp_path, monkeypatch):
    from dataflex_hooks import LossCoefficients

    folder = saved(tmp_path, b=Stateful(x=np.ones(2)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    given = config(tmp_path)

    def ask(*_):
        return LossCoefficients("token")

    with pytest.raises(ConfigError) as caught:
        prepare_with(given, ask)
    text = str(caught.value)
    assert "'b'" in text and "in the checkpoint only" in text and "'a'" in text and str(folder) in text
    for resume in ("matching", "fresh"):
        given.dataflex.resume = resume
        prepare_with(given, ask)
    given.dataflex.resume = "strict"
    (folder / "dataflex" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="dataflex.resume.*cannot be read.*resume=fresh"):
        prepare_with(given, ask)
    given.trainer.resume_mode = "disable"
    prepare_with(given, ask)


@pytest.mark.parametrize(
    ("limits", "critic", "left"),
    [
        ({}, False, [1, 2, 3]),
        ({"max_actor_ckpt_to_keep": 2}, False, [2, 3]),
        ({"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 2}, True, [2, 3]),
        ({"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": None}, True, [1, 2, 3]),
        ({"remove_previous_ckpt_in_save": True}, True, [3]),
    ],
)
def test_state_goes_when_verl_removes_the_model_it_belongs_to(tmp_path, limits, critic, left):
    kept = checkpoint.Kept()
    for step in (1, 2, 3):
        folder = tmp_path / f"global_step_{step}" / "dataflex"
        folder.mkdir(parents=True)
        kept.add(folder, config(tmp_path, **limits), critic)
    assert [step for step in (1, 2, 3) if (tmp_path / f"global_step_{step}" / "dataflex").is_dir()] == left
