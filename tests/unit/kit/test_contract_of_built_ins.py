"""Every preset keeps the contract that plugins of other packages are checked by."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

import dataflex_hooks as df
from dataflex_hooks.config import PluginSettings, read
from dataflex_hooks.loader import build_plugin
from dataflex_hooks.testing import assert_plugin_contract, random_batch
from dataflex_verl.presets.providers import all_presets

PRESETS = {preset.name: preset.block() for preset in all_presets()[0] if preset.distribution == "dataflex-verl"}
FACTS = {"rollouts": 4, "response_length": 12}
BATCHES = {"failed": [random_batch(seed, rewards=[0.0, 1.0, math.nan]) for seed in (0, 1)]}
"""Batches on which a preset decides something, where it has nothing to say on those of the kit."""


def settings_of(block: dict[str, Any]) -> PluginSettings:
    config, problems = read(block)
    assert not problems
    (settings,) = config.plugins
    return settings


def build(settings: PluginSettings) -> object:
    return build_plugin(settings, {}, FACTS).plugin


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_keep_the_contract(name):
    assert_plugin_contract(partial(build, settings_of(PRESETS[name])), batches=BATCHES.get(name))


DROPS = [name for name, block in PRESETS.items() if settings_of(block).plugin == "select"]


@pytest.mark.parametrize("name", DROPS)
def test_selecting_presets_keep_it_when_they_drop(name):
    settings = settings_of(PRESETS[name])
    settings.keywords["effect"] = "drop"
    assert_plugin_contract(partial(build, settings), batches=BATCHES.get(name))


def test_there_is_a_preset_of_every_mechanism():
    assert {settings_of(block).plugin for block in PRESETS.values()} == {"select", "reweight", "mix"}
    assert df.REGISTRY.names("selector")
