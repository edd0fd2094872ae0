"""Hooks for data scheduling in reinforcement-learning fine-tuning: specifications, decisions, components, manager.

Pure: imports neither verl nor Ray.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "dataflex_hooks needs PyTorch. Install the build for your machine, e.g.: pip install torch"
    ) from error

from dataflex_hooks._version import __version__
from dataflex_hooks.batch import DomainStats, PromptBatch, RolloutBatch
from dataflex_hooks.coefficients import LossCoefficients
from dataflex_hooks.components import Mixer, Reweighter, Scorer, Selector
from dataflex_hooks.config import DataFlexConfig, PluginSettings, parse
from dataflex_hooks.context import StepContext
from dataflex_hooks.decisions import AddedRow, DomainDecision, RewardDecision, RolloutDecision, UpdateDecision
from dataflex_hooks.errors import (
    ConfigError,
    DataFlexError,
    DecisionError,
    Described,
    FieldError,
    Origin,
    ParameterError,
    PluginError,
    Problem,
    nearest,
)
from dataflex_hooks.manager import HookManager
from dataflex_hooks.markers import hookimpl, hookspec
from dataflex_hooks.merge import LabelledDecision, MergedUpdate, merge_update
from dataflex_hooks.merge_reward import Generated, MergedReward
from dataflex_hooks.parameters import ParameterChecks
from dataflex_hooks.registry import (
    REGISTRY,
    register_mixer,
    register_reweighter,
    register_scorer,
    register_selector,
)
from dataflex_hooks.schedules import Schedule, is_schedule, read_schedule

__all__ = [
    "REGISTRY",
    "AddedRow",
    "ConfigError",
    "DataFlexConfig",
    "DataFlexError",
    "DecisionError",
    "Described",
    "DomainDecision",
    "DomainStats",
    "FieldError",
    "Generated",
    "HookManager",
    "LabelledDecision",
    "LossCoefficients",
    "MergedReward",
    "MergedUpdate",
    "Mixer",
    "Origin",
    "ParameterChecks",
    "ParameterError",
    "PluginError",
    "PluginSettings",
    "Problem",
    "PromptBatch",
    "RewardDecision",
    "Reweighter",
    "RolloutBatch",
    "RolloutDecision",
    "Schedule",
    "Scorer",
    "Selector",
    "StepContext",
    "UpdateDecision",
    "__version__",
    "hookimpl",
    "hookspec",
    "is_schedule",
    "merge_update",
    "nearest",
    "parse",
    "read_schedule",
    "register_mixer",
    "register_reweighter",
    "register_scorer",
    "register_selector",
]
