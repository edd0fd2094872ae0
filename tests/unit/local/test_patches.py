"""What the local backend changes in verl; that nothing is changed without it: tests/unit/verl/test_fresh_process.py."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from dataflex_verl.local import forkserver, patches
from dataflex_verl.local.rollout import refuse_unmerged_lora


def test_a_variable_of_the_users_own_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("TQ_NUM_THREADS", raising=False)
    monkeypatch.setattr(patches, "_HOOKS", ())
    patches.install_local_backend()
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert os.environ["TQ_NUM_THREADS"] == "1"


@pytest.mark.parametrize("wanted", [True, False])
def test_a_driver_that_will_need_the_fork_server_starts_it(monkeypatch, wanted):
    started = []
    command = f"ray_kwargs.ray_init.runtime_env.py_executable='{forkserver.py_executable()}'"
    monkeypatch.setattr(sys, "orig_argv", ["python", *([command] if wanted else [])])
    monkeypatch.setattr(forkserver, "start_server", lambda: started.append(1))
    monkeypatch.setattr(patches, "_HOOKS", ())
    patches.install_local_backend()
    assert started == [1] * wanted


def test_a_fork_server_that_does_not_start_stops_nothing(monkeypatch):
    def fail():
        raise ConnectionError("no")

    monkeypatch.setattr(sys, "orig_argv", [f"py_executable={forkserver.py_executable()}"])
    monkeypatch.setattr(forkserver, "start_server", fail)
    monkeypatch.setattr(patches, "_HOOKS", ())
    patches.install_local_backend()


def test_process_groups_are_made_with_gloo():
    module = ModuleType("distributed")
    module.initialize_global_process_group_ray = lambda timeout_second=None, backend="nccl": (timeout_second, backend)
    patches._use_gloo(module)
    assert module.initialize_global_process_group_ray(timeout_second=4) == (4, "gloo")


def test_offloading_pins_no_memory():
    module = ModuleType("engine")
    module.CPUOffloadPolicy = lambda pin_memory: pin_memory
    patches._offload_without_pinning(module)
    assert module.CPUOffloadPolicy(pin_memory=True) is False


@pytest.mark.parametrize(("given", "interval"), [({}, 0.05), ({"poll_interval": 1.0}, 1.0)])
def test_replay_buffer_polls_often_unless_told_otherwise(given, interval):
    class ReplayBuffer:
        def __init__(self, poll_interval: float = 2.0) -> None:
            self.poll_interval = poll_interval

    module = SimpleNamespace(ReplayBuffer=ReplayBuffer)
    patches._poll_often(module)
    assert module.ReplayBuffer(**given).poll_interval == interval


def test_a_note_is_logged_once(caplog):
    module = SimpleNamespace(logger=logging.getLogger("tests.note_once"))
    patches._note_once(module)
    for text in ("first", "second", "first", "first"):
        module.logger.warning("%s", text)
    assert [record.getMessage() for record in caplog.records] == ["first", "second"]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"lora_rank": 0, "lora": {}},
        {"lora_rank": 8, "lora": {"merge": True}},
        {"lora_adapter_path": "some/where", "lora": {"merge": True}},
    ],
)
def test_whole_or_merged_weights_are_accepted(model):
    refuse_unmerged_lora(model)


@pytest.mark.parametrize(
    "model", [{"lora_rank": 8}, {"lora_rank": 8, "lora": {"merge": False}}, {"lora_adapter_path": "x"}]
)
def test_unmerged_lora_is_refused_with_the_setting_that_merges(model):
    with pytest.raises(ValueError, match=r"set actor_rollout_ref\.model\.lora\.merge=True"):
        refuse_unmerged_lora(model)
