"""How the trainer modes come into verl's registry: lazily, loudly, in every process."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")


# What verl's trainers import from elsewhere, imported once: each case is a fork that has neither verl nor us yet.
CASES = """
import importlib, os, sys, tempfile, traceback
for name in ("torch", "tensordict", "datasets", "transformers.generation", "torchdata.stateful_dataloader", "peft",
             "torch.distributed.fsdp", "torch.distributed.checkpoint", "ray", "transfer_queue"):
    importlib.import_module(name)
assert not [name for name in sys.modules if name.split(".")[0] in ("verl", "dataflex_hooks", "dataflex_verl")]
for variables, code in CASES:
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 2)
            os.environ.pop("VERL_PLATFORM", None)
            os.environ.update(variables)
            status = 1
            try:
                exec(code, {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(repr((status, output.read().decode())), flush=True)
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


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[int, str]]:
    """Exit status and error output of the three cases."""
    cases = [({}, DRIVER), ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, WITHOUT), ({}, BROKEN)]
    program = f"CASES = {cases!r}\n{CASES}"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("(")]


def test_the_published_sanity_check_holds_in_the_driver(outcomes):
    assert outcomes[0][0] == 0, outcomes[0][1]


def test_without_the_entry_point_verl_knows_no_dataflex_mode(outcomes):
    status, errors = outcomes[1]
    assert status != 0 and "ValueError: Unknown trainer 'dataflex_sync'" in errors, errors


def test_a_failure_to_register_is_not_hidden(outcomes):
    status, errors = outcomes[2]
    assert status != 0
    assert "HookManager" in errors and "ImportError" in errors
