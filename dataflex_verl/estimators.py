"""What verl's advantage estimators need, known without importing verl."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

OUTCOME_ESTIMATORS = frozenset(
    {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline"}
)
"""Estimators whose advantages follow from the group's rewards and lengths alone."""


def why_no_group_advantages(config: DictConfig) -> str | None:
    """Why advantages over the whole group cannot be computed before the log-prob passes, or None if they can."""
    estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
    if estimator not in OUTCOME_ESTIMATORS:
        return f"with algorithm.adv_estimator={estimator} advantages do not follow from a group's rewards alone"
    if OmegaConf.select(config, "algorithm.use_kl_in_reward"):
        return "with algorithm.use_kl_in_reward=True rewards need log-probs"
    if OmegaConf.select(config, "critic.enable"):
        return "with critic.enable=True the critic would learn from returns of another set of rows"
    return None
