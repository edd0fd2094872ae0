"""Start-up checks: everything about a configuration that can be refused before Ray starts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from dataflex_hooks import Problem

MODE = "trainer.v1.trainer_mode"
LATER_MODES: Mapping[str, str] = MappingProxyType(
    {
        "dataflex_colocate_async": "it comes in a later version; use dataflex_sync",
        "dataflex_separate_async": "it comes in a later version; use dataflex_sync",
    }
)
"""Trainer modes that this version does not have."""

_FILES = ("data.train_files", "data.val_files", "reward.custom_reward_function.path")
_MODEL = "actor_rollout_ref.model.path"


def find_problems(config: DictConfig, local: bool = False) -> list[Problem]:
    """Everything that this package knows to be wrong with a composed configuration of verl.

    Args:
        config: verl's whole configuration.
        local: whether the run is on this machine alone, so that files have to be here.
    """
    problems = list(_missing_files(config)) if local else []
    mode = str(OmegaConf.select(config, MODE))
    # Torch loads in seconds: a run without anything of ours does not wait for it here.
    if mode.startswith("dataflex") or OmegaConf.select(config, "dataflex") is not None:
        problems = [*_mode_problems(config, mode), *problems]
    return problems


def _mode_problems(config: DictConfig, mode: str) -> list[Problem]:
    from dataflex_hooks import ConfigError, Problem
    from dataflex_hooks.errors import Described, did_you_mean, one_of
    from dataflex_verl.trainer import MODES, prepare

    if mode in LATER_MODES:
        return [Problem(MODE, mode, one_of(MODES), LATER_MODES[mode])]
    if mode.startswith("dataflex") and mode not in MODES:
        return [Problem(MODE, mode, one_of(MODES), did_you_mean(mode, MODES))]
    if mode not in MODES:
        given = Described(f"a dataflex block, with {MODE}={mode}")
        return [Problem("dataflex", given, f"the block only with {MODE} {one_of(MODES)}: nothing would act on it")]
    problems = []
    if not OmegaConf.select(config, "trainer.use_v1", default=True):
        problems.append(Problem("trainer.use_v1", False, f"true: verl's older trainer does not read {MODE}"))
    try:
        prepare(config)
    except ConfigError as error:
        problems += error.problems
    except InstantiationException as error:
        # The loss cannot be asked then; what is wrong with the block is still worth knowing.
        problems += [*_block_problems(config), _refused_by_verl(error)]
    return problems


def _block_problems(config: DictConfig) -> list[Problem]:
    from dataflex_hooks import ConfigError, HookManager

    estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
    try:
        HookManager.from_config(OmegaConf.select(config, "dataflex"), estimator=estimator, has_groups=None)
    except ConfigError as error:
        return error.problems
    return []


def _refused_by_verl(error: InstantiationException) -> Problem:
    from dataflex_hooks import Problem
    from dataflex_hooks.errors import Described

    reason = str(error.__cause__ or error).strip()
    return Problem("actor_rollout_ref.actor", Described("settings that verl refuses"), reason, cause=error)


def _missing_files(config: DictConfig) -> Iterator[Problem]:
    for setting in _FILES:
        for path in _listed(OmegaConf.select(config, setting)):
            if not _exists(path):
                yield _missing(setting, path, "a file on this machine")
    model = OmegaConf.select(config, _MODEL)
    # A bare "name" or "owner/name" may be in the Hugging Face cache.
    if isinstance(model, str) and model.startswith(("/", "~", ".")) and not _exists(model):
        yield _missing(_MODEL, model, "a model directory on this machine")


def _listed(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else [] if value is None else list(value)
    return [path for path in values if isinstance(path, str) and "://" not in path]


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _missing(setting: str, path: str, accepted: str) -> Problem:
    from dataflex_hooks import Problem

    return Problem(setting, path, accepted, "there is nothing at this path")
