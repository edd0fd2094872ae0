"""What a process gets when verl is imported in it: trainer modes, lazily and loudly; the local backend if asked for.

Each case is a fork of one process that has what verl imports from elsewhere, but neither verl nor us.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from dataflex_verl.local.preload import EARLY_PRELOAD

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")
pytestmark = pytest.mark.xdist_group("fresh_process")  # one process serves all cases

FORKS = """
import importlib, os, sys, tempfile, traceback
for name in EARLY:
    importlib.import_module(name)
print(repr((0, str(sorted({"ray", "verl"} & set(sys.modules))), "")), flush=True)
for name in ("ray", "transfer_queue"):
    importlib.import_module(name)
assert not [name for name in sys.modules if name.split(".")[0] in ("verl", "dataflex_verl")]
for variables, code in CASES:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os.environ.update(variables)
            status = 1
            try:
                exec(code, {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        errors.seek(0)
        print(repr((status, output.read().decode(), errors.read().decode())), flush=True)
"""
DRIVER = (
    "import verl, sys\n"
    "assert 'verl.trainer.ppo.v1' not in sys.modules and 'dataflex_verl.trainer' not in sys.modules\n"
    "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY\n"
    "assert 'dataflex_sync' in TRAINER_REGISTRY and 'dataflex_mix_sync' in TRAINER_REGISTRY\n"
    "assert 'sync' in TRAINER_REGISTRY\n"
    "from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls\n"
    "assert issubclass(get_trainer_cls('dataflex_sync'), PPOTrainerSync)\n"
)
WITHOUT = (
    "import verl\n"
    "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, get_trainer_cls\n"
    "assert TRAINER_REGISTRY and not [name for name in TRAINER_REGISTRY if name.startswith('dataflex')]\n"
    "get_trainer_cls('dataflex_sync')\n"
)
BROKEN = "import dataflex_hooks\ndel dataflex_hooks.HookManager\nimport verl\nimport verl.trainer.ppo.v1\n"
LOOK = """
import inspect, json, os, sys, warnings
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
CASES = {
    "driver": ({}, DRIVER),
    "without": ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, WITHOUT),
    "broken": ({}, BROKEN),
    "on the cpu": ({"VERL_PLATFORM": "cpu"}, LOOK),
    "elsewhere": ({}, LOOK),
}


@dataclass(frozen=True)
class Ended:
    status: int
    output: str
    errors: str


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    """How each case ended, by name; ``early`` is what the fork server imports before there is a Ray."""
    ours = ("VERL_", "TQ_", "OMP_", "DATAFLEX_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    program = f"EARLY, CASES = {EARLY_PRELOAD!r}, {list(CASES.values())!r}\n{FORKS}"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    printed = [Ended(*ast.literal_eval(line)) for line in done.stdout.splitlines() if line.startswith("(")]
    return dict(zip(["early", *CASES], printed, strict=True))


def test_the_published_sanity_check_holds_in_the_driver(ended):
    assert ended["driver"].status == 0, ended["driver"].errors


def test_without_the_entry_point_verl_knows_no_dataflex_mode(ended):
    case = ended["without"]
    assert case.status != 0 and "ValueError: Unknown trainer 'dataflex_sync'" in case.errors, case.errors


def test_a_failure_to_register_is_not_hidden(ended):
    case = ended["broken"]
    assert case.status != 0
    assert "HookManager" in case.errors and "ImportError" in case.errors


def test_the_local_backend_is_installed_with_its_platform_and_nothing_without(ended):
    for name, changed in (("on the cpu", True), ("elsewhere", False)):
        assert ended[name].status == 0, ended[name].errors
        found = json.loads(ended[name].output.splitlines()[-1])
        assert {part for part, value in found.items() if value is not changed} == set(), name


def test_what_the_fork_server_imports_early_leaves_ray_unloaded(ended):
    assert ended["early"] == Ended(0, "[]", "")
