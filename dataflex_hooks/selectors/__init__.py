"""Built-in selectors, one a file, the file named as the selector. Importing this package registers them."""

from dataflex_hooks.selectors import (
    dapo,
    gfpo,
    max_variance,
    threshold_band,
    topk_fraction,
)

__all__ = [
    "dapo",
    "gfpo",
    "max_variance",
    "threshold_band",
    "topk_fraction",
]
