"""From a run's configuration to its plugins: what the trainer does at start, and ``dataflex check`` without a run."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from omegaconf import DictConfig, OmegaConf

from dataflex_hooks import ConfigError, HookManager, LossCoefficients
from dataflex_verl.drop_checks import drop_problems
from dataflex_verl.losses import ApplyTo, estimator_of

MODE = "trainer.v1.trainer_mode"
MODES = MappingProxyType(
    {"dataflex_sync": "sync", "dataflex_mix_sync": "sync", "dataflex_colocate_async": "colocate_async"}
)
"""Trainer mode by name, and the verl mode it is laid over."""

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
        )
    except ConfigError as error:
        problems += error.problems
    if hooks is None or hooks.labels:
        try:
            coefficients = ask_loss(config, hooks.config.apply_to if hooks is not None else _apply_to(block))
            problems += hooks.loss_problems(coefficients) if hooks is not None else []
        except ConfigError as error:
            problems += error.problems
    if hooks is not None:
        problems += drop_problems(hooks, config)
    if problems or hooks is None:
        raise ConfigError(problems)
    return hooks, coefficients


def _has_groups(config: DictConfig) -> bool | None:
    n = OmegaConf.select(config, "actor_rollout_ref.rollout.n")
    return n > 1 if isinstance(n, int) else None


def _apply_to(block: object) -> ApplyTo:
    given = OmegaConf.to_container(block, resolve=False) if isinstance(block, DictConfig) else {}
    return "advantages" if isinstance(given, dict) and given.get("apply_to") == "advantages" else "weights"
