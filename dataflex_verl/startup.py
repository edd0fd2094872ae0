"""From a run's configuration to its plugins: what the trainer does at start, and ``dataflex check`` without a run."""

from __future__ import annotations

import sys
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from dataflex_hooks import ConfigError, HookManager, LossCoefficients, Problem
from dataflex_verl import checkpoint, decision_log
from dataflex_verl.drop_checks import drop_problems
from dataflex_verl.losses import ApplyTo, estimator_of

ROLLOUTS = "actor_rollout_ref.rollout.n"
RESPONSE_LENGTH = "actor_rollout_ref.rollout.response_length"
BYPASS = "algorithm.rollout_correction.bypass_mode"

AskLoss = Callable[[DictConfig, ApplyTo], LossCoefficients]


def prepare_with(config: DictConfig, ask_loss: AskLoss) -> tuple[HookManager, LossCoefficients]:
    """Build the plugins of a run and ask whether decisions reach the configured loss.

    Args:
        config: verl's whole configuration.
        ask_loss: gives the loss's coefficients, or raises ConfigError.

    Raises:
        ConfigError: with every problem of the block and of the loss.
    """
    hooks: HookManager | None = None
    coefficients = LossCoefficients("token", source="not probed: no plugin decides anything")
    block = OmegaConf.select(config, "dataflex")
    estimator, problems = estimator_of(config)
    try:
        hooks = HookManager.from_config(
            block,
            estimator=estimator,
            has_groups=_has_groups(config),
            rollout_n=_whole(config, ROLLOUTS),
            response_length=_whole(config, RESPONSE_LENGTH),
            facts=run_facts(config),
        )
        problems += _entropy_problems(hooks, config)
    except ConfigError as error:
        problems += error.problems
    if hooks is None or hooks.labels or hooks.config.log_decisions:
        try:
            coefficients = ask_loss(config, hooks.config.apply_to if hooks is not None else _apply_to(block))
            problems += hooks.loss_problems(coefficients) if hooks is not None else []
        except ConfigError as error:
            # A run that only keeps a log decides nothing that the loss could get wrong.
            problems += error.problems if hooks is None or hooks.labels else []
    if hooks is not None:
        problems += decision_log.problems(hooks)
        problems += drop_problems(hooks, config)
        problems += checkpoint.problems(config, hooks)
    if problems or hooks is None:
        raise ConfigError(problems)
    return hooks, coefficients


def run_facts(config: DictConfig) -> dict[str, object]:
    """Return what plugins may ask to be told of a run, beside the number of rollouts and the length of responses."""
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    tokenizer = OmegaConf.select(config, f"{model}.tokenizer_path") or OmegaConf.select(config, f"{model}.path")
    return {
        "prompt_length": _whole(config, "data.max_prompt_length"),
        "tokenizer_path": None if tokenizer is None else str(tokenizer),
        "rollout_log_probs": OmegaConf.select(config, f"{rollout}.calculate_log_probs"),
    }


def _has_groups(config: DictConfig) -> bool | None:
    n = _whole(config, ROLLOUTS)
    return None if n is None else n > 1


def _whole(config: DictConfig, setting: str) -> int | None:
    value = OmegaConf.select(config, setting)
    return value if isinstance(value, int) else None


def _entropy_problems(hooks: HookManager, config: DictConfig) -> list[Problem]:
    """Say so if a plugin reads the entropy of tokens and verl skips the pass that computes it."""
    if not OmegaConf.select(config, BYPASS) or "entropy" not in hooks.required_fields("post_advantage", sys.maxsize):
        return []
    hint = "in bypass mode verl takes log-probs from the rollout and computes no entropy"
    return [Problem(BYPASS, True, "false with a plugin that reads the entropy of tokens", hint)]


def _apply_to(block: object) -> ApplyTo:
    given = OmegaConf.to_container(block, resolve=False) if isinstance(block, DictConfig) else {}
    return "advantages" if isinstance(given, dict) and given.get("apply_to") == "advantages" else "weights"
