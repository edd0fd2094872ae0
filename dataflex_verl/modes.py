"""Our trainer modes. Apart from what loads torch, so that commands can read them at once."""

from __future__ import annotations

from types import MappingProxyType

MODE = "trainer.v1.trainer_mode"
MODES = MappingProxyType(
    {"dataflex_sync": "sync", "dataflex_mix_sync": "sync", "dataflex_colocate_async": "colocate_async"}
)
"""Trainer mode by name, and the verl mode it is laid over."""
