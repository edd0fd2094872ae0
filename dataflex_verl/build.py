"""Build the scorer and the actuator of a short-form block: the published entry point for programs and tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dataflex_hooks.components import Component, Scorer
from dataflex_hooks.config import read
from dataflex_hooks.errors import NOTHING, ConfigError, Problem, did_you_mean, one_of
from dataflex_hooks.plugins.mechanism import build_pair
from dataflex_hooks.registry import USED_BY
from dataflex_verl.core.config import validate_compat

_KIND_OF = {mechanism: kind for kind, mechanism in USED_BY.items()}


def build_from_config(
    cfg: Mapping[str, Any] | DictConfig,
    adv_estimator: str | None = None,
    runtime: Mapping[str, Any] | None = None,
) -> tuple[Scorer, Component, dict[str, Any]]:
    """Build what a short-form ``dataflex`` block names; for ``select``, ``reweight`` and ``mix``.

    A run does the same through :meth:`dataflex_hooks.HookManager.from_config`, which also stacks.

    Args:
        cfg: ``mechanism``, ``scorer``, ``actuator`` and the settings beside them.
        adv_estimator: the run's; a group scorer is refused under one without groups. None checks nothing.
        runtime: ``domains`` and ``window`` of the host; they stand in for those that ``cfg`` does not set. Also the
            facts ``rollouts`` and ``response_length``.

    Returns:
        The scorer, the actuator, and the other settings: ``mechanism``, ``warmup_step``, ``update_step``, ``domains``,
        ``window``.

    Raises:
        ConfigError: which is a ValueError, with everything wrong.
    """
    block = dict(OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else cfg)  # type: ignore[arg-type]
    mechanism = block.get("mechanism")
    problems: list[Problem] = []
    if mechanism not in _KIND_OF:
        given = NOTHING if mechanism is None else mechanism
        problems.append(Problem("mechanism", given, one_of(_KIND_OF), did_you_mean(mechanism, _KIND_OF)))
    # A run refuses mechanisms that it cannot steer yet; their components can be built all the same.
    settings, found = read({**block, "mechanism": "select"})
    problems += found
    host = {**(runtime or {}), **settings.shared}
    if problems and mechanism not in _KIND_OF:
        raise ConfigError(problems)
    kind = _KIND_OF[str(mechanism)]
    try:
        built = build_pair(
            kind,
            block.get("scorer"),
            block.get("actuator"),
            host.get("domains"),
            host.get("window"),
            host.get("rollouts"),
            host.get("response_length"),
        )
        validate_compat(built[0], adv_estimator)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    meta = {
        "mechanism": mechanism,
        "warmup_step": settings.plugins[0].warmup_step,
        "update_step": settings.update_step,
        "domains": host.get("domains"),
        "window": host.get("window"),
    }
    return (*built, meta)
