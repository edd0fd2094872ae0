"""Presets that clash: Hydra merges one named twice, and two with one label, without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser

from dataflex_verl.presets.providers import FOLDER

if TYPE_CHECKING:
    from dataflex_hooks import Problem


def preset_problems(overrides: Sequence[str], labels: Mapping[str, Sequence[str]]) -> list[Problem]:
    """Say which presets are named twice, and which labels two presets share.

    Args:
        overrides: the command line's.
        labels: labels of the plugins by composed preset.
    """
    from dataflex_hooks import Problem
    from dataflex_hooks.errors import Described

    chosen = named_presets(overrides)
    problems = []
    for name in dict.fromkeys(name for name in chosen if chosen.count(name) > 1):
        given = Described(f"preset {name!r} {'twice' if chosen.count(name) == 2 else f'{chosen.count(name)} times'}")
        hint = "to run a method twice, give the second a label of its own under dataflex.plugins"
        problems.append(Problem(FOLDER, given, "each preset once", hint))
    owners: dict[str, list[str]] = {}
    for preset, of_preset in labels.items():
        for label in of_preset:
            owners.setdefault(str(label), []).append(str(preset))
    for label, presets in owners.items():
        if len(presets) > 1:
            given = Described(f"label {label!r} from presets {' and '.join(presets)}")
            accepted = "a label that one preset has: theirs would be merged"
            problems.append(Problem(f"{FOLDER}.plugins.{label}", given, accepted, "drop one of the presets"))
    return problems


def named_presets(overrides: Sequence[str]) -> list[str]:
    """Presets that the overrides name, in order."""
    own = [text for text in overrides if text.lstrip("+").partition("=")[0].partition("@")[0].strip() == FOLDER]
    names: list[str] = []
    for override in OverridesParser.create().parse_overrides(list(own)):
        value = override.value()
        names += [value] if isinstance(value, str) else [str(name) for name in value] if isinstance(value, list) else []
    return names
