"""verl's configuration, composed as its own entry point composes it, without importing verl."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

DEFAULT_CONFIG = "ppo_trainer"


class CompositionError(Exception):
    """The overrides do not give a configuration. The text is Hydra's own."""


class VerlMissing(Exception):
    """verl is not installed in this environment."""


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
        VerlMissing: there is none.
    """
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise VerlMissing("verl is not installed here. Install it: pip install 'dataflex-verl[local]'")
    return Path(next(iter(spec.submodule_search_locations)))


def compose_config(line: CommandLine) -> DictConfig:
    """Compose the configuration that verl's entry point will compose from ``line``.

    Raises:
        CompositionError: Hydra refuses the overrides, or finds no such configuration file.
    """
    given = line.parsed
    # verl's entry point reads --config-path relative to its own file.
    directory = verl_directory() / "trainer" / (given.config_path or "config")
    overrides = list(line.overrides)
    if given.config_dir:
        overrides.append(f"hydra.searchpath=[file://{os.path.abspath(given.config_dir)}]")
    try:
        with initialize_config_dir(config_dir=str(directory), job_name="main_ppo", version_base=None):
            return compose(given.config_name or DEFAULT_CONFIG, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise CompositionError(_plain_text(error)) from error


def _plain_text(error: BaseException) -> str:
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).strip()
        if text and not any(text in earlier for earlier in texts):
            texts.append(text)
        cause = cause.__cause__
    return "\n".join(texts)
