"""A cheap reward for every response, an expensive one for the best of each group."""

from dataflex_two_stage_reward.calls import RewardFunctionError
from dataflex_two_stage_reward.plugin import TwoStageReward

__all__ = ["RewardFunctionError", "TwoStageReward"]
