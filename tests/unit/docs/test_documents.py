"""What the documents show works: every block of code is run, checked or compared, and every link leads somewhere.

A block is covered by its language: ``bash`` commands are parsed and trainings checked, outputs in a ``console`` are
today's, ``python`` is run, ``yaml`` is built, ``toml`` is read. Tests that are shown stand in a file of ours, word for
word. Any other language is refused, so that nothing is shown that nobody runs.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

import dataflex_hooks as dh
from dataflex_verl.cli import app
from tests.unit.docs.snippets import (
    CHINESE,
    DOCUMENTS,
    ENGLISH,
    PACKAGES,
    ROOT,
    TRANSLATED,
    Block,
    blocks,
    checks,
    commands,
    sessions,
)
from tests.unit.log.simulated import simulate

# The Chinese documents show the same code, and the same output: a test below.
ALL = [block for document in ENGLISH + PACKAGES for block in blocks(document)]
FILES = {
    "python": ("dataflex_hooks/**/*.py", "contrib/**/*.py", "tests/**/*.py"),
    "yaml": ("dataflex_verl/presets/**/*.yaml", "contrib/**/*.yaml"),
    "toml": ("contrib/*/pyproject.toml",),
}
INERT = {"text", "json"}
LOOKS_LIKE_CODE = re.compile(
    r"^(?:\$ )?(?:dataflex (?!\w+:)|(?:python3?|pip|import|from|\+\+?dataflex) )", re.MULTILINE
)
# A package is shown in parts; the test named builds it out of them.
TESTED_AS_A_WHOLE = {"docs/plugins/publishing.md": "test_publishing.py"}


def stands_in_a_file(block: Block) -> bool:
    texts = (path.read_text("utf-8") for pattern in FILES.get(block.language, ()) for path in ROOT.glob(pattern))
    return any(block.text.strip() in text for text in texts)


def has_a_test_on_its_page(block: Block) -> bool:
    """The command of a method's page: test_method_pages starts it, without the time that a check takes."""
    page = (ROOT / block.document).read_text(encoding="utf-8")
    return block.document.startswith("docs/methods/") and f"## Command\n\n```bash\n{block.text}```" in page


def of(language: str) -> list[Block]:
    return [block for block in ALL if block.language == language and not has_a_test_on_its_page(block)]


def code_of(document: str) -> str:
    """The Python of a document as one module, as a reader would put it into a file; without tests."""
    return "\n\n".join(block.text for block in blocks(document, "python") if not is_a_test(block))


def write_code(document: str, folder: Path) -> None:
    """The Python of a document as the files that its commands import: named in a first line, or ``my_plugins.py``."""
    (folder / "my_plugins.py").write_text(code_of(document))
    for block in blocks(document, "python"):
        if named := re.match(r"# (\w+\.py)\n", block.text):
            (folder / named[1]).write_text(block.text)


def is_a_test(block: Block) -> bool:
    return "\ndef test_" in f"\n{block.text}" and stands_in_a_file(block)


def made_by(document: str) -> list[list[str]]:
    """Arguments of every ``dataflex new`` that a document shows."""
    shown = [words for block in blocks(document, "bash") for words in commands(block.text)]
    return [words[1:] for words in shown if words[:2] == ["dataflex", "new"]]


