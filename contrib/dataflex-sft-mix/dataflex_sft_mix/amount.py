"""How many demonstrations are due: a share that may fall over time, and the fraction left over from last time."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from dataflex_hooks import ConfigError, ParameterChecks, Problem, is_schedule, read_schedule

DECAYS = ("none", "linear", "exponential")


class Share:
    """Demonstrations per rollout at a training step.

    With ``s`` the share, ``m`` the least share and ``T`` the decay steps, the share at step t is
    ``m + (s - m) * max(0, 1 - t / T)`` under ``linear`` and ``m + (s - m) * 2 ** (-t / T)`` under ``exponential``.

    Args:
        share: 0 to 1, or a schedule ``{step: share}`` as :func:`dataflex_hooks.read_schedule` reads it.
        decay: ``none``, ``linear`` or ``exponential``.
        decay_steps: T, training steps: to the end of a linear decay, or the half-life of an exponential one.
        min_share: m, 0 to ``share``.
        checks: collects what is wrong.
    """

    def __init__(
        self, share: object, decay: object, decay_steps: object, min_share: object, checks: ParameterChecks
    ) -> None:
        self._schedule = None
        self.decay = checks.choice("decay", decay, DECAYS)
        self.steps = 1
        if is_schedule(share):
            self._read(share, checks)
            if self.decay != "none":
                checks.refuse("decay", decay, "none where the share is a schedule, which says itself how it falls")
            self.share = 0.0
        else:
            self.share = checks.number("share", share, at_least=0, at_most=1)
        if self.decay == "none":
            if decay_steps is not None:
                checks.refuse("decay_steps", decay_steps, "nothing with decay: none")
            if min_share != 0:
                checks.refuse("min_share", min_share, "0 with decay: none")
            self.least = 0.0
            return
        self.steps = checks.integer("decay_steps", decay_steps, at_least=1)
        self.least = checks.number("min_share", min_share, at_least=0, at_most=max(0.0, self.share))

    def _read(self, share: object, checks: ParameterChecks) -> None:
        assert isinstance(share, Mapping)
        try:
            self._schedule = read_schedule(share)
        except ConfigError as error:
            checks.add(error.under("share"))
            return
        for step, value in zip(self._schedule.steps, self._schedule.values, strict=True):
            if not 0 <= value <= 1:
                checks.add([Problem("share", dict(share), f"a number >= 0 and <= 1 at step {step}")])

    def at(self, step: int) -> Fraction:
        """Return the share at a training step.

        A constant one is the fraction of a denominator up to a million that the number stands for, so that 1/3 is a
        third. Of one that changes, twelve decimals count: sums of such fractions stay short.
        """
        if self._schedule is not None:
            return _rounded(float(self._schedule.at(step)))
        if self.decay == "none":
            return Fraction(self.share).limit_denominator(10**6)
        left = max(0.0, 1 - step / self.steps) if self.decay == "linear" else 2.0 ** (-step / self.steps)
        return _rounded(self.least + (self.share - self.least) * left)


def _rounded(value: float) -> Fraction:
    return Fraction(round(value * 10**12), 10**12)


def whole(share: Fraction, rollouts: int, carried: Fraction) -> tuple[int, Fraction]:
    """Round ``share * rollouts + carried`` down; what is cut off is carried to the next time.

    In exact arithmetic: after any number of steps of one share the demonstrations add up to
    ``floor(share * all rollouts)``.

    Returns:
        Demonstrations that are due, and the fraction to carry, in [0, 1).
    """
    wanted = share * rollouts + carried
    due = wanted.numerator // wanted.denominator
    return due, wanted - due
