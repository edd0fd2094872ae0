"""What a configured drop asks of verl's settings, said at start."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from dataflex_hooks import HookManager, Problem
from dataflex_hooks.errors import Described
from dataflex_verl.estimators import why_no_group_advantages

SHUFFLES = ("actor_rollout_ref.actor.shuffle", "critic.shuffle")
"""Settings that would undo the even spread of rows over mini-batches."""


def drop_problems(hooks: HookManager, config: DictConfig) -> list[Problem]:
    """Return what is wrong with the drops that the configured plugins declare."""
    dropping = [row for row in hooks.plan() if row["effect"] == "drop"]
    if not dropping:
        return []
    problems = [shuffle_problem(name) for name in shuffled(config)]
    wishes: dict[str, dict[str, Any]] = {}
    for row in dropping:
        over = row["advantages"]
        if over is None:
            continue
        wishes.setdefault(over, row)
        setting = f"{row['path']}.advantages"
        if over == "group" and (why_not := why_no_group_advantages(config)):
            problems.append(Problem(setting, over, f"kept: {why_not}"))
    if len(wishes) > 1:
        given = Described(" and ".join(f"{over} from {row['label']!r}" for over, row in sorted(wishes.items())))
        hint = "set the same advantages for both"
        problems.append(Problem("dataflex.plugins", given, "one baseline for all plugins that drop rows", hint))
    return problems


def shuffled(config: DictConfig) -> list[str]:
    """Which of :data:`SHUFFLES` are on, of models that are trained."""
    has_critic = OmegaConf.select(config, "critic.enable") is not False
    return [name for name in SHUFFLES if OmegaConf.select(config, name) and (has_critic or "critic" not in name)]


def shuffle_problem(name: str) -> Problem:
    """The problem of one such setting."""
    return Problem(name, True, "false: dropped rows are made up for by an even spread over mini-batches")
