"""Built-in reweighters, one a file, the file named as the reweighter. Importing this package registers them."""

from dataflex_hooks.reweighters import advantage_reweight, per_advantage, softmax

__all__ = ["advantage_reweight", "per_advantage", "softmax"]
