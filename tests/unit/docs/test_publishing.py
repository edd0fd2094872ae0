"""docs/plugins/publishing.md: its pyproject and its preset, with the plugin of the page before, are a package."""

from __future__ import annotations

import sys
import tomllib

import pytest

from tests.unit.docs.snippets import blocks

PAGE = "docs/plugins/publishing.md"
CHECK = ["check", "trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo"]


@pytest.fixture
def package(distribution, registry):
    """Installs what the page shows."""

    def install() -> None:
        (pyproject,), (preset,) = blocks(PAGE, "toml"), blocks(PAGE, "yaml")
        project = tomllib.loads(pyproject.text)["project"]
        plugin = blocks("docs/plugins/writing.md", "python")[0].text
        distribution(
            project["name"],
            project["entry-points"]["dataflex_hooks"],
            {"dataflex_short/__init__.py": plugin, "dataflex_short/dataflex/short.yaml": preset.text},
            version=project["version"],
            requires=project["dependencies"],
            presets=project["entry-points"]["dataflex_presets"],
        )

    yield install
    sys.modules.pop("dataflex_short", None)


def test_the_preset_runs_the_plugin_of_the_package(package, dataflex) -> None:
    before = dataflex(*CHECK, "+dataflex=short")
    assert before.exit_code == 2 and "got 'short'" in before.output
    package()
    after = dataflex(*CHECK, "+dataflex=short")
    assert after.exit_code == 0, after.output
    assert "(dataflex-short 0.1.0)" in after.output and "provides mask" in after.output
    listed = dataflex("presets").output
    assert "Masks responses of more than 128 tokens." in listed
