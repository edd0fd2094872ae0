"""``dataflex train``: verl's own entry point, run in this process after the start-up checks."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import typer

from dataflex_verl.commands.hydra_config import CommandLine, VerlMissing
from dataflex_verl.local.settings import local_environment, local_overrides, override_key

VERL_MAIN = "verl.trainer.main_ppo"
REFUSED = 2


def train(arguments: Sequence[str], local: bool = False) -> int:
    """Check the configuration, then run verl's main module as ``python -m`` would.

    Args:
        arguments: the user's Hydra overrides and options.
        local: run on the CPU backend.

    Returns:
        2 when the configuration is refused, else 0. verl's own failure leaves through its exception or exit status.
    """
    line = CommandLine.parse(arguments)
    if local:
        set_local_environment()
        line = line.with_overrides(add_local_overrides(line.overrides))
    if line.trains_once and (refusal := check(line, local)) is not None:
        typer.echo(refusal, err=True)
        return REFUSED
    sys.argv = [VERL_MAIN, *line.arguments]
    runpy.run_module(VERL_MAIN, run_name="__main__", alter_sys=True)
    return 0


def set_local_environment() -> None:
    """Select the CPU backend, before verl is imported, and start to preload its workers' modules behind our back.

    The platform is what ``--local`` asks for; of the other variables a value of the user's own wins.
    """
    from dataflex_verl.local.forkserver import start_server

    for name, value in local_environment().items():
        os.environ.setdefault(name, value)
    os.environ["VERL_PLATFORM"] = local_environment()["VERL_PLATFORM"]
    try:
        start_server()
    except OSError as error:
        typer.echo(f"dataflex: the fork server did not start ({error}); workers start the slow way", err=True)


def add_local_overrides(given: Sequence[str]) -> list[str]:
    """The user's overrides behind those of the local backend. A setting that the user gives is the user's."""
    keys = {override_key(text) for text in given}
    estimator = [] if "algorithm.adv_estimator" in keys else ["algorithm.adv_estimator=grpo"]
    return [*local_overrides(given), *estimator, *given]


def check(line: CommandLine, local: bool) -> str | None:
    """Say everything that is wrong with the configuration, or return None."""
    from dataflex_verl.commands.checks import ask_verl, refusal
    from dataflex_verl.commands.look import look_at_line

    try:
        problems = look_at_line(line, local, ask_verl).findings.problems
    except VerlMissing as error:
        return f"dataflex: nothing was started.\n{error}"
    return refusal(problems) if problems else None
