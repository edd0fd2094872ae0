"""The code blocks of the documents, and what the commands in them say.

    python tests/unit/docs/snippets.py --write

writes into the documents what ``dataflex`` says today below each ``$ dataflex ...`` of a ``console`` block.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
CHINESE = tuple(sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.zh.md"), *ROOT.glob("docs/**/*.zh.md"))))
TRANSLATED = tuple(name.replace(".zh.md", ".md") for name in CHINESE)
ENGLISH = tuple(
    str(path.relative_to(ROOT))
    for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
    if ".zh." not in path.name
)
PACKAGES = tuple(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("contrib/**/README.md")))
"""Every document, whether or not a test knows it: a new one is covered by being there."""
DOCUMENTS = ENGLISH + CHINESE + PACKAGES
# What stands for the user's own settings; of these, only this one matters to us.
OWN = ("<your arguments>", "<你的参数>", "<the same arguments>")
OWN_ARGUMENTS = "actor_rollout_ref.rollout.n=8"
# Overrides shown without a command: they are added to this one.
COMMAND = f"dataflex check {OWN_ARGUMENTS} algorithm.adv_estimator=grpo trainer.v1.trainer_mode=dataflex_sync"


@dataclass(frozen=True)
class Block:
    """A fenced block: its document, language, first line's number and text."""

    document: str
    language: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str, *languages: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if not languages or match[1] in languages:
            found.append(Block(document, match[1], text[: match.start()].count("\n") + 2, match[2]))
    return found


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words. A line of overrides alone becomes a command that adds them.

    Variables that a command is given are left out, and a line of several commands is several.
    """
    for own in OWN:
        text = text.replace(own, OWN_ARGUMENTS)
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        command: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                command += [] if not command and re.match(r"[A-Z_]+=", word) else [word]
                continue
            if command and re.match(r"[+~]|trainer\.", command[0]):
                command = [*shlex.split(COMMAND), *command]
            found += [command] if command else []
            command = []
    return found


def checks(text: str) -> Iterator[list[str]]:
    """Arguments of ``dataflex check`` for each training that a shell block shows."""
    for words in commands(text):
        if words[:3] == ["python", "-m", "verl.trainer.main_ppo"]:
            yield ["check", *words[3:]]
        elif words[:2] in (["dataflex", "train"], ["dataflex", "check"]):
            yield ["check", *words[2:]]


def sessions(block: Block) -> list[tuple[str, list[str], str]]:
    """Of a ``console`` block: each command as written, its words after ``dataflex``, and the output below it."""
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        match = re.match(r"(?:.*\\\n)*.*\n", part)
        assert match is not None
        words = commands(match[0])[0]
        found.append((match[0], words, part[match.end() :]))
    return found


def rewrite(say: Callable[[list[str]], str]) -> None:
    """Put what ``say`` answers below each command of every ``console`` block."""
    for document in DOCUMENTS:
        path = ROOT / document
        text = path.read_text(encoding="utf-8")
        for block in blocks(document, "console"):
            new = "".join(f"$ {written}{say(words)}" for written, words, _ in sessions(block))
            text = text.replace(f"```console\n{block.text}```", f"```console\n{new}```")
        path.write_text(text, encoding="utf-8")


def _say(words: list[str]) -> str:
    from typer.testing import CliRunner

    from dataflex_verl.cli import app

    assert words[0] == "dataflex", words
    return CliRunner().invoke(app, words[1:]).output


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    os.chdir(ROOT)
    rewrite(_say)
