"""The Hydra config group ``dataflex``: presets found with no path flag, and checked before the job starts.

A config source of its own and not ``pkg://`` paths: Hydra would import every provider's package in every run, while
this one reads a file when a run names it. It also adds the start-up check to each preset, so that a third party's file
needs nothing but its settings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from dataflex_verl.presets.providers import FOLDER, BadPreset, all_presets, find_preset

CALLBACK = f"hydra.callbacks.{FOLDER}"
REFUSED = 2


class PresetSource(ConfigSource):
    """Serves ``dataflex/<preset>``, moved under ``dataflex``, with the start-up check beside it."""

    @staticmethod
    def scheme() -> str:
        return "dataflex"

    def load_config(self, config_path: str) -> ConfigResult:
        name = _preset_name(config_path)
        try:
            preset = find_preset(name)
            if preset is None:
                raise ConfigLoadError(f"no preset {name!r}")
            content: dict[str, Any] = {FOLDER: preset.block()}
            callback = {"_target_": f"{PresetCheck.__module__}.{PresetCheck.__qualname__}"}
            content["hydra"] = {"callbacks": {FOLDER: {**callback, "presets": {name: preset.labels()}}}}
        except BadPreset as error:
            raise ConfigLoadError(str(error)) from error
        return ConfigResult(
            provider=preset.source,
            path=self.full_path(),
            config=OmegaConf.create(content),
            header={"package": "_global_"},
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", FOLDER)

    def is_config(self, config_path: str) -> bool:
        if not config_path.startswith(f"{FOLDER}/"):
            return False
        return any(preset.name == _preset_name(config_path) for preset in all_presets()[0])

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path.strip("/") == FOLDER:
            return [] if results_filter is ObjectType.GROUP else sorted({preset.name for preset in all_presets()[0]})
        return [] if results_filter is ObjectType.CONFIG else [FOLDER]


class PresetSearchPath(SearchPathPlugin):
    """Adds the presets behind the application's own configuration."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="dataflex", path=f"{PresetSource.scheme()}://presets")


class PresetCheck(Callback):
    """Refuses a configuration before the job starts, with everything wrong with it.

    Hydra turns an exception of a callback into a warning, so this one leaves the process, with status 2.

    Args:
        presets: labels of the plugins by preset, gathered as the presets were composed.
    """

    def __init__(self, presets: Mapping[str, Sequence[str]]) -> None:
        self._presets = presets
        self._checked = False

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check(config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the jobs of a multirun, each with a configuration of its own."""
        if not self._checked:
            self._check(config)

    def on_job_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._checked = False

    def _check(self, config: DictConfig) -> None:
        from dataflex_verl.commands.checks import examine, refusal
        from dataflex_verl.preset_checks import preset_problems

        self._checked = True
        problems = preset_problems(list(config.hydra.overrides.task), self._presets) + examine(config).problems
        if problems:
            print(refusal(problems), file=sys.stderr, flush=True)
            raise SystemExit(REFUSED)


def register(plugins: Plugins | None = None) -> None:
    """Register with Hydra in this process. Safe to call again.

    Args:
        plugins: Hydra's plugins; without them this process's.
    """
    plugins = plugins or Plugins.instance()
    plugins.register(PresetSource)
    plugins.register(PresetSearchPath)


def _preset_name(config_path: str) -> str:
    return config_path.removeprefix(f"{FOLDER}/").removesuffix(".yaml")
