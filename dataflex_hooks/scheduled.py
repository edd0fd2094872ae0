"""Components with parameters that change with the training step: built once a knot, then one of them lives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from dataflex_hooks.components import Component
from dataflex_hooks.errors import ConfigError, Described, Problem
from dataflex_hooks.schedules import Schedule, is_schedule, read_schedule


def build_scheduled(build: Callable[[Mapping[str, object]], Component], params: Mapping[str, object]) -> Component:
    """Build a component whose parameters may hold schedules.

    It is built with the values at every knot, so that a value which is wrong at any step is refused at start; the one
    returned stands at step 0.

    Args:
        build: builds it from constant parameters.
        params: parameters, some of them perhaps schedules.

    Raises:
        ConfigError: a malformed schedule, a parameter that can have none, or a value that is refused at some knot.
    """
    schedules: dict[str, Schedule] = {}
    problems: list[Problem] = []
    for name, given in params.items():
        if is_schedule(given):
            try:
                schedules[name] = read_schedule(given)  # type: ignore[arg-type]
            except ConfigError as error:
                problems += error.under(f"params.{name}")
    if problems:
        raise ConfigError(problems)
    if not schedules:
        return build(params)
    knots = sorted({0, *(step for schedule in schedules.values() for step in schedule.steps)})
    built: dict[int, Component] = {}
    for step in knots:
        try:
            built[step] = build({**params, **{name: schedule.at(step) for name, schedule in schedules.items()}})
        except ConfigError as error:
            problems += [_at_knot(problem, step, schedules) for problem in error.problems]
    if len(built) == len(knots):
        problems += [problem for name in schedules if (problem := _fixed(name, params[name], schedules[name], built))]
    if problems:
        # What is wrong at every knot alike is said once.
        raise ConfigError(list({str(problem): problem for problem in problems}.values()))
    component = built[0]
    component.schedules = MappingProxyType(
        {name: replace(schedule, whole=_is_whole(name, built)) for name, schedule in schedules.items()}
    )
    return component


def set_step(component: Component, step: int) -> None:
    """Give a component the values that its schedules have at ``step``."""
    for name, schedule in component.schedules.items():
        setattr(component, name, schedule.at(step))


def _at_knot(problem: Problem, step: int, schedules: Mapping[str, Schedule]) -> Problem:
    name = problem.setting.removeprefix("params.")
    if name not in schedules:
        return problem
    return replace(problem, given=Described(f"{problem.given!r} at step {step}"))


def _fixed(name: str, given: object, schedule: Schedule, built: Mapping[int, Component]) -> Problem | None:
    """Say so if a parameter cannot change: the component does not keep it as a number of its own."""
    if all(_keeps(component, name, schedule.at(step)) for step, component in built.items()):
        return None
    cls = type(next(iter(built.values())))
    hint = f"only a number that {cls.__name__} keeps under the name {name!r} can change with the step"
    return Problem(f"params.{name}", given, "a constant", hint)


def _keeps(component: Component, name: str, value: float) -> bool:
    kept = getattr(component, name, None)
    return isinstance(kept, (int, float)) and not isinstance(kept, bool) and kept == value


def _is_whole(name: str, built: Mapping[int, Component]) -> bool:
    default = inspect.signature(type(built[0])).parameters.get(name)
    if default is not None and isinstance(default.default, float):
        return False
    return all(isinstance(getattr(component, name), int) for component in built.values())
