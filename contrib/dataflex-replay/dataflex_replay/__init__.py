"""Past successes of a prompt, replayed to its group when all its rollouts fail."""

from dataflex_replay.plugin import Replay
from dataflex_replay.pool import Bounds, Responses, SuccessPool

__all__ = ["Bounds", "Replay", "Responses", "SuccessPool"]
