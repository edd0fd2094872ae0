"""docs/mixing.md: its command checks clean, its scorer chooses prompts, its settings, presets and metrics are there."""

from __future__ import annotations

import re

import numpy as np
import pytest

import dataflex_hooks as dh
from dataflex_hooks.config import _TOP
from dataflex_hooks.plugins.select import SelectPlugin
from dataflex_verl.presets.providers import all_presets
from tests.unit.docs.snippets import ROOT, blocks, checks

PAGE = "docs/mixing.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


def test_the_command_checks_clean(dataflex, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).touch()
    (block,) = blocks(PAGE, "bash")
    (arguments,) = checks(block.text)
    result = dataflex(*arguments)
    assert result.exit_code == 0, result.output
    assert "lands in: the domain sampler, from reward_gap" in result.output


def test_the_scorer_chooses_prompts(registry):
    (block,) = blocks(PAGE, "python")
    names: dict = {"__name__": "shown"}
    exec(block.text, names)
    dh.register_scorer("level")(names["Level"])
    plugin = SelectPlugin("level", {"name": "threshold_band", "params": {"low": 1.0, "high": 4.0}})
    candidates = dh.PromptBatch(np.arange(4), None, {"level": np.arange(4) * 1.5})
    assert plugin.pre_rollout(candidates, dh.StepContext(step=1)).admit.tolist() == [False, True, True, False]


def test_what_it_names_exists():
    settings = set(re.findall(r"`\+?dataflex\.([a-z_]+)", TEXT)) - {"plugins"}
    assert settings >= {"domains", "domain_key", "on_starved", "resume"} and settings <= set(_TOP)
    (listed,) = re.findall(r"^Presets: (.*?);", TEXT, re.MULTILINE | re.DOTALL)
    presets = set(re.findall(r"`(\w+)`", listed))
    assert len(presets) == 8 and presets <= {preset.name for preset in all_presets()[0]}
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in ("prop", "proposed", "generated", "trained", "reward", "score", "epochs", "forced"):
        assert f"`{name}_<domain>`" in metrics


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", TEXT))
def test_its_links_lead_somewhere(link):
    assert (ROOT / "docs" / link).is_file()
