"""Errors that name the setting, the plugin or the component at fault, and say what would be accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

_LONGEST_GIVEN = 160


class DataFlexError(Exception):
    """Base class of every error raised on purpose by this package."""


class Described(str):
    """Text that stands in a message as it is, where any other given value is shown by its ``repr``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


NOTHING = Described("nothing")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the entry of ``names`` closest to ``name`` in spelling, or None when none is close."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: object, names: Iterable[str]) -> str | None:
    """Return ``"did you mean 'x'?"`` for the entry of ``names`` closest to ``name``, or None."""
    match = nearest(str(name), names)
    return None if match is None else f"did you mean {match!r}?"


def one_of(names: Iterable[str]) -> str:
    """Return ``names`` sorted, as the "accepted" part of a message."""
    listed = ", ".join(sorted(names))
    return f"one of {listed}" if listed else "nothing"


@dataclass(frozen=True)
class Problem:
    """One wrong setting.

    ``setting`` is the full path (``dataflex.plugins.focus.actuator.params.low``), or, while a constructor raises it,
    the path below that constructor (``low``): whoever called the constructor adds its own part with :meth:`under`.
    ``cause`` is the exception behind the problem, if there is one; :class:`ConfigError` chains it.
    """

    setting: str
    given: object
    accepted: str
    hint: str | None = None
    cause: BaseException | None = field(default=None, compare=False, repr=False)

    def under(self, prefix: str) -> Problem:
        """Return the same problem with ``prefix.`` in front of its setting."""
        return replace(self, setting=f"{prefix}.{self.setting}" if self.setting else prefix)

    def __str__(self) -> str:
        given = repr(self.given)
        if len(given) > _LONGEST_GIVEN and not isinstance(self.given, Described):
            given = given[: _LONGEST_GIVEN - 3] + "..."
        text = f"{self.setting}: got {given}; accepted: {self.accepted}"
        return f"{text}; {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[type[Problem], tuple[object, ...]]:
        # The cause may hold anything (frames, sockets); the text of the problem has to survive a process boundary.
        return Problem, (self.setting, self.given, self.accepted, self.hint)


class ConfigError(DataFlexError, ValueError):
    """Everything wrong with a configuration, collected: ``problems`` in the order in which the settings were read.

    Also a ValueError, which is what the published functions raise.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(list(problems))
        self.problems = list(problems)
        self.__cause__ = next((problem.cause for problem in self.problems if problem.cause is not None), None)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        numbered = (f"{number}. {problem}" for number, problem in enumerate(self.problems, start=1))
        return "\n".join([f"{len(self.problems)} problems in the dataflex configuration:", *numbered])

    def under(self, prefix: str) -> list[Problem]:
        """Return the problems with ``prefix.`` in front of each setting."""
        return [problem.under(prefix) for problem in self.problems]


class ParameterError(ConfigError):
    """One parameter is wrong; raised by the constructor that takes it, completed to a full path by the host."""

    def __init__(self, parameter: str, given: object, accepted: str) -> None:
        super().__init__([Problem(parameter, given, accepted)])

    def __reduce__(self) -> tuple[type[ParameterError], tuple[object, ...]]:
        problem = self.problems[0]
        return ParameterError, (problem.setting, problem.given, problem.accepted)


class FieldError(DataFlexError, KeyError):
    """A batch field that is not there was asked for."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Origin:
    """Which plugin acted, where: label, hook, step, and the distribution it came from (None: not installed as one)."""

    label: str
    hook: str
    step: int | None = None
    distribution: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        source = f"{self.distribution} {self.version}" if self.distribution else "no distribution"
        step = "" if self.step is None else f" at step {self.step}"
        return f"plugin {self.label!r} ({source}) in {self.hook}{step}"


class PluginError(DataFlexError):
    """A plugin failed at run time. The exception it raised is the ``__cause__``."""

    def __init__(self, origin: Origin, message: str) -> None:
        super().__init__(origin, message)
        self.origin = origin
        self.message = message

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}"


class DecisionError(PluginError):
    """A plugin returned a decision that cannot be used, or changed what it may only read."""
