"""Built-in reweighters, one a file, the file named as the reweighter. Importing this package registers them."""

from dataflex_hooks.reweighters import (
    advantage_reweight,
    curve,
    difficulty_band,
    difficulty_length,
    high_entropy,
    per_advantage,
    pf_ppo,
    softmax,
)

__all__ = [
    "advantage_reweight",
    "curve",
    "difficulty_band",
    "difficulty_length",
    "high_entropy",
    "per_advantage",
    "pf_ppo",
    "softmax",
]
