"""Updates damped or skipped while a KL estimate is too high, with hysteresis."""

from dataflex_kl_guard.guard import Hysteresis
from dataflex_kl_guard.plugin import KLGuard

__all__ = ["Hysteresis", "KLGuard"]
