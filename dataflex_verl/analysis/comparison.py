"""Arms of a comparison against its baseline, seed by seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dataflex_verl.analysis.alike import measured_alike, planned_alike
from dataflex_verl.analysis.conditions import Conditions
from dataflex_verl.analysis.outcomes import OVERALL, REWARD, RunOutcome, first_difference
from dataflex_verl.analysis.statistics import (
    ALPHA,
    BOOTSTRAP_FROM,
    Difference,
    bootstrap_coverage,
    holm,
    paired_difference,
    smallest_detectable,
)


@dataclass(frozen=True)
class Against:
    """An arm against the baseline in one outcome.

    Attributes:
        seeds: those under which both finished and have the outcome.
        differences: (n,) arm less baseline, in the order of ``seeds``.
        difference: what they come to; None without a pair.
        adjusted: p-value adjusted over the arms (Holm), in the main outcome only; there ``detectable`` is of the
            adjusted test.
    """

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    difference: Difference | None
    adjusted: float | None = None


@dataclass(frozen=True)
class ArmResult:
    """What an arm came to.

    Attributes:
        name: of the arm.
        means: by outcome, mean over its finished runs.
        runs: number of its finished runs.
        against: by outcome; empty for the baseline.
        same: seeds under which every step's reward and gradient norm equal the baseline's, bit for bit.
        gaps: what is missing, in words.
    """

    name: str
    means: Mapping[str, float]
    runs: int
    against: Mapping[str, Against] = field(default_factory=dict)
    same: tuple[int, ...] = ()
    gaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A comparison that was evaluated.

    Attributes:
        baseline: name of the first arm.
        seeds: as planned.
        steps: of every run.
        rollouts: generated for training by every run, or None where that is not known.
        outcomes: names, the main one first.
        arms: in the order given, the baseline first.
        runs: every run planned.
        notes: what holds for the comparison as a whole, in words.
        conditions: how alike the runs were, apart from the strategy.
    """

    baseline: str
    seeds: tuple[int, ...]
    steps: int
    rollouts: int | None
    outcomes: tuple[str, ...]
    arms: tuple[ArmResult, ...]
    runs: tuple[RunOutcome, ...]
    notes: tuple[str, ...] = ()
    conditions: Conditions = Conditions()

    @property
    def warnings(self) -> list[str]:
        """What was not the same in all runs, or could not be looked at: a sentence each, without the full stop."""
        return self.conditions.said(self.baseline)

    @property
    def main(self) -> str:
        return self.outcomes[0]


def compare_outcomes(
    runs: Sequence[RunOutcome],
    arms: Sequence[str],
    steps: int,
    rollouts: int | None = None,
    metric: str | None = None,
    alike: Iterable[tuple[str, str]] = (),
    conditions: Conditions | None = None,
) -> Comparison:
    """Evaluate runs.

    Args:
        runs: one an arm and seed.
        arms: their names, the baseline first.
        steps: training steps planned.
        rollouts: generated for training by every run.
        metric: the main outcome, where it is not validation.
        alike: pairs of arms with equal settings, whose runs therefore should be equal.
        conditions: how alike the runs were, apart from the strategy.

    Raises:
        MissingLibrary: scipy is not installed.
    """
    baseline, *others = arms
    main = metric or OVERALL
    runs = measured_alike(planned_alike(list(runs)))
    by_run = {(run.arm, run.seed): run for run in runs}
    seeds = tuple(dict.fromkeys(run.seed for run in runs))
    domains = {name for run in runs for name in run.values if name not in (main, REWARD)}
    outcomes = (main, *sorted(domains), REWARD)
    # The bootstrap's coverage depends on the number of pairs alone, which is the same for most arms.
    coverage: dict[int, float] = {}
    results = []
    for arm in others:
        against = {name: _against(by_run, arm, baseline, seeds, name, coverage) for name in outcomes}
        results.append(_result(by_run, arm, seeds, against, _same(by_run, arm, baseline, seeds)))
    first = _result(by_run, baseline, seeds, {}, ())
    return Comparison(
        baseline,
        seeds,
        steps,
        rollouts,
        outcomes,
        (first, *_adjusted(results, main)),
        tuple(runs),
        tuple(_notes(by_run, seeds, alike)),
        conditions or Conditions(),
    )


