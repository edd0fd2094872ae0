"""What authors of plugins test with: builders of inputs, a run of the hooks, and the contract as a check.

Needs neither verl nor Ray nor pytest. The same as pytest fixtures: ``dataflex_testing``, ``run_hooks``,
``assert_plugin_contract``.
"""

from dataflex_hooks.testing.batches import Row, grpo_advantages, make_batch, make_groups
from dataflex_hooks.testing.contract import PROPERTIES, ContractError, assert_plugin_contract
from dataflex_hooks.testing.inputs import make_context, make_prompts, make_stats
from dataflex_hooks.testing.outcome import Outcome
from dataflex_hooks.testing.random_batches import random_batch
from dataflex_hooks.testing.rebuild import take_rows
from dataflex_hooks.testing.running import HookRunner, run_hooks

__all__ = [
    "PROPERTIES",
    "ContractError",
    "HookRunner",
    "Outcome",
    "Row",
    "assert_plugin_contract",
    "grpo_advantages",
    "make_batch",
    "make_context",
    "make_groups",
    "make_prompts",
    "make_stats",
    "random_batch",
    "run_hooks",
    "take_rows",
]
