"""What the local backend changes in verl, and that nothing is changed without it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from dataflex_verl.local import forkserver, patches
from dataflex_verl.local.rollout import refuse_unmerged_lora

LOOK = """
import importlib, inspect, json, os, sys, warnings
warnings.simplefilter("ignore")
import verl.utils.distributed as distributed
import verl.utils.model as model
import verl.workers.rollout.base as base
import verl.workers.rollout.replica as replica
import verl.trainer.ppo.v1.replay_buffer as buffer
import verl.trainer.ppo.v1.trainer_base as trainer
import verl.workers.engine.fsdp.transformer_impl as engine
import verl.experimental.agent_loop.agent_loop as loop
import verl.models.transformers.monkey_patch as heads
import verl.utils.tokenizer.tokenizer as tokenizer
import verl.utils.tokenizer.continuous_token_wiring as wiring
import verl.workers.rollout.llm_server as llm_server
from verl.plugin.platform import PlatformRegistry
print(json.dumps({
    "gloo": not inspect.isfunction(distributed.initialize_global_process_group_ray),
    "critic": model.load_valuehead_model.__module__.startswith("dataflex"),
    "adapter": ("transformers", "async") in base._ROLLOUT_REGISTRY,
    "replica": "transformers" in replica.RolloutReplicaRegistry._registry,
    "polling": hasattr(buffer.ReplayBuffer.__init__, "__wrapped__"),
    "sorting": hasattr(buffer.ReplayBuffer._materialize_batch, "__wrapped__"),
    "counting": hasattr(trainer.PPOTrainer._fetch_one_gen_batch, "__wrapped__"),
    "pinning": inspect.isfunction(engine.CPUOffloadPolicy),
    "lora": engine.FSDPEngine._merged_lora_per_tensor_param.__module__.startswith("dataflex"),
    "heads": hasattr(heads.apply_monkey_patch, "__wrapped__"),
    "template": hasattr(tokenizer.set_pad_token_id, "__wrapped__"),
    "model class": hasattr(model.get_hf_auto_model_class, "__wrapped__"),
    "loop": not inspect.ismodule(loop.hydra),
    "balancer": hasattr(llm_server.LLMServerClient._acquire_server, "__wrapped__"),
    "notes": bool(wiring.logger.filters),
    "platform": "cpu" in PlatformRegistry._platforms,
    "engines": os.environ.get("VERL_ENGINE_DEVICE") == "cuda",
    "local modules": any(name.startswith("dataflex_verl.local") for name in sys.modules),
}))
"""


def look(**environment: str) -> subprocess.Popen[str]:
    ours = ("VERL_", "TQ_", "OMP_", "DATAFLEX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.Popen(
        [sys.executable, "-c", LOOK], env={**kept, **environment}, stdout=subprocess.PIPE, text=True
    )


def test_everything_is_installed_with_the_platform_and_nothing_without():
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in (look(VERL_PLATFORM="cpu"), look())]
    assert [set(values.values()) for values in found] == [{True}, {False}]


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