def _against(
    runs: Mapping[tuple[str, int], RunOutcome],
    arm: str,
    baseline: str,
    seeds: Sequence[int],
    name: str,
    coverage: dict[int, float],
) -> Against:
    paired = [seed for seed in seeds if all(name in runs[who, seed].values for who in (arm, baseline))]
    differences = [runs[arm, seed].values[name] - runs[baseline, seed].values[name] for seed in paired]
    if not paired:
        return Against((), (), None)
    n = len(paired)
    if n >= BOOTSTRAP_FROM and n not in coverage:
        coverage[n] = bootstrap_coverage(n)
    return Against(tuple(paired), tuple(differences), paired_difference(differences, coverage.get(n)))


def _result(
    runs: Mapping[tuple[str, int], RunOutcome],
    arm: str,
    seeds: Sequence[int],
    against: Mapping[str, Against],
    same: tuple[int, ...],
) -> ArmResult:
    own = [runs[arm, seed] for seed in seeds]
    values: dict[str, list[float]] = {}
    for run in own:
        for name, value in run.values.items():
            values.setdefault(name, []).append(value)
    gaps: dict[str, list[int]] = {}
    for run in own:
        if run.reason:
            state = "" if run.state == "finished" else f"{run.state}: "
            gaps.setdefault(f"{state}{run.reason}", []).append(run.seed)
        for note in run.log.notes if run.log is not None else ():
            gaps.setdefault(note, []).append(run.seed)
    missing = tuple(f"seed {', '.join(map(str, seeds))}: {text}" for text, seeds in gaps.items())
    means = {name: sum(found) / len(found) for name, found in values.items()}
    return ArmResult(arm, means, sum(run.state == "finished" for run in own), against, same, missing)


def _same(runs: Mapping[tuple[str, int], RunOutcome], arm: str, baseline: str, seeds: Sequence[int]) -> tuple[int, ...]:
    return tuple(seed for seed in seeds if _departure(runs[arm, seed], runs[baseline, seed]) == "never")


def _departure(one: RunOutcome, other: RunOutcome) -> str:
    """Where two runs begin to differ: a step, ``never``, or nothing where that cannot be said."""
    if one.state != "finished" or other.state != "finished" or one.log is None or other.log is None:
        return ""
    try:
        step = first_difference(one.log, other.log)
    except ValueError:
        return ""
    return "never" if step is None else str(step)


def _adjusted(results: list[ArmResult], main: str) -> list[ArmResult]:
    """Holm over the arms that were tested at all; what can be detected is up to that test too."""
    tested = [
        (index, found, found.p)
        for index, result in enumerate(results)
        if (found := result.against[main].difference) is not None and found.p is not None
    ]
    adjusted = list(results)
    for (index, found, _), p in zip(tested, holm([p for _, _, p in tested]), strict=True):
        result = results[index]
        if len(tested) > 1 and found.sd is not None:
            found = replace(found, detectable=smallest_detectable(found.sd, found.n, alpha=ALPHA / len(tested)))
        against = {**result.against, main: replace(result.against[main], difference=found, adjusted=p)}
        adjusted[index] = replace(result, against=against)
    return adjusted


def _notes(
    runs: Mapping[tuple[str, int], RunOutcome], seeds: Sequence[int], alike: Iterable[tuple[str, str]]
) -> list[str]:
    notes = []
    for one, other in alike:
        for seed in seeds:
            step = _departure(runs[one, seed], runs[other, seed])
            if step == "never":
                count = len(runs[one, seed].log.steps)  # type: ignore[union-attr]
                notes.append(
                    f"{one} and {other} have equal settings; under seed {seed} the rewards and gradient norms of all "
                    f"{count} steps are equal: the difference is exactly 0"
                )
            elif step:
                notes.append(
                    f"{one} and {other} have equal settings, but under seed {seed} their runs differ from step {step} "
                    "on: training is not deterministic here, and part of every difference is that"
                )
    return notes
