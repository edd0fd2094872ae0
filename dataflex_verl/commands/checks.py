"""Start-up checks: everything about a configuration that can be refused before Ray starts."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from dataflex_verl.modes import MODE, MODES

if TYPE_CHECKING:
    from dataflex_hooks import HookManager, LossCoefficients, Problem
    from dataflex_verl.losses import ApplyTo
    from dataflex_verl.startup import AskLoss

LATER_MODES: Mapping[str, str] = MappingProxyType(
    {
        "dataflex_separate_async": "it comes in a later version; use dataflex_sync",
    }
)
"""Trainer modes that this version does not have."""

_FILES = ("data.train_files", "data.val_files", "reward.custom_reward_function.path")
_MODEL = "actor_rollout_ref.model.path"
_HOOKS = os.path.join("dataflex_hooks", "")


@dataclass
class Findings:
    """What is wrong with a configuration; or, with nothing wrong, what will run.

    Attributes:
        problems: everything wrong, in order.
        hooks, coefficients: the plugins, and what they may know of the loss; None where there are problems, or where
            the configuration has nothing of ours.
    """

    problems: list[Problem]
    hooks: HookManager | None = None
    coefficients: LossCoefficients | None = None


def find_problems(config: DictConfig, local: bool = False) -> list[Problem]:
    """Everything wrong with a configuration, the loss asked as the run will ask it; see :func:`examine`."""
    return examine(config, local, ask_verl).problems


def examine(config: DictConfig, local: bool = False, ask_loss: AskLoss | None = None) -> Findings:
    """Find everything that this package knows to be wrong with a composed configuration of verl.

    Args:
        config: verl's whole configuration.
        local: whether the run is on this machine alone, so that files have to be here.
        ask_loss: how to learn what the loss does with weights; without it from the table of verl's own losses.
    """
    found = Findings([])
    mode = str(OmegaConf.select(config, MODE))
    # Torch loads in seconds: a run without anything of ours does not wait for it here.
    if mode.startswith("dataflex") or OmegaConf.select(config, "dataflex") is not None:
        found = _examine_block(config, mode, ask_loss)
    if local:
        missing = list(_missing_files(config))
        found.problems += missing or _too_few_rows(config)
    return found


def refusal(problems: Sequence[Problem]) -> str:
    """The problems, numbered; and for a package that cannot be imported, its own traceback."""
    from dataflex_hooks.discovery import IMPORTABLE

    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"dataflex: {count} in the configuration; nothing was started."]
    lines += [f"{number}. {problem}" for number, problem in enumerate(problems, start=1)]
    for problem in problems:
        if problem.accepted == IMPORTABLE and problem.cause is not None:
            lines += ["", f"importing {problem.given!r}:", _own_traceback(problem.cause)]
    return "\n".join(lines)


def _own_traceback(error: BaseException) -> str:
    """The traceback without the frames of the import system."""
    summary = traceback.TracebackException.from_exception(error)
    summary.stack = traceback.StackSummary.from_list(
        [frame for frame in summary.stack if "importlib" not in frame.filename and _HOOKS not in frame.filename]
    )
    return "".join(summary.format()).rstrip()


def _examine_block(config: DictConfig, mode: str, ask_loss: AskLoss | None) -> Findings:
    from dataflex_hooks import ConfigError, Problem
    from dataflex_verl.losses import expect_loss
    from dataflex_verl.startup import prepare_with

    problems = _mode_problems(mode)
    if not OmegaConf.select(config, "trainer.use_v1", default=True):
        problems.append(Problem("trainer.use_v1", False, f"true: verl's older trainer does not read {MODE}"))
    try:
        hooks, coefficients = prepare_with(config, ask_loss or expect_loss)
    except ConfigError as error:
        problems += error.problems
    return Findings(problems) if problems else Findings([], hooks, coefficients)


def _mode_problems(mode: str) -> list[Problem]:
    from dataflex_hooks import Problem
    from dataflex_hooks.errors import Described, did_you_mean, one_of

    if mode in LATER_MODES:
        return [Problem(MODE, mode, one_of(MODES), LATER_MODES[mode])]
    if mode in MODES:
        return []
    if mode.startswith("dataflex"):
        return [Problem(MODE, mode, one_of(MODES), did_you_mean(mode, MODES))]
    given = Described(f"a dataflex block, with {MODE}={mode}")
    accepted = f"the block only with {MODE} {one_of(MODES)}: nothing would act on it"
    return [Problem("dataflex", given, accepted, f"add {MODE}=dataflex_sync")]


def ask_verl(config: DictConfig, apply_to: ApplyTo) -> LossCoefficients:
    """Ask verl's loss. The loss cannot be asked where verl refuses its settings; that is a problem like others."""
    from dataflex_hooks import ConfigError
    from dataflex_verl.probe import check_loss

    try:
        return check_loss(config, apply_to)
    except InstantiationException as error:
        raise ConfigError([_refused_by_verl(error)]) from error


def _refused_by_verl(error: InstantiationException) -> Problem:
    from dataflex_hooks import Problem
    from dataflex_hooks.errors import Described

    reason = str(error.__cause__ or error).strip()
    return Problem("actor_rollout_ref.actor", Described("settings that verl refuses"), reason, cause=error)


def _missing_files(config: DictConfig) -> Iterator[Problem]:
    for setting in _FILES:
        for path in _listed(OmegaConf.select(config, setting)):
            if not _exists(path):
                yield _missing(setting, path, "a file on this machine")
    model = OmegaConf.select(config, _MODEL)
    # A bare "name" or "owner/name" may be in the Hugging Face cache.
    if isinstance(model, str) and model.startswith(("/", "~", ".")) and not _exists(model):
        yield _missing(_MODEL, model, "a model directory on this machine")


def _too_few_rows(config: DictConfig) -> list[Problem]:
    """verl leaves an incomplete batch out: with fewer rows than a batch its data loader is empty."""
    from dataflex_hooks import Problem

    rows = _rows(_listed(OmegaConf.select(config, "data.train_files")))
    batch = OmegaConf.select(config, "data.train_batch_size")
    most = OmegaConf.select(config, "data.train_max_samples", default=-1)
    if rows is None or not isinstance(batch, int):
        return []
    rows = min(rows, most) if isinstance(most, int) and most > 0 else rows
    if batch <= rows:
        return []
    return [Problem("data.train_batch_size", batch, f"at most the {rows} rows of data.train_files: no step would run")]


def _rows(paths: Sequence[str]) -> int | None:
    """Rows of Parquet files; None where one is something else, which is verl's to judge."""
    from pyarrow import ArrowException, parquet

    try:
        return sum(parquet.read_metadata(os.path.expanduser(path)).num_rows for path in paths) if paths else None
    except (ArrowException, OSError):
        return None


def _listed(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else [] if value is None else list(value)
    return [path for path in values if isinstance(path, str) and "://" not in path]


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _missing(setting: str, path: str, accepted: str) -> Problem:
    from dataflex_hooks import Problem

    return Problem(setting, path, accepted, "there is nothing at this path")
