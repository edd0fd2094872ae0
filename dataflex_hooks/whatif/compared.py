"""Counts of what strategies decided, and of where two of them differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks.domain_stats import DOMAIN_COLUMN
from dataflex_hooks.whatif.logged_batch import LoggedRows
from dataflex_hooks.whatif.replay import Decided

STATES = ("trained", "masked", "dropped")
_MOST = 20


@dataclass
class Total:
    """Sums over rollouts, all of them and those that are trained on."""

    rollouts: int = 0
    states: Counter[str] = field(default_factory=Counter)
    reward: float = 0.0
    reward_trained: float = 0.0
    weight: float = 0.0
    squares: float = 0.0
    largest: float = 0.0
    in_update: int = 0

    def add(self, rows: LoggedRows, decided: Decided, which: NDArray[np.bool_] | None = None) -> None:
        """Add the rollouts of one update, or those marked."""
        state, weight, reward = decided.state, decided.weight.astype(np.float64), rows.reward.astype(np.float64)
        if which is not None:
            state, weight, reward = state[which], weight[which], reward[which]
        count = np.bincount(state, minlength=len(STATES))
        self.states.update({name: int(count[code]) for code, name in enumerate(STATES)})
        self.rollouts += len(state)
        self.reward += float(reward.sum())
        self.reward_trained += float(reward[state == 0].sum())
        self.in_update += int((state != 2).sum())
        self.weight += float(weight.sum())
        self.squares += float((weight * weight).sum())
        self.largest = max(self.largest, float(weight.max(initial=0.0)))

    def plain(self) -> dict[str, Any]:
        """Shares and means, as numbers; None where nothing is there to take a mean of."""
        trained = self.states["trained"]
        return {
            "rollouts": self.rollouts,
            **{name: self.states[name] for name in STATES},
            "trained_frac": _share(trained, self.rollouts),
            "reward_all": _share(self.reward, self.rollouts),
            "reward_trained": _share(self.reward_trained, trained),
            "weight_mean": _share(self.weight, self.in_update),
            "weight_largest": self.largest if self.in_update else None,
            "ess_frac": _share(self.weight**2, self.in_update * self.squares),
        }


@dataclass
class Tally:
    """What one strategy decided over a log.

    Attributes:
        total: over all steps.
        steps: by step.
        domains: by domain, where there are any.
        reasons: rollouts that were not kept, by plugin and reason; one may count for several.
        skipped: steps in which an update was skipped.
    """

    total: Total = field(default_factory=Total)
    steps: dict[int, Total] = field(default_factory=dict)
    domains: dict[str, Total] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    skipped: set[int] = field(default_factory=set)

    def add(self, step: int, rows: LoggedRows, decided: Decided) -> None:
        """Add one update."""
        self.total.add(rows, decided)
        self.steps.setdefault(step, Total()).add(rows, decided)
        for name, which in by_domain(rows).items():
            self.domains.setdefault(name, Total()).add(rows, decided, which)
        for label, reason, against in decided.against:
            self.reasons[f"{label}: {reason}" if reason else label] += int(against.sum())
        if decided.skip_update:
            self.skipped.add(step)

    def plain(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            **self.total.plain(),
            "reasons": dict(self.reasons),
            "skipped_steps": sorted(self.skipped),
            "domains": {name: total.plain() for name, total in sorted(self.domains.items())},
            "steps": [{"step": step, **total.plain()} for step, total in sorted(self.steps.items())],
        }


@dataclass
class Difference:
    """Where two strategies differ over a log.

    Attributes:
        both, neither, first, second: rollouts trained on by both, by neither, by one only.
        same_weight: rollouts of both with bit for bit the same weight.
        identical: rollouts whose state and weight are bit for bit the same.
        weight_gap: sum of the absolute differences of weights.
        domains: the first four by domain.
        prompts: the prompts with the most rollouts on which the two disagree.
    """

    both: int = 0
    neither: int = 0
    first: int = 0
    second: int = 0
    identical: int = 0
    weight_gap: float = 0.0
    domains: dict[str, list[int]] = field(default_factory=dict)
    prompts: list[dict[str, Any]] = field(default_factory=list)

    def add(self, step: int, rows: LoggedRows, one: Decided, other: Decided) -> None:
        """Add one update."""
        a, b = one.state == 0, other.state == 0
        self._count(a, b)
        same = (one.state == other.state) & (one.weight.view(np.int32) == other.weight.view(np.int32))
        self.identical += int(same.sum())
        self.weight_gap += float(np.abs(one.weight.astype(np.float64) - other.weight).sum())
        for name, which in by_domain(rows).items():
            four = self.domains.setdefault(name, [0, 0, 0, 0])
            for place, count in enumerate(_four(a[which], b[which])):
                four[place] += count
        self._note_prompts(step, rows, a, b)

    def _count(self, a: NDArray[np.bool_], b: NDArray[np.bool_]) -> None:
        both, neither, first, second = _four(a, b)
        self.both += both
        self.neither += neither
        self.first += first
        self.second += second

    def _note_prompts(self, step: int, rows: LoggedRows, a: NDArray[np.bool_], b: NDArray[np.bool_]) -> None:
        names = len(rows.uid_names)
        apart = np.bincount(rows.uid, weights=a != b, minlength=names)
        order = np.argsort(-apart, kind="stable")[:_MOST]
        size = np.bincount(rows.uid, minlength=names)
        reward = np.bincount(rows.uid, weights=rows.reward, minlength=names)
        ones, others = (np.bincount(rows.uid, weights=kept, minlength=names) for kept in (a, b))
        domain = rows.columns.get(DOMAIN_COLUMN)
        for prompt in order[apart[order] > 0].tolist():
            row = int(np.flatnonzero(rows.uid == prompt)[0])
            self.prompts.append(
                {
                    "step": step,
                    "uid": str(rows.uid_names[prompt]),
                    "prompt_hash": None if rows.prompt_hash is None else int(rows.prompt_hash[row]),
                    "domain": None if domain is None else str(domain[row]),
                    "rollouts": int(size[prompt]),
                    "reward": float(reward[prompt] / size[prompt]),
                    "first": int(ones[prompt]),
                    "second": int(others[prompt]),
                    "apart": int(apart[prompt]),
                }
            )
        self.prompts.sort(key=lambda prompt: (-prompt["apart"], prompt["step"], prompt["uid"]))
        del self.prompts[_MOST:]

    def plain(self) -> dict[str, Any]:
        """Everything as plain values."""
        n = self.both + self.neither + self.first + self.second
        return {
            "rollouts": n,
            "agreement": _share(self.both + self.neither, n),
            "trained_by_both": self.both,
            "trained_by_neither": self.neither,
            "trained_by_first_only": self.first,
            "trained_by_second_only": self.second,
            "identical": self.identical,
            "weight_gap_mean": _share(self.weight_gap, n),
            "domains": {
                name: {"agreement": _share(four[0] + four[1], sum(four)), "first_only": four[2], "second_only": four[3]}
                for name, four in sorted(self.domains.items())
            },
            "prompts": self.prompts,
        }


def by_domain(rows: LoggedRows) -> Mapping[str, NDArray[np.bool_]]:
    """Which rows are of each domain; empty without a domain column."""
    column = rows.columns.get(DOMAIN_COLUMN)
    if column is None or rows.domain_code is None:
        return {}
    return {str(rows.domain_names[code]): rows.domain_code == code for code in np.unique(rows.domain_code).tolist()}


def _four(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    return int((a & b).sum()), int((~a & ~b).sum()), int((a & ~b).sum()), int((~a & b).sum())


def _share(part: float, whole: float) -> float | None:
    value = part / whole if whole else None
    return value if value is None or math.isfinite(value) else None
