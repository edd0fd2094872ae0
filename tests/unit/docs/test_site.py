"""The site builds without a warning, every link and anchor in it leads somewhere, and no page loads from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import dataflex_hooks
from dataflex_hooks import testing
from dataflex_hooks.decisions import EXCLUSIVE, SHARED
from dataflex_hooks.hookspecs import HOOKS
from tests.unit.docs.snippets import ROOT

pytestmark = pytest.mark.xdist_group("site")  # one build serves all tests here

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


class Parsed(HTMLParser):
    """Links, ids and what a page loads when it is viewed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = {""}
        self.language = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "html":
            self.language = given.get("lang", "")
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and RELATIONS & set(given.get("rel", "").split()):
            self.loads.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        self.loads += loaded_by_css(given.get("style", ""))


def loaded_by_css(text: str) -> list[str]:
    found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", text)
    return [url or imported for url, imported in found if not (url or imported).startswith("data:")]


def elsewhere(loads: list[str]) -> list[str]:
    return [url for url in loads if re.match(r"(?!data:)[a-z]+:|//", url)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    started = time.monotonic()
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    print(f"mkdocs build --strict: {time.monotonic() - started:.1f} s")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parsed]:
    return {path: Parsed(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_every_document_is_a_page(site: Path) -> None:
    for document in (ROOT / "docs").rglob("*.md"):
        name = document.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / (name.with_name("index.html") if name.name == "README.html" else name)).is_file()


def test_a_page_loads_nothing_from_elsewhere(pages: dict[Path, Parsed], site: Path) -> None:
    assert len(pages) > 40
    for path, page in pages.items():
        assert not elsewhere(page.loads), path
        if path.name != "404.html":  # served for any address, so its paths are absolute
            assert all((path.parent / unquote(load.split("?")[0])).is_file() for load in page.loads), path
    for path in site.rglob("*.css"):
        assert not elsewhere(loaded_by_css(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://x.org/a.js">',
        '<link rel="stylesheet" href="//x.org/a.css">',
        '<p style="background: url(https://x.org/a.png)">',
        '<img srcset="a.png 1x, https://x.org/b.png 2x">',
    ],
)
def test_what_is_loaded_from_elsewhere_is_noticed(text: str) -> None:
    assert elsewhere(Parsed(text).loads)
    assert not elsewhere(Parsed(re.sub(r"(https:)?//x.org/", "", text)).loads)


def test_every_link_and_anchor_leads_somewhere(pages: dict[Path, Parsed]) -> None:
    checked = 0
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if path.name == "404.html" or re.match(r"[a-z]+:", target):
                continue
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            assert there.is_file(), (path, link)
            if there in pages:
                assert anchor in pages[there].ids or anchor.startswith("__"), (path, link)
            checked += 1
    assert checked > 1000


def test_a_chinese_page_says_that_it_is_one(pages: dict[Path, Parsed]) -> None:
    chinese = {path.name: page.language for path, page in pages.items() if ".zh." in path.name}
    assert len(chinese) == 4 and set(chinese.values()) == {"zh"}
    assert {page.language for path, page in pages.items() if ".zh." not in path.name} == {"en"}


def test_hook_headings_are_the_arguments_of_the_hooks(pages: dict[Path, Parsed], site: Path) -> None:
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    headings = re.findall(
        r"^## `(\w+)\((.*)\)`\n\n.+\n\n<!-- ::: dataflex_hooks\.hookspecs\.(\w+)$", text, re.MULTILINE
    )
    assert {name: tuple(arguments.split(", ")) for name, arguments, _ in headings} == dict(HOOKS)
    assert all(name == shown for name, _, shown in headings)
    html = (site / "hooks.html").read_text(encoding="utf-8")
    assert html.count("Fires when") + html.count("Fires at") == len(HOOKS)  # the contracts themselves
    assert ":class:" not in html and ":meth:" not in html
    kit = (site / "kit.html").read_text(encoding="utf-8")  # its docstrings describe several names in a line
    assert "<b><code>domains</code></b>" in kit and "lengths, domains" not in re.sub("<script.*?</script>", "", kit)


def test_the_hooks_page_lists_every_part_of_a_decision() -> None:
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `provides` \|(.+)\|$", text, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == EXCLUSIVE | SHARED


def test_the_picture_of_the_step_names_every_hook_in_order() -> None:
    picture = (ROOT / "docs" / "assets" / "step.svg").read_text(encoding="utf-8")
    assert re.findall(r'monospace">(\w+)<', picture) == list(HOOKS)


def test_everything_that_is_exported_is_on_a_page() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    shown = set(re.findall(r"^<!-- ::: [\w.]*\.(\w+)(?: -->)?$", texts, re.MULTILINE))
    constants = {"__version__", "REGISTRY", "PROPERTIES", "hookimpl", "hookspec"}
    assert shown >= (set(dataflex_hooks.__all__) | set(testing.__all__)) - constants


def test_every_package_of_contrib_is_listed() -> None:
    text = (ROOT / "contrib" / "README.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "contrib").glob("*/README.md")}
    assert set(re.findall(r"\]\(([\w-]+)/README\.md\)", text)) == packages and packages


def test_tables_come_out_as_tables(pages: dict[Path, Parsed], site: Path) -> None:
    """A row that a blank line cuts off, or a bar escaped inside code, shows its Markdown to the reader."""
    for path in pages:
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.findall(r"<p>\|[^<]*\|", text), path
        assert r"\|" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL), path
