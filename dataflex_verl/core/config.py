"""Does a scorer fit the run's advantage estimator?"""

from __future__ import annotations

from dataflex_hooks.components import Scorer
from dataflex_hooks.entries import GROUP_ESTIMATORS, estimator_problems
from dataflex_hooks.errors import ConfigError

GROUP_ADV_ESTIMATORS = GROUP_ESTIMATORS
"""verl's advantage estimators that compare several rollouts of a prompt."""


def validate_compat(scorer: Scorer, adv_estimator: str | None = None) -> None:
    """Refuse a scorer that compares rollouts of one prompt under an estimator that does not.

    Args:
        scorer: a scorer object.
        adv_estimator: ``algorithm.adv_estimator`` of the run; None checks nothing.

    Raises:
        ConfigError: which is a ValueError, saying which estimators have groups.
    """
    if adv_estimator is None or not scorer.needs_groups:
        return
    problems = estimator_problems("scorer.name", scorer.name or type(scorer).__name__, adv_estimator.lower())
    if problems:
        raise ConfigError(problems)
