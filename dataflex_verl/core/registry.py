"""The registry of components and its decorators."""

from dataflex_hooks.registry import (
    REGISTRY,
    Registry,
    register_mixer,
    register_reweighter,
    register_scorer,
    register_selector,
)

__all__ = [
    "REGISTRY",
    "Registry",
    "register_mixer",
    "register_reweighter",
    "register_scorer",
    "register_selector",
]
