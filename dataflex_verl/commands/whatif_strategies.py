"""What the user names on the command line of ``dataflex whatif``: presets, files, overrides, the run itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dataflex_hooks import ConfigError, Problem
from dataflex_hooks.errors import did_you_mean
from dataflex_hooks.whatif.run import LOGGED
from dataflex_hooks.whatif.steps import Source
from dataflex_hooks.whatif.strategy import Strategy

RUN, NONE = "run", "none"
_FILES = (".yaml", ".yml", ".txt")
_GROUP = "dataflex"


def strategy_of(option: str, given: Sequence[str], source: Source, overrides: Sequence[str] = ()) -> Strategy:
    """Build a strategy out of what was named.

    Args:
        option: the option, for messages.
        given: names of presets and files, stacked in order; ``run``, ``none`` or ``logged`` alone.
        source: the log, for ``run``.
        overrides: Hydra overrides of the ``dataflex`` block, applied last.

    Raises:
        ConfigError: something unknown, or that cannot be stacked.
    """
    names = [part for name in given for part in _parts(name)]
    title = "+".join(Path(name).stem if name.endswith(_FILES) else name for name in names)
    if LOGGED in names:
        if names != [LOGGED] or overrides:
            raise ConfigError([Problem(option, title, f"{LOGGED} alone: what the run decided, as it is in the log")])
        return Strategy(LOGGED)
    block: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in names:
        try:
            _stack(block, _block(option, name, source), option, name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Strategy(title, _overridden(block, overrides, option))


def _parts(name: str) -> list[str]:
    if name.endswith(_FILES) or Path(name).is_file():
        return [name]
    return [part for part in re.split("[,+]", name) if part]


def _block(option: str, name: str, source: Source) -> dict[str, Any]:
    from dataflex_verl.presets.providers import all_presets

    if name == NONE:
        return {}
    if name == RUN:
        if not source.facts.dataflex:
            raise ConfigError([Problem(option, name, "a preset or a file: this log does not say what its run did")])
        return _plain(OmegaConf.create(source.facts.dataflex))
    if name.endswith(_FILES) or Path(name).is_file():
        return _file(option, Path(name))
    found, _ = all_presets()
    for preset in found:
        if preset.name == name:
            return preset.block()
    known = sorted(preset.name for preset in found)
    accepted = f"a file ({', '.join(_FILES)}), {RUN}, {NONE}, or one of {', '.join(known)}"
    raise ConfigError([Problem(option, name, accepted, did_you_mean(name, [*known, RUN, NONE]))])


def _file(option: str, path: Path) -> dict[str, Any]:
    """A YAML file with a ``dataflex`` block, or a list of overrides, one a line."""
    accepted = "a YAML file with what stands under dataflex, or Hydra overrides, one a line"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem(option, str(path), f"{accepted}: {error}", cause=error)]) from error
    lines = [line.strip().strip("'\"") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and all(line.lstrip("+~").startswith(_GROUP) and "=" in line for line in lines):
        return _overridden({}, lines, option)
    try:
        loaded = OmegaConf.create(text)
        block = _plain(loaded)
    except Exception as error:
        raise ConfigError([Problem(option, str(path), f"{accepted}: {error}", cause=error)]) from error
    return block.get(_GROUP, block)


def _plain(config: Any) -> dict[str, Any]:
    block = OmegaConf.to_container(config, resolve=True)
    if not isinstance(block, dict):
        raise ValueError("it is no mapping")
    return {str(key): value for key, value in block.items()}


def _stack(block: dict[str, Any], more: dict[str, Any], option: str, name: str) -> None:
    for key, value in more.items():
        if key == "plugins" and "plugins" in block:
            twice = sorted(set(block["plugins"]) & set(value or {}))
            if twice:
                raise ConfigError([Problem(option, name, f"each label once: {', '.join(twice)} is there already")])
            block["plugins"] = {**block["plugins"], **(value or {})}
        elif key in block and block[key] != value:
            raise ConfigError([Problem(option, name, f"one value of {key}: it is {block[key]!r} already")])
        else:
            block[key] = value


def _overridden(block: dict[str, Any], overrides: Sequence[str], option: str) -> dict[str, Any]:
    if not overrides:
        return block
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    config = OmegaConf.create({_GROUP: block})
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except OverrideParseException as error:
            raise ConfigError([Problem(option, text, f"a Hydra override: {error}", cause=error)]) from error
        key = override.key_or_group
        if key == _GROUP:
            for name in _listed(override.value()):
                from_preset = _block(option, name, _NoSource())  # type: ignore[arg-type]
                merged = _plain(config[_GROUP])
                _stack(merged, from_preset, option, name)
                config[_GROUP] = merged
        elif not key.startswith(f"{_GROUP}."):
            raise ConfigError([Problem(option, text, f"overrides of {_GROUP}: nothing else is decided again")])
        elif override.is_delete():
            _delete(config, key)
        else:
            OmegaConf.update(config, key, override.value(), force_add=True)
    return _plain(config[_GROUP])


class _NoSource:
    """In overrides ``run`` stands for nothing."""

    class facts:
        dataflex = ""


def _listed(value: Any) -> Iterator[str]:
    yield from (str(name) for name in (value if isinstance(value, list) else [value]))


def _delete(config: Any, key: str) -> None:
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(config, parent)
    if holder is not None and name in holder:
        del holder[name]
