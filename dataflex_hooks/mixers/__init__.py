"""Built-in mixers, one a file, the file named as the mixer. Importing this package registers them."""

from dataflex_hooks.mixers import dads, doremi, dump_ucb, odm, reward_gap, schedule, sec, static, tscl

__all__ = ["dads", "doremi", "dump_ucb", "odm", "reward_gap", "schedule", "sec", "static", "tscl"]
