"""Ready-made strategies: the files of the Hydra config group ``dataflex``, readable without Hydra."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, cast

from omegaconf import OmegaConf

GROUP = "dataflex"
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(entry.name[: -len(".yaml")] for entry in _directory().iterdir() if entry.name.endswith(".yaml"))


def block(name: str) -> dict[str, Any]:
    """What a preset puts under ``dataflex``.

    Raises:
        KeyError: there is no preset of this name.
    """
    if name not in names():
        raise KeyError(name)
    text = (_directory() / f"{name}.yaml").read_text(encoding="utf-8")
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.create(text)))


def overrides(chosen: Sequence[str]) -> list[str]:
    """The presets ``chosen``, of any installed package, in order, as Hydra overrides that add one value each.

    Raises:
        KeyError: there is no preset of a name.
        BadPreset: one cannot be used.
    """
    from dataflex_verl.presets.providers import find_preset

    found = []
    for name in chosen:
        if (preset := find_preset(name)) is None:
            raise KeyError(name)
        found += [f"+{GROUP}.{key}={_hydra_value(value)}" for key, value in _leaves(preset.block())]
    return found


def _directory() -> Any:
    return files(__name__) / GROUP


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        # A schedule has training steps as keys; Hydra would read such a key of a path as text.
        if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _hydra_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    # Hydra's grammar has inf and nan, JSON has Infinity.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else json.dumps(value)
