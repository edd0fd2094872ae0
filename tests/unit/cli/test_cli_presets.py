from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from dataflex_hooks import HookManager
from dataflex_verl import presets
from dataflex_verl.commands.hydra_config import CommandLine, compose_config, verl_directory

NAMES = [
    "ar",
    "ar_paper",
    "curve",
    "dapo",
    "diffband",
    "diffband_reward",
    "difffilter",
    "difficulty_length",
    "failed",
    "gfpo",
    "high_entropy",
    "maxvar",
    "overlong",
    "per",
    "pf_ppo",
    "pf_ppo_max_min",
    "pf_ppo_max_random",
    "softmax",
    "topk",
    "vcrl",
]
MIXERS = ["dads", "doremi", "dump_ucb", "dump_ucb_reward", "odm", "reward_gap", "sec", "static", "tscl"]
"""Each sets the proportions, so they do not stack."""


def manager(block: DictConfig) -> HookManager:
    return HookManager.from_config(block, estimator="grpo", has_groups=True, rollout_n=8, response_length=16)


def test_names_lists_the_files() -> None:
    assert presets.names() == sorted([*NAMES, *MIXERS])


@pytest.mark.parametrize("name", [*NAMES, *MIXERS])
def test_preset_builds_one_plugin_of_its_name(name: str) -> None:
    config = compose_config(CommandLine.parse(presets.overrides([name])))
    assert manager(config.dataflex).labels == (name,)
    assert config.dataflex == presets.block(name)


@pytest.mark.parametrize("chosen", [tuple(NAMES), tuple(reversed(NAMES))])
def test_presets_stack_in_the_order_named(chosen: tuple[str, ...]) -> None:
    assert manager(compose_config(CommandLine.parse(presets.overrides(chosen))).dataflex).labels == chosen


def test_preset_files_are_a_config_group() -> None:
    directory = str(verl_directory() / "trainer" / "config")
    overrides = ["hydra.searchpath=[pkg://dataflex_verl.presets]", "+dataflex=[difffilter,per]"]
    with initialize_config_dir(config_dir=directory, version_base=None):
        config = compose("ppo_trainer", overrides=[*overrides, "++dataflex.plugins.per.actuator.params.alpha=0.25"])
    assert manager(config.dataflex).labels == ("difffilter", "per")
    assert config.dataflex.plugins.per.actuator.params.alpha == 0.25


def test_unknown_preset_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        presets.block("nothing")
