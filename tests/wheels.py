"""Packages as pip installs them: built as wheels, put into a folder, and on this process's path for a while.

``contrib_site()`` has all packages of ``contrib/``. It is built once for what they contain, with what the ``dev`` extra
installed and no network, below ``build/`` of the checkout; workers that want it at the same time wait for the first.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from dataflex_hooks import REGISTRY
from dataflex_hooks.registry import KINDS

ROOT = Path(__file__).resolve().parent.parent
CONTRIB = ROOT / "contrib"
BUILD = ROOT / "build" / "contrib"
_NO_PART = {"tests", "__pycache__", ".pytest_cache"}


def packages() -> list[Path]:
    """Folders of the packages of ``contrib/``, by name."""
    return sorted(path.parent for path in CONTRIB.glob("*/pyproject.toml"))


def pip(command: str, *arguments: object) -> None:
    """Run pip of this environment without network and dependencies."""
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *options, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"pip {command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def install(wheels: Iterable[Path], folder: Path) -> None:
    """Have pip install wheels into a folder."""
    pip("install", "--no-compile", "--target", folder, *wheels)


class Site:
    """A folder of installed packages that is put on the path of this process, and taken off again.

    Off the path, nothing of it is found: no module, entry point or registered component. Back on it, the same modules
    and classes are there as before, so that what holds one of them may go on using it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, ModuleType] = {}
        self._classes: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}

    @contextmanager
    def on_path(self) -> Iterator[Path]:
        """Put it first on the path; gives the folder."""
        for kind in KINDS:  # our own components are registered when they are first asked for
            REGISTRY.names(kind)
        names, classes = self._top_names(), REGISTRY._classes
        modules = self._taken(names)
        REGISTRY._classes = {kind: {**classes[kind], **self._classes[kind]} for kind in KINDS}
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        try:
            yield self.folder
        finally:
            sys.path.remove(str(self.folder))
            importlib.invalidate_caches()
            self._modules = self._taken(names)
            sys.modules.update(modules)
            for kind, of in REGISTRY._classes.items():
                self._classes[kind] = {name: cls for name, cls in of.items() if name not in classes[kind]}
            REGISTRY._classes = classes

    def _top_names(self) -> set[str]:
        return {path.stem for path in self.folder.iterdir() if path.suffix in ("", ".py")}

    @staticmethod
    def _taken(names: set[str]) -> dict[str, ModuleType]:
        """Take the loaded modules below these names out of the process."""
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in names}


@functools.cache
def contrib_site() -> Site:
    """The installed wheels of all packages of ``contrib/``."""
    return Site(build() / "site")


def build() -> Path:
    """Build the wheels of ``contrib/`` and install them, unless that has been done for what it now contains.

    Returns:
        A folder with ``wheels/*.whl`` and ``site/``.
    """
    place = BUILD / _content()
    if place.exists():
        return place
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            unfinished = Path(tempfile.mkdtemp(dir=BUILD))
            try:
                pip("wheel", "--no-build-isolation", "--wheel-dir", unfinished / "wheels", *packages())
                install(sorted((unfinished / "wheels").glob("*.whl")), unfinished / "site")
                unfinished.rename(place)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return place


def _content() -> str:
    """A checksum of everything of the packages that can be part of a wheel."""
    sums = hashlib.sha256()
    for package in packages():
        for path in sorted(package.rglob("*")):
            part = path.relative_to(package)
            if path.is_file() and not _NO_PART.intersection(part.parts):
                sums.update(f"{package.name}/{part.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return sums.hexdigest()[:16]
