"""Everything wrong with a command line, at once: what Hydra has against it, clashes of presets, and what we refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataflex_verl.commands.checks import Findings, examine
from dataflex_verl.commands.hydra_config import CommandLine, Composed, CompositionError, compose_with_presets

if TYPE_CHECKING:
    from dataflex_hooks import Problem
    from dataflex_verl.startup import AskLoss


@dataclass(frozen=True)
class Checked:
    """A command line that was looked at.

    Attributes:
        composed: its configuration; where there are problems, as it was probably meant, or None.
        findings: what is wrong, or what will run.
    """

    composed: Composed | None
    findings: Findings


def look_at(arguments: Sequence[str], local: bool = False) -> Checked:
    """Compose the configuration that verl would compose from ``arguments``, and examine it without importing verl.

    Raises:
        VerlMissing: its configuration files are not here.
    """
    line = CommandLine.parse(arguments)
    if local:
        from dataflex_verl.commands.train import add_local_overrides

        line = line.with_overrides(add_local_overrides(line.overrides))
    return look_at_line(line, local)


def look_at_line(line: CommandLine, local: bool = False, ask_loss: AskLoss | None = None) -> Checked:
    """The same for a command line that is parsed and has the overrides of the local backend.

    Args:
        line: the command line.
        local: whether files have to be on this machine.
        ask_loss: how to learn what the loss does with weights; without it from the table of verl's own losses.

    Raises:
        VerlMissing: verl's configuration files are not here.
    """
    try:
        composed: Composed | None = compose_with_presets(line)
        problems: list[Problem] = []
    except CompositionError as error:
        from dataflex_verl.commands.diagnose import diagnose

        composed, problems = diagnose(line)
        problems = problems or [_unexplained(error)]
    problems += _preset_problems(line, composed)
    findings = examine(composed.config, local, ask_loss) if composed is not None else Findings([])
    return Checked(composed, Findings(problems + findings.problems, findings.hooks, findings.coefficients))


def _preset_problems(line: CommandLine, composed: Composed | None) -> list[Problem]:
    if composed is None or not composed.presets:
        return []
    from dataflex_verl.preset_checks import preset_problems

    return preset_problems(line.overrides, composed.presets)


def _unexplained(error: CompositionError) -> Problem:
    from dataflex_hooks import Problem
    from dataflex_hooks.errors import Described

    return Problem("hydra", Described("this configuration"), "what Hydra can compose", str(error))
