"""The base classes of actuators: selectors, reweighters and mixers."""

from dataflex_hooks.components import Component as Actuator
from dataflex_hooks.components import Mixer, Reweighter, Selector

__all__ = ["Actuator", "Mixer", "Reweighter", "Selector"]
