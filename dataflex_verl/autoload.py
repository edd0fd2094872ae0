"""Entry point `verl.plugins`: runs on every `import verl`, in the driver and in every worker, so it stays light.

verl hides an exception raised here at DEBUG level, and importing its trainer stack here would cost every worker about
two seconds. So this module only installs post-import hooks (wrapt): the trainer modes register at the moment verl's
own trainer package is imported, and the presets when Hydra looks for its plugins, in whichever process does that. An
error then surfaces as that import's error.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import ModuleType
from typing import Any

import wrapt


def _register_trainers(module: ModuleType) -> None:
    from dataflex_verl.trainer import register_trainers

    register_trainers()


def _install_presets(module: ModuleType) -> None:
    """Register the presets when Hydra looks for its plugins. Workers import Hydra and never do."""
    if module.Plugins in module.Singleton._instances:
        _register_presets(module.Plugins.instance())
        return

    def look_for_plugins(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        _register_presets(instance)

    wrapt.wrap_function_wrapper(module, "Plugins.__init__", look_for_plugins)


def _register_presets(plugins: Any) -> None:
    from dataflex_verl.hydra_plugin import register

    register(plugins)


def install() -> None:
    """Install the post-import hooks. Safe to call again: verl's registry refuses a second class under one name."""
    wrapt.register_post_import_hook(_register_trainers, "verl.trainer.ppo.v1")
    wrapt.register_post_import_hook(_install_presets, "hydra.core.plugins")
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        from dataflex_verl.local.patches import install_local_backend

        install_local_backend()


try:
    install()
except Exception:
    # verl swallows what is raised here; without this print the only symptom would be a later "Unknown trainer".
    print("dataflex-verl could not hook into verl; its trainer modes are not available:", file=sys.stderr)
    traceback.print_exc()
    raise
