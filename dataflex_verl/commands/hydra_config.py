"""verl's configuration, composed as its own entry point composes it, without importing verl."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, SearchPathException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dataflex_verl import hydra_plugin
from dataflex_verl.compat import unsupported

DEFAULT_CONFIG = "ppo_trainer"


class CompositionError(Exception):
    """The overrides do not give a configuration. The text is Hydra's own."""


class VerlMissing(Exception):
    """No verl in this environment, or one without what the hooks extend."""


@dataclass(frozen=True)
class CommandLine:
    """Arguments of verl's entry point.

    Attributes:
        flags: Hydra's own options with their values, in the order given.
        overrides: Hydra overrides, in the order given.
        parsed: what Hydra's parser makes of them.
    """

    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    parsed: argparse.Namespace

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> CommandLine:
        """Read ``arguments`` with Hydra's parser; like it, leave with status 2 on an option that it does not know."""
        parsed = get_args_parser().parse_args(list(arguments))
        overrides = tuple(parsed.overrides)
        return cls(tuple(given for given in arguments if given not in overrides), overrides, parsed)

    def with_overrides(self, overrides: Sequence[str]) -> CommandLine:
        return replace(self, overrides=tuple(overrides))

    @property
    def arguments(self) -> list[str]:
        """Flags first: Hydra's parser reads overrides in one place only."""
        return [*self.flags, *self.overrides]

    @property
    def trains_once(self) -> bool:
        """False where Hydra prints something instead, or runs several jobs of different configurations."""
        parsed = self.parsed
        only_prints = parsed.help or parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion
        return not (only_prints or parsed.multirun or parsed.experimental_rerun)


def verl_directory() -> Path:
    """Where verl is installed; found without importing it.

    Raises:
        VerlMissing: there is none, or one that the hooks cannot work with.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise VerlMissing("verl is not installed here. Install it: pip install 'dataflex-verl[local]'")
    directory = Path(next(iter(spec.submodule_search_locations)))
    if (reason := unsupported(directory)) is not None:
        raise VerlMissing(reason)
    return directory


@dataclass(frozen=True)
class Composed:
    """A composed configuration.

    Attributes:
        config: verl's configuration.
        presets: labels of the plugins by composed preset.
    """

    config: DictConfig
    presets: Mapping[str, list[str]]


def compose_config(line: CommandLine) -> DictConfig:
    """Compose the configuration that verl's entry point will compose from ``line``.

    Raises:
        CompositionError: Hydra refuses the overrides, or finds no such configuration file.
    """
    return compose_with_presets(line).config


def compose_with_presets(line: CommandLine) -> Composed:
    """Compose as :func:`compose_config` does, and tell which presets are in it.

    Raises:
        CompositionError: Hydra refuses the overrides, or finds no such configuration file.
    """
    try:
        with hydra_for(line):
            return composed(line, line.overrides)
    # A group set to null, or to a number, is a ValueError of Hydra's.
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise CompositionError(_plain_text(error)) from error


@contextmanager
def hydra_for(line: CommandLine) -> Iterator[None]:
    """Hydra initialised as verl's entry point initialises it for ``line``."""
    hydra_plugin.register()
    # verl's entry point reads --config-path relative to its own file.
    directory = verl_directory() / "trainer" / (line.parsed.config_path or "config")
    with initialize_config_dir(config_dir=str(directory), job_name="main_ppo", version_base=None):
        if line.parsed.config_dir:
            _add_directory(os.path.abspath(line.parsed.config_dir))
        yield


def _add_directory(path: str) -> None:
    """What Hydra's main does with ``--config-dir``; its compose API has no such argument."""
    if not os.path.isdir(path):
        raise SearchPathException(f"Additional config directory '{path}' not found")
    loader = GlobalHydra.instance().config_loader()
    search_path = loader.get_search_path()
    search_path.prepend(provider="command-line", path=f"file://{path}", anchor=SearchPathQuery(provider="schema"))
    loader.repository.initialize_sources(search_path)


def composed(line: CommandLine, overrides: Sequence[str]) -> Composed:
    """Compose with ``overrides`` in place of the line's own, within :func:`hydra_for`."""
    name = line.parsed.config_name or DEFAULT_CONFIG
    config = compose(name, overrides=list(overrides), return_hydra_config=True)
    presets = OmegaConf.select(config, f"{hydra_plugin.CALLBACK}.presets", default={})
    labels = {str(name): [str(label) for label in of_preset] for name, of_preset in presets.items()}
    with open_dict(config):
        del config["hydra"]
    return Composed(config, labels)


def _plain_text(error: BaseException) -> str:
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).strip()
        if text and not any(text in earlier for earlier in texts):
            texts.append(text)
        cause = cause.__cause__
    return "\n".join(texts)
