"""Ready-made strategies: the files of the Hydra config group ``dataflex``, readable without Hydra."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from dataflex_verl.presets.providers import find_preset

GROUP = "dataflex"
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(entry.name[: -len(".yaml")] for entry in _directory().iterdir() if entry.name.endswith(".yaml"))


def block(name: str) -> dict[str, Any]:
    """What a preset of any installed package puts under ``dataflex``.

    Raises:
        KeyError: there is no preset of this name.
        BadPreset: it cannot be used.
    """
    preset = find_preset(name)
    if preset is None:
        raise KeyError(name)
    return preset.block()


def overrides(chosen: Sequence[str]) -> list[str]:
    """The presets ``chosen``, in order, as Hydra overrides that add one value each; raises what :func:`block` does."""
    return [f"+{GROUP}.{key}={_hydra_value(value)}" for name in chosen for key, value in _leaves(block(name))]


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
