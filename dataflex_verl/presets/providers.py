"""Where presets come from: this package, and packages that declare themselves in the group ``dataflex_presets``.

An entry point of that group names a package; its presets are the files ``dataflex/*.yaml`` below it, written as ours
are. They are found without importing the package, and read only when a run names them or somebody lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

ENTRY_POINTS = "dataflex_presets"
FOLDER = "dataflex"
_HEADER = "@package"


class BadPreset(Exception):
    """A preset that cannot be used; the text names it, its package and what to do."""


@dataclass(frozen=True)
class Preset:
    """A preset file and the distribution that brought it."""

    name: str
    path: Path
    distribution: str
    version: str | None = None

    @property
    def source(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}" if self.version else self.distribution

    def description(self) -> str:
        """The first comment line of the file."""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            text = line.lstrip("# ").strip()
            if line.startswith("#") and text and not text.startswith(_HEADER):
                return text
        return ""

    def block(self) -> dict[str, Any]:
        """What the preset puts under ``dataflex``.

        Raises:
            BadPreset: the file is no mapping, or names another place of the configuration in its header.
        """
        text = self.path.read_text(encoding="utf-8")
        for line in text.splitlines():
            package = line.lstrip("# ").strip()
            if line.startswith("#") and package.startswith(_HEADER) and package.split()[1:] != [FOLDER]:
                raise BadPreset(
                    f"preset {self.name!r} of {self.source} has the header '# {package}'; accepted: "
                    f"'# {_HEADER} {FOLDER}', or none: a preset is what stands under {FOLDER}"
                )
        try:
            block = OmegaConf.to_container(OmegaConf.create(text))
        except Exception as error:
            raise BadPreset(f"preset {self.name!r} of {self.source} cannot be read: {error}") from error
        if not isinstance(block, dict):
            raise BadPreset(f"preset {self.name!r} of {self.source} is no mapping of settings")
        return cast("dict[str, Any]", block)

    def labels(self) -> list[str]:
        """Labels of the plugins that the preset configures."""
        return [str(label) for label in self.block().get("plugins") or {}]


@dataclass(frozen=True)
class BrokenProvider:
    """An entry point of the group whose presets cannot be listed, and why."""

    name: str
    source: str
    error: str


def all_presets() -> tuple[list[Preset], list[BrokenProvider]]:
    """Return the presets of every installed provider, ours first, and the providers that are broken."""
    found = list(_files(Path(__file__).parent / FOLDER, "dataflex-verl", None))
    broken = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value)):
        distribution = point.dist.name if point.dist else point.value
        version = point.dist.version if point.dist else None
        directory = _directory(point)
        if directory is None or not directory.is_dir():
            error = f"there is no folder {FOLDER} in a package {point.value}"
            broken.append(BrokenProvider(point.name, f"{distribution} {version or ''}".strip(), error))
        else:
            found += _files(directory, distribution, version)
    return found, broken


def find_preset(name: str) -> Preset | None:
    """Return the preset of that name, or None.

    Raises:
        BadPreset: two packages bring one of that name.
    """
    found = [preset for preset in all_presets()[0] if preset.name == name]
    if len(found) > 1:
        sources = " and ".join(preset.source for preset in found)
        raise BadPreset(f"{sources} both bring a preset {name!r}: uninstall one, or write its block yourself")
    return found[0] if found else None


def _files(directory: Path, distribution: str, version: str | None) -> Iterator[Preset]:
    for path in sorted(directory.glob("*.yaml")):
        yield Preset(path.stem, path, distribution, version)


def _directory(point: EntryPoint) -> Path | None:
    """Find the folder of presets; only the top package is looked up, which executes nothing."""
    top, *rest = point.value.split(":")[0].split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec else None
    return next((Path(place, *rest, FOLDER) for place in places or () if Path(place, *rest, FOLDER).is_dir()), None)
