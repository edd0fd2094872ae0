"""How alike the runs of a comparison were, apart from the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SettingDifference:
    """A setting that an arm has otherwise than the baseline, values as text."""

    setting: str
    value: str
    baseline: str


@dataclass(frozen=True)
class Conditions:
    """What is known of it.

    Attributes:
        differs: by arm, settings outside ``dataflex`` that it has otherwise than the baseline.
        warnings: what else was not the same in all runs, in words.
        unchecked: what has to be the same and could not be looked at, in words.
    """

    differs: Mapping[str, tuple[SettingDifference, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    def said(self, baseline: str) -> list[str]:
        """A sentence each, without the full stop."""
        arms = [_sentence(arm, baseline, differs) for arm, differs in self.differs.items() if differs]
        return [*arms, *self.warnings, *self.unchecked]


def _sentence(arm: str, baseline: str, differs: tuple[SettingDifference, ...]) -> str:
    listed = ", ".join(f"{one.setting}={one.value} ({baseline}: {one.baseline})" for one in differs)
    return f"{arm} differs from {baseline} outside dataflex too: {listed}; the difference is that of all of it together"
