"""Built-in scorers, one a file, the file named as the scorer. Importing this package registers them."""

from dataflex_hooks.scorers import (
    advantage_magnitude,
    failed,
    group_solve_rate,
    reward_difficulty,
    token_entropy,
    token_prob,
    truncated,
    vcrl,
)

__all__ = [
    "advantage_magnitude",
    "failed",
    "group_solve_rate",
    "reward_difficulty",
    "token_entropy",
    "token_prob",
    "truncated",
    "vcrl",
]
