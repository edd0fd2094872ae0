"""How the trainer modes come into verl's registry: lazily, loudly, in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


def test_the_published_sanity_check_holds_in_the_driver():
    code = (
        "import verl, sys\n"
        "assert 'verl.trainer.ppo.v1' not in sys.modules and 'dataflex_verl.trainer' not in sys.modules\n"
        "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY\n"
        "assert 'dataflex_sync' in TRAINER_REGISTRY and 'dataflex_mix_sync' in TRAINER_REGISTRY\n"
        "assert 'sync' in TRAINER_REGISTRY\n"
        "from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls\n"
        "assert issubclass(get_trainer_cls('dataflex_sync'), PPOTrainerSync)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_without_the_entry_point_verl_knows_no_dataflex_mode():
    code = (
        "import verl\n"
        "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY\n"
        "assert not [name for name in TRAINER_REGISTRY if name.startswith('dataflex')]\n"
    )
    done = run(code, VERL_USE_EXTERNAL_PLUGINS="none")
    # Without us there is no CPU platform either, so verl falls back to its own.
    assert done.returncode == 0 or "Unknown platform 'cpu'" in done.stderr, done.stderr


def test_a_failure_to_register_is_not_hidden():
    code = "import dataflex_hooks\ndel dataflex_hooks.HookManager\nimport verl\nimport verl.trainer.ppo.v1\n"
    done = run(code)
    assert done.returncode != 0
    assert "HookManager" in done.stderr and "ImportError" in done.stderr
