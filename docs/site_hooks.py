"""What MkDocs needs to build these pages: they are written for GitHub first, where the repository is around them.

Documents outside ``docs/`` become pages, other files that a page links to are copied beside it, and every relative link
is turned from a path in the repository into one in the site. MkDocs then checks all of them, anchors included.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    "README.md": "project/readme.md",
    "README.zh.md": "project/readme.zh.md",
    "CHANGELOG.md": "project/changelog.md",
    "contrib/README.md": "contrib/index.md",
}
_FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")
_BREAK = re.compile(r"(?<=[\u3000-\u30ff\u4e00-\u9fff\uff00-\uffef])\n(?=[\u4e00-\u9fff\uff00-\uffef])")
_OUTPUT = re.compile(r"\A(`{3,})(text|console)$", re.MULTILINE)
_DOCSTRING = re.compile(r"<!-- (::: .*?) -->", re.DOTALL)
_ROLE = re.compile(r":(?:class|meth|func|data|attr|mod|exc):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def outside() -> dict[str, str]:
    """Documents outside ``docs/``, by path in the repository: the page that each becomes."""
    packages = sorted(path.parent.name for path in ROOT.glob("contrib/*/README.md"))
    return DOCUMENTS | {f"contrib/{name}/README.md": f"contrib/{name}.md" for name in packages}


def in_site(path: str) -> str | None:
    """Where a file of the repository lies in the site's sources, None if there is no such file."""
    page = outside().get(path)
    if page is not None:
        return page
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if (ROOT / path).is_file() else None


def in_repository(page: str) -> str:
    """Where a page was written."""
    return next((path for path, name in outside().items() if name == page), f"docs/{page}")


def links(text: str, document: str) -> list[tuple[str, str]]:
    """Relative links of a document: as written, and as paths in the repository."""
    found = [target for _, target, _ in _LINK.findall(_FENCE.sub("", text)) if target and ":" not in target]
    return [(target, posixpath.normpath(posixpath.join(posixpath.dirname(document), target))) for target in found]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the packages of ``contrib/`` into the navigation."""
    packages = [page for page in outside().values() if page.startswith("contrib/")]
    (plugins,) = [section["Plugins"] for section in config.nav or [] if "Plugins" in section]
    plugins.append({"Packages": packages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents and files outside ``docs/`` that pages are or link to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for path, page in outside().items():
        texts[path] = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=texts[path]))
    for document, text in texts.items():
        for _, path in links(text, document):
            source = in_site(path)
            if source and source.startswith("source/") and files.get_file_from_path(source) is None:
                files.append(File.generated(config, source, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between files of the site.

    Also joins lines of Chinese, between which a browser would show a space, has long lines of output wrapped where they
    are no picture, and puts docstrings in where a comment names them, which GitHub does not show.
    """
    markdown = _DOCSTRING.sub(r"\1", markdown)
    document, here = in_repository(page.file.src_uri), posixpath.dirname(page.file.src_uri)
    moved = {target: in_site(path) for target, path in links(markdown, document)}

    def rewrite(match: re.Match[str]) -> str:
        source = moved.get(match[2])
        return match[0] if source is None else f"{match[1]}{posixpath.relpath(source, here or '.')}{match[3]}"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        shown = fence[0] if "──" in fence[0] else _OUTPUT.sub(r"\1{ .\2 .wrapped }", fence[0])
        parts += [_LINK.sub(rewrite, _BREAK.sub("", markdown[end : fence.start()])), shown]
        end = fence.end()
    return "".join([*parts, _LINK.sub(rewrite, _BREAK.sub("", markdown[end:]))])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the marks of docstrings (``:class:`...```, ``Example::``) as readers expect them."""
    return _ROLE.sub(r"<code>\1</code>", html).replace("<p>Example::</p>", "<p>Example:</p>")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Say that a Chinese page is one: browsers choose fonts and screen readers a voice by it."""
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if ".zh." in page.file.src_uri else output
