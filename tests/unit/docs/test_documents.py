"""What the documents show works: every training command checks clean, every output is today's, Python runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import dataflex_hooks as dh
from tests.unit.docs.snippets import CHINESE, DOCUMENTS, ENGLISH, ROOT, blocks, checks, commands, sessions

# The Chinese documents show the same code, and the same output: a test below.
SHELL = [block for document in ENGLISH for block in blocks(document, "bash")]
CONSOLE = [block for document in ENGLISH for block in blocks(document, "console")]
PLUGINS = blocks("README.md", "python")
KNOWN = {"python", "python3", "dataflex", "pip", ".venv/bin/python", "export"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files that commands name, and the README's plugin as ``my_plugins.py``."""
    for name in ("train.parquet", "val.parquet", "reward.py", "model/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "my_plugins.py").write_text(PLUGINS[0].text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_plugins", raising=False)
    return tmp_path


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_training_commands_check_clean(block, dataflex, home) -> None:
    for words in commands(block.text):
        assert words[0] in KNOWN or "=" in words[0], words
    for arguments in checks(block.text):
        result = dataflex(*arguments)
        assert result.exit_code == 0, (arguments, result.output)
        assert "DataFlex plan: " in result.output or "--local" in arguments


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_shown_output_is_what_the_command_says(block, dataflex, home) -> None:
    """``python tests/unit/docs/snippets.py --write`` brings the documents up to date."""
    (home / "my_plugins.py").unlink()
    for _, words, output in sessions(block):
        assert words[0] == "dataflex"
        assert dataflex(*words[1:]).output == output


def test_enough_is_shown() -> None:
    shown = [arguments for block in SHELL for arguments in checks(block.text)]
    assert len(shown) >= 8 and any("--local" in arguments for arguments in shown)
    assert len(CONSOLE) >= 9


@pytest.mark.parametrize(("english", "chinese"), list(zip(ENGLISH, CHINESE, strict=True)))
def test_both_languages_show_the_same_code(english: str, chinese: str) -> None:
    def code(document: str) -> list[tuple[str, str]]:
        shown = []
        for block in blocks(document, "bash", "console", "python", "toml"):
            text = block.text.replace("<你的参数>", "<your arguments>")
            shown.append((block.language, re.sub(r"\s*#.*", "", text)))
        return shown

    assert code(english) == code(chinese)


@pytest.mark.parametrize("document", [*DOCUMENTS, "docs/metrics.md", "docs/design.md"])
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or ((ROOT / document).parent / target).exists(), target


def test_the_plugin_of_the_readme_has_twenty_lines_at_most_and_masks_what_it_says(batches, ctx, token_mean) -> None:
    (block,) = PLUGINS
    assert len(block.text.splitlines()) <= 20
    names: dict = {}
    exec(block.text, names)
    rows = [batches.Row(uid="a", length=2), batches.Row(uid="a", session=1, length=5)]
    for longest, kept in ((3, [True, False]), (5, [True, True])):
        hooks = dh.HookManager.from_config(
            None, estimator="grpo", has_groups=True, extra_plugins={"short": names["KeepShort"](longest)}
        )
        assert hooks.post_advantage(batches.build(rows), ctx, token_mean).row_keep.tolist() == kept


def test_metrics_that_the_documents_name_are_documented() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for document in DOCUMENTS:
        for name in re.findall(
            r"`(?:dataflex/|(?=timing_s/dataflex))([a-z_/<>]+)`", (ROOT / document).read_text(encoding="utf-8")
        ):
            assert f"`{name}`" in documented, (document, name)
