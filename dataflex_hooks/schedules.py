"""Numbers that change with the training step: ``{0: 1.0, 100: 0.5}`` in the place of a parameter's constant value.

Between two knots the value moves on a straight line, before the first and after the last it stays. The longer form
names another shape, ``{shape: step, at: {0: 1.0, 100: 0.5}}``. ``step`` jumps at each knot, ``cosine`` starts and ends
gently.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from dataflex_hooks.errors import ConfigError, Described, Problem, did_you_mean, one_of

SHAPES = ("linear", "step", "cosine")
_FORM = "a mapping of training steps to numbers, steps rising from 0 or later, such as {0: 1.0, 100: 0.5}"


@dataclass(frozen=True)
class Schedule:
    """Knots and the way between them.

    Attributes:
        steps: training steps of the knots, rising, at least 0.
        values: the parameter at each knot.
        shape: ``linear``, ``step`` or ``cosine``.
        whole: True for a parameter that is a whole number: values between knots are rounded, halves up.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]
    shape: str = "linear"
    whole: bool = False

    def at(self, step: int) -> float:
        """Return the value at a training step."""
        after = bisect_right(self.steps, step)
        if after == 0:
            return self.values[0]
        start = self.values[after - 1]
        if after == len(self.steps) or self.shape == "step" or step == self.steps[after - 1]:
            return start
        way = (step - self.steps[after - 1]) / (self.steps[after] - self.steps[after - 1])
        if self.shape == "cosine":
            way = (1 - math.cos(math.pi * way)) / 2
        value = start + (self.values[after] - start) * way
        return math.floor(value + 0.5) if self.whole else value


def is_schedule(given: object) -> bool:
    """Whether a parameter's value is meant as a schedule; other mappings are left to the component."""
    if not isinstance(given, Mapping) or not given:
        return False
    if "at" in given:
        return True
    return any(_as_step(key) is not None for key in given) and not any(
        isinstance(value, (Mapping, list, tuple)) for value in given.values()
    )


def read_schedule(given: Mapping[object, object]) -> Schedule:
    """Read either form.

    Raises:
        ConfigError: with everything wrong; settings are relative to the parameter.
    """
    if "at" not in given:
        return Schedule(*_knots(given))
    problems = [
        Problem(str(key), value, one_of(("at", "shape")), did_you_mean(key, ("at", "shape")))
        for key, value in given.items()
        if key not in ("at", "shape")
    ]
    shape = given.get("shape", "linear")
    if shape not in SHAPES:
        problems.append(Problem("shape", shape, one_of(SHAPES), did_you_mean(shape, SHAPES)))
    at = given["at"]
    knots: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    if not isinstance(at, Mapping) or not at:
        problems.append(Problem("at", at, _FORM))
    else:
        try:
            knots = _knots(at)
        except ConfigError as error:
            problems += error.under("at")
    if problems:
        raise ConfigError(problems)
    return Schedule(*knots, shape=str(shape))


def _knots(given: Mapping[object, object]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    problems: list[Problem] = []
    steps: list[int] = []
    values: list[float] = []
    for key, value in given.items():
        step = _as_step(key)
        if step is None or step < 0:
            problems.append(Problem("", Described(f"step {key!r}"), _FORM))
        elif steps and step <= steps[-1]:
            given_steps = Described(f"step {step} after step {steps[-1]}")
            problems.append(Problem("", given_steps, _FORM))
        else:
            steps.append(step)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value):
            problems.append(Problem("", Described(f"{value!r} at step {key!r}"), _FORM))
        else:
            values.append(value)
    if problems:
        raise ConfigError(problems)
    return tuple(steps), tuple(values)


def _as_step(key: object) -> int | None:
    if isinstance(key, bool):
        return None
    if isinstance(key, int):
        return key
    text = key.strip() if isinstance(key, str) else ""
    return int(text) if text.removeprefix("-").isdecimal() else None
