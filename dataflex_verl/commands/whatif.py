"""``dataflex whatif``: what would a strategy have decided about rollouts that were logged?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dataflex_verl.commands.check import REFUSED
from dataflex_verl.commands.checks import refusal

if TYPE_CHECKING:
    from dataflex_hooks.whatif.run import WhatIf
    from dataflex_hooks.whatif.steps import Source


_LOSSES = ("token", "sequence")


@dataclass(frozen=True)
class WhatIfOptions:
    """What the command line asks for.

    Attributes:
        source: a run's folder, its decision log, or verl's dumps.
        strategies: presets, files, ``run`` or ``none``; stacked.
        against: likewise, or ``logged``.
        overrides: Hydra overrides of the strategy's ``dataflex`` block.
        state: checkpoint folder with the plugins' state before the log's first step.
        loss: what the loss weighs alike, for dumps that do not say: ``token`` or ``sequence``.
        page: file for a report page, None for none.
    """

    source: Path
    strategies: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    state: Path | None = None
    loss: str = "token"
    page: Path | None = None


def whatif(options: WhatIfOptions, as_json: bool = False) -> int:
    """Print what came of it.

    Returns:
        0, or 2 when the log cannot be read, a strategy is wrong, or the two do not go together.
    """
    from dataflex_hooks import ConfigError, DataFlexError

    try:
        _check(options)
        source = open_source(options.source, options.loss)
        result = _run(options, source)
    except ConfigError as error:
        typer.echo(refusal(error.problems), err=True)
        return REFUSED
    except DataFlexError as error:
        typer.echo(f"dataflex: {error}", err=True)
        return REFUSED
    data = {"source": str(options.source), **result.plain()}
    if options.page is not None:
        from dataflex_verl.commands.whatif_page import page

        options.page.write_text(page(data), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(data, indent=1))
        return 0
    from dataflex_verl.commands.whatif_text import show

    show(data)
    if options.page is not None:
        typer.echo(f"Page: {options.page}")
    return 0


def _check(options: WhatIfOptions) -> None:
    from dataflex_hooks import ConfigError, Problem
    from dataflex_hooks.errors import did_you_mean

    if options.loss not in _LOSSES:
        hint = did_you_mean(options.loss, _LOSSES)
        raise ConfigError([Problem("--loss", options.loss, " or ".join(_LOSSES), hint)])


def open_source(path: Path, loss: str = "token") -> Source:
    """Open what the path holds: our decision log, or verl's dumps.

    Raises:
        LogError: neither is there, or none of it can be read.
        ConfigError: pyarrow, which reads a decision log, is not installed.
    """
    from importlib.util import find_spec

    from dataflex_hooks import ConfigError, Problem
    from dataflex_hooks.whatif.jsonl import JsonlSource

    if path.is_dir() and any(file.stem.isdecimal() for file in path.glob("*.jsonl")):
        return JsonlSource(path, loss)
    if find_spec("pyarrow") is None:
        accepted = "verl's dumps in this environment: pyarrow, which reads decision logs, is not installed"
        raise ConfigError([Problem("SOURCE", str(path), accepted, "pip install 'dataflex-verl[analysis]'")])
    from dataflex_hooks.decision_log.reader import DecisionLog
    from dataflex_hooks.whatif.steps import LogSource

    return LogSource(DecisionLog.open(path))


def _run(options: WhatIfOptions, source: Source) -> WhatIf:
    from dataflex_hooks.whatif.run import LOGGED, what_if
    from dataflex_verl.commands.whatif_strategies import RUN, strategy_of

    logged = source.facts.dataflex != ""
    named = options.strategies or ((RUN,) if logged else ())
    strategies = [strategy_of("--strategy", named, source, options.overrides)]
    against = options.against or ((LOGGED,) if logged else ())
    if against:
        strategies.append(strategy_of("--against", against, source))
    if LOGGED in (strategy.name for strategy in strategies) and not logged:
        from dataflex_hooks import ConfigError, Problem

        accepted = "a preset or a file: verl's dumps do not say what the run decided"
        raise ConfigError([Problem("--against", LOGGED, accepted)])
    return what_if(source, strategies, _state(options, source))


def _state(options: WhatIfOptions, source: Source) -> Any:
    """Plugins' state before the log's first step: of the given checkpoint, or as the run logged it."""
    from dataflex_hooks import ConfigError, Problem
    from dataflex_hooks.decision_log.files import state_folder
    from dataflex_verl import state_files

    first = next((step.step for step in source.steps()), 1)
    folder = options.state or state_folder(source.path, first - 1)
    saved = state_files.read(folder)
    if saved is None and options.state is not None:
        accepted = "a checkpoint folder of verl's, global_step_N, with a folder dataflex in it"
        raise ConfigError([Problem("--state", str(folder), accepted)])
    if saved is not None and saved.step != first - 1:
        accepted = f"the checkpoint of step {first - 1}: the log begins with step {first}"
        raise ConfigError([Problem("--state", str(folder), accepted)])
    return None if saved is None else saved.plugins
