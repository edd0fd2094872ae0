"""Range checks for the parameters of a component, collected so that all of them are reported at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dataflex_hooks.errors import NOTHING, ConfigError, Problem, did_you_mean, one_of


class ParameterChecks:
    """Checks one constructor's parameters; :meth:`finish` raises what they found.

    A check that fails returns a harmless value, so that the following ones can run.
    """

    def __init__(self) -> None:
        self._problems: list[Problem] = []

    def number(
        self,
        parameter: str,
        given: object,
        *,
        above: float = -math.inf,
        at_least: float = -math.inf,
        at_most: float = math.inf,
        finite: bool = True,
    ) -> float:
        """Return ``given`` as a float if it is a number within the bounds."""
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        value = float(given) if is_number else math.nan  # type: ignore[arg-type]
        in_range = value > above or (above == -math.inf and not math.isnan(value))
        if in_range and at_least <= value <= at_most and not (finite and math.isinf(value)):
            return value
        bounds = [f"> {above:g}"] if above > -math.inf else []
        bounds += [f">= {at_least:g}"] if at_least > -math.inf else []
        bounds += [f"<= {at_most:g}"] if at_most < math.inf else []
        kind = "a finite number" if finite else "a number"
        self.refuse(parameter, given, " ".join([kind, " and ".join(bounds)]).strip())
        return 1.0

    def integer(self, parameter: str, given: object, *, at_least: int) -> int:
        """Return ``given`` if it is a whole number within the bound."""
        if isinstance(given, int) and not isinstance(given, bool) and given >= at_least:
            return given
        self.refuse(parameter, NOTHING if given is None else given, f"an integer >= {at_least}")
        return max(at_least, 1)

    def flag(self, parameter: str, given: object) -> bool:
        """Return ``given`` if it is a bool."""
        if not isinstance(given, bool):
            self.refuse(parameter, given, "true or false")
        return bool(given)

    def choice(self, parameter: str, given: object, choices: Iterable[str]) -> str:
        """Return ``given`` if it is one of ``choices``."""
        accepted = list(choices)
        if given not in accepted:
            self._problems.append(Problem(parameter, given, one_of(accepted), did_you_mean(given, accepted)))
        return str(given)

    def refuse(self, parameter: str, given: object, accepted: str) -> None:
        """Record that ``given`` is wrong for ``parameter``."""
        self._problems.append(Problem(parameter, given, accepted))

    @property
    def failed(self) -> int:
        """How many problems were found so far."""
        return len(self._problems)

    def add(self, problems: Iterable[Problem]) -> None:
        """Record problems found elsewhere; their settings are parameter names."""
        self._problems += problems

    def finish(self) -> None:
        """Raise ConfigError with everything refused so far, if anything was."""
        if self._problems:
            raise ConfigError(self._problems)
