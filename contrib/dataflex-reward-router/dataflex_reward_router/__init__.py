"""Rewards adjusted by route: each prompt belongs to one, by a dataset column or by a function of yours."""

from dataflex_reward_router.plugin import RewardRouter
from dataflex_reward_router.routes import Route

__all__ = ["RewardRouter", "Route"]