@pytest.fixture
def install(tmp_path: Path, dataflex, distribution, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has the packages that a document is about found as if pip had installed them.

    They are those that it makes with ``dataflex new``; for a page of ``contrib/``, all that are there.
    """

    imported: list[str] = []

    def make(document: str) -> None:
        for words in made_by(document):
            assert dataflex(*words).exit_code == 0
            found(tmp_path / words[1])
        for project in ROOT.glob("contrib/*/pyproject.toml") if document in PACKAGES else ():
            found(project.parent)

    def found(folder: Path) -> None:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        points = project["entry-points"]
        imported.append(project["name"].replace("-", "_"))
        distribution(project["name"], points["dataflex_hooks"], {}, presets=points.get("dataflex_presets"))
        monkeypatch.syspath_prepend(str(folder))

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] in imported]:
        del sys.modules[name]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry) -> Iterator[Path]:
    """A directory with the files that commands name."""
    for name in ("train.parquet", "val.parquet", "reward.py", "model/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "demos.jsonl").write_text('{"prompt": [1, 2], "response": [3]}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_every_block_is_covered() -> None:
    covered = {"bash", "console", *FILES, *INERT}
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        fences = re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)
        assert len(fences) == 2 * len(blocks(document)), f"{document}: a fence that is indented, or of another kind"
        for block in blocks(document):
            assert block.language in covered, f"{block}: one of {', '.join(sorted(covered))}"
            assert block.language not in INERT or not LOOKS_LIKE_CODE.search(block.text), f"{block}: code as text"
    for document, test in TESTED_AS_A_WHOLE.items():
        assert document in (Path(__file__).parent / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", of("bash"), ids=str)
def test_commands_are_those_of_tools_that_are_there(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown, made = commands(block.text), {words[1] for words in made_by(block.document)}
    assert shown
    for words in shown:
        assert problem_of(words, made) is None, words


@pytest.mark.parametrize("block", [block for block in of("bash") if any(checks(block.text))], ids=str)
def test_trainings_check_clean(block: Block, dataflex, home: Path, install) -> None:
    write_code(block.document, home)
    install(block.document)
    for arguments in checks(block.text):
        result = dataflex(*arguments)
        assert result.exit_code == 0, (arguments, result.output)
        assert "DataFlex plan: " in result.output or "--local" in arguments


@pytest.mark.parametrize("block", of("console"), ids=str)
def test_shown_output_is_what_the_command_says(block: Block, dataflex, home: Path) -> None:
    """``python tests/unit/docs/snippets.py --write`` brings the documents up to date."""
    for _, words, output in sessions(block):
        assert words[0] == "dataflex"
        assert dataflex(*words[1:]).output == output


@pytest.mark.parametrize("document", sorted({block.document for block in of("python")}))
def test_python_runs_and_its_plugins_are_accepted(document: str, home: Path) -> None:
    if "checkpoints/project/run" in code_of(document):
        simulate({}, home / "checkpoints" / "project" / "run", steps=2)
    module = ModuleType("shown")
    exec(compile(code_of(document), document, "exec"), module.__dict__)
    shown = [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == "shown"]
    for cls in shown:
        if any(hasattr(cls, hook) for hook in dh.hookspecs.HOOKS):
            dh.HookManager.from_config(None, estimator="grpo", has_groups=True, extra_plugins={"shown": cls()})
    if any(name.startswith("test_") for name in vars(module)):
        (home / "test_shown.py").write_text(code_of(document))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shown.py"]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", [block for block in of("yaml") if not stands_in_a_file(block)], ids=str)
def test_yaml_is_a_block_that_builds(block: Block) -> None:
    shown = yaml.safe_load(block.text)
    if block.document not in TESTED_AS_A_WHOLE:
        assert set(shown) in ({"dataflex"}, {"plugins"}), f"{block}: dataflex, or what stands under it"
        within = shown.get("dataflex", shown)
        hooks = dh.HookManager.from_config(within, estimator="grpo", has_groups=True)
        assert hooks.labels == tuple(within["plugins"])


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_declares_entry_points_of_ours(block: Block) -> None:
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    assert groups and set(groups) <= {"dataflex_hooks", "dataflex_presets"}
    for points in groups.values():
        assert all(re.fullmatch(r"[a-z_][\w.]*(:\w+)?", target) for target in points.values())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_named_in_a_sentence_are_there(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in re.findall(r"`(python (?:-m )?[\w./]+(?: [^`]*)?)`", prose(document)):
        if "..." not in words and "main_ppo" not in words:
            assert problem_of(shlex.split(words)) is None, words


def test_enough_is_shown() -> None:
    shown = [arguments for block in of("bash") for arguments in checks(block.text)]
    assert len(shown) >= 16 and any("--local" in arguments for arguments in shown)
    assert len(of("console")) >= 9 and len(of("python")) >= 8 and len(of("yaml")) >= 3 and len(of("toml")) >= 1


def problem_of(words: list[str], made: Collection[str] = ()) -> str | None:
    """Why a command cannot be run as it stands, with the folders ``made`` before it; None if it can."""
    tool, *rest = words
    tool = tool.removeprefix(".venv/bin/")
    if tool == "dataflex":
        return dataflex_problem(rest)
    if tool in ("python", "python3"):
        if rest[0] == "-m":
            return None if is_a_module(rest[1]) else f"no module {rest[1]}"
        return None if rest[0] == "-c" or Path(rest[0]).is_file() else f"no file {rest[0]}"
    if tool == "pip":
        paths = [word.split("[")[0] for word in rest[1:] if word.startswith(".")]
        there = [path for path in paths if Path(path).is_dir() or path.removeprefix("./") in made]
        return None if rest[0] == "install" and paths and there == paths else f"pip {shlex.join(rest)}"
    return None if tool in ("export", "mkdocs", "pytest") else f"{tool}: not known here"


def is_a_module(name: str) -> bool:
    """Looks for its file: importing verl, to ask, would take seconds."""
    top, *rest = name.split(".")
    spec = find_spec(top)
    places = [Path(place).joinpath(*rest) for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    return bool(spec) and (not rest or any(p.with_suffix(".py").is_file() or p.is_dir() for p in places))


def dataflex_problem(words: list[str]) -> str | None:
    group: Any = typer.main.get_command(app)
    if words[0] not in group.commands:
        return f"no command {words[0]}"
    try:
        group.commands[words[0]].make_context(words[0], list(words[1:]))
    except Exception as error:  # typer's classes of errors are its own or click's, by its version
        return str(error)
    return None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("dataflex chek", "dataflex check"),
        ("dataflex demo --step 3", "dataflex demo --steps 3"),
        ("python -m tests.benchmarks.nothing", "python -m tests.benchmarks.methods"),
        ("python tests/benchmarks/nothing.py", "python tests/benchmarks/machinery.py"),
        ("pip install ./contrib/nothing", "pip install ./contrib/dataflex-example"),
        ("dataflx demo", "dataflex demo"),
    ],
)
def test_a_command_that_cannot_run_is_noticed(wrong: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert problem_of(shlex.split(wrong)) is not None
    assert problem_of(shlex.split(right)) is None


@pytest.mark.parametrize(("english", "chinese"), list(zip(TRANSLATED, CHINESE, strict=True)))
def test_both_languages_show_the_same_code(english: str, chinese: str) -> None:
    def code(document: str) -> list[tuple[str, str]]:
        shown = []
        for block in blocks(document, "bash", "console", "python", "toml", "yaml"):
            text = block.text.replace("<你的参数>", "<your arguments>")
            shown.append((block.language, re.sub(r"\s*#.*", "", text)))
        return shown

    assert code(english) == code(chinese)


def test_readme_quickstart_overview_and_troubleshooting_are_there_in_chinese() -> None:
    assert {"README.zh.md", "docs/index.zh.md", "docs/quickstart.zh.md", "docs/troubleshooting.zh.md"} <= set(CHINESE)


def prose(document: str) -> str:
    return re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def links(document: str) -> Iterator[tuple[str, str]]:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(document)):
        if not target.startswith("https://"):
            yield target, anchor


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere_on_github_too(document: str) -> None:
    """The site's own links are checked where it is built."""
    for target, anchor in links(document):
        there = (ROOT / document).parent / target if target else ROOT / document
        assert there.exists(), (document, target)
        assert not anchor or anchor in anchors(there), (document, target, anchor)


def test_the_plugin_of_the_readme_has_twenty_lines_at_most_and_masks_what_it_says(batches, ctx, token_mean) -> None:
    block = next(block for block in blocks("README.md", "python") if "KeepShort" in block.text)
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
    for document in ENGLISH + CHINESE:  # packages document their own
        for name in re.findall(r"`(?:dataflex/|(?=timing_s/dataflex))([a-z_/<>]*[a-z_<>])`", prose(document)):
            assert f"`{name}`" in documented, (document, name)
