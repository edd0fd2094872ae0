"""The published contract of components: registry, base classes and compatibility check, under their published names."""

from dataflex_verl.core.actuator import Actuator, Mixer, Reweighter, Selector
from dataflex_verl.core.config import validate_compat
from dataflex_verl.core.registry import (
    REGISTRY,
    Registry,
    register_mixer,
    register_reweighter,
    register_scorer,
    register_selector,
)
from dataflex_verl.core.scorer import Scorer

__all__ = [
    "REGISTRY",
    "Actuator",
    "Mixer",
    "Registry",
    "Reweighter",
    "Scorer",
    "Selector",
    "register_mixer",
    "register_reweighter",
    "register_scorer",
    "register_selector",
    "validate_compat",
]
