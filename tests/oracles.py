"""What each preset has to decide, in plain Python: loops over rows, nothing of ours imported, nothing vectorised.

A rollout is given as :class:`OracleRow`; padding rows are not among them. Selecting presets give one bool a row,
reweighting presets one number a row or a list with one a token, before any normalisation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class OracleRow:
    """One model output with all that a method may look at; token lists have one entry a response token."""

    uid: str
    session: int
    output: int
    reward: float
    mask: tuple[int, ...]
    advantages: tuple[float, ...] = ()
    log_probs: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    tie: int = 0
    """Rank among rows that are otherwise equal."""
    info: dict = field(default_factory=dict)


@dataclass
class Session:
    uid: str
    rows: list[int]
    final: int


def sessions_of(rows: Sequence[OracleRow]) -> list[Session]:
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        found[row.uid, row.session].append(i)
    return [Session(uid, members, max(members, key=lambda i: rows[i].output)) for (uid, _), members in found.items()]


def groups_of(sessions: Sequence[Session]) -> list[list[Session]]:
    found: dict[str, list[Session]] = defaultdict(list)
    for session in sessions:
        found[session.uid].append(session)
    return list(found.values())


def half_up(value: float) -> int:
    return math.floor(value + 0.5)


def keep(rows: Sequence[OracleRow], kept: Sequence[Session]) -> list[bool]:
    members = {i for session in kept for i in session.rows}
    return [i in members for i in range(len(rows))]


def magnitude(row: OracleRow) -> float:
    counted = [abs(a) for a, m in zip(row.advantages, row.mask, strict=True) if m]
    return math.fsum(counted) / len(counted) if counted else 0.0


def session_magnitude(rows: Sequence[OracleRow], session: Session) -> float:
    return math.fsum(magnitude(rows[i]) for i in session.rows) / len(session.rows)


def reward(rows: Sequence[OracleRow], session: Session) -> float:
    return rows[session.final].reward


def pass_rate(rows: Sequence[OracleRow], group: Sequence[Session]) -> Fraction:
    return Fraction(sum(reward(rows, s) > 0.5 for s in group), len(group))


def length(rows: Sequence[OracleRow], session: Session) -> int:
    return sum(sum(rows[i].mask) for i in session.rows)


def per_group_weights(rows: Sequence[OracleRow], weigh: Callable[[list[Session]], float]) -> list[float]:
    weights = [0.0] * len(rows)
    for group in groups_of(sessions_of(rows)):
        value = weigh(group)
        for session in group:
            for i in session.rows:
                weights[i] = value
    return weights


def per_session_weights(rows: Sequence[OracleRow], weigh: Callable[[Session], float]) -> list[float]:
    weights = [0.0] * len(rows)
    for session in sessions_of(rows):
        for i in session.rows:
            weights[i] = weigh(session)
    return weights


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# ------------------------------------------------------------------------------------------------------ select


def difffilter(rows, **_):
    groups = groups_of(sessions_of(rows))
    return keep(
        rows, [s for group in groups if Fraction(1, 5) < pass_rate(rows, group) < Fraction(4, 5) for s in group]
    )


def topk(rows, **_):
    sessions = sessions_of(rows)
    k = max(1, half_up(0.5 * len(sessions)))
    best = sorted(sessions, key=lambda s: (-session_magnitude(rows, s), rows[s.final].tie))
    return keep(rows, best[:k])


def maxvar(rows, **_):
    kept = []
    for group in groups_of(sessions_of(rows)):
        m = max(1, half_up(0.5 * len(group)))
        ordered = sorted(group, key=lambda s: (-reward(rows, s), rows[s.final].tie))
        subsets = [ordered[: m - a] + ordered[len(ordered) - a :] for a in range(m + 1)]
        variances = []
        for subset in subsets:
            values = [Fraction(reward(rows, s)) for s in subset]
            mean = sum(values) / m
            variances.append(sum((v - mean) ** 2 for v in values))
        # Differences below the rounding of float64 are none, and of equal ones the first is taken.
        enough = max(variances) * (1 - Fraction(1, 10**12))
        kept += next(subset for subset, variance in zip(subsets, variances, strict=True) if variance >= enough)
    return keep(rows, kept)


def gfpo(rows, **_):
    kept = []
    for group in groups_of(sessions_of(rows)):
        kept += sorted(group, key=lambda s: (length(rows, s), rows[s.final].tie))[:3]
    return keep(rows, kept)


def gfpo_efficiency(rows, **_):
    kept = []
    for group in groups_of(sessions_of(rows)):
        ordered = sorted(group, key=lambda s: (-Fraction(reward(rows, s)) / max(length(rows, s), 1), rows[s.final].tie))
        kept += ordered[:3]
    return keep(rows, kept)


def dapo(rows, **_):
    kept = []
    for group in groups_of(sessions_of(rows)):
        values = [reward(rows, s) for s in group]
        mean = math.fsum(values) / len(values)
        if math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)) > 1e-6:
            kept += group
    return keep(rows, kept)


def vcrl(rows, *, step=1, **_):
    threshold = 0.3 if step < 20 else 0.8
    kept = []
    for group in groups_of(sessions_of(rows)):
        size = len(group)
        if size < 2:
            continue
        k = sum(reward(rows, s) > 0.5 for s in group)
        variance = Fraction(k * (size - k), size * (size - 1))
        largest = max(Fraction(j * (size - j), size * (size - 1)) for j in range(size + 1))
        if variance / largest > threshold:
            kept += group
    return keep(rows, kept)


def overlong(rows, *, max_length, **_):
    return keep(rows, [s for s in sessions_of(rows) if all(len(rows[i].mask) < max_length for i in s.rows)])


def failed(rows, **_):
    def fine(s: Session) -> bool:
        return math.isfinite(reward(rows, s)) and any(sum(rows[i].mask) for i in s.rows)

    return keep(rows, [s for s in sessions_of(rows) if fine(s)])


# ------------------------------------------------------------------------------------------------------ reweight


def softmax(rows, **_):
    largest = max(session_magnitude(rows, s) for s in sessions_of(rows))
    return per_session_weights(rows, lambda s: math.exp(session_magnitude(rows, s) - largest))


def per(rows, **_):
    return per_session_weights(rows, lambda s: (session_magnitude(rows, s) + 1e-6) ** 0.5)


def diffband(rows, **_):
    rates = [float(pass_rate(rows, group)) for group in groups_of(sessions_of(rows))]
    low, high = quantile(rates, 0.25), quantile(rates, 0.75)
    return per_group_weights(
        rows, lambda group: 2.0 if low - 1e-7 <= float(pass_rate(rows, group)) <= high + 1e-7 else 1.0
    )


def diffband_reward(rows, **_):
    values = [reward(rows, s) for s in sessions_of(rows)]
    low, high = quantile(values, 0.25), quantile(values, 0.75)
    return per_session_weights(rows, lambda s: 2.0 if low <= reward(rows, s) <= high else 1.0)


def pf_ppo(rows, **_):
    return per_session_weights(rows, lambda s: reward(rows, s) ** 2 + 1e-8)


def pf_ppo_max_min(rows, **_):
    weights = [0.0] * len(rows)
    for group in groups_of(sessions_of(rows)):
        values = [reward(rows, s) for s in group]
        for s in group:
            for i in s.rows:
                weights[i] = (1.0 if reward(rows, s) in (max(values), min(values)) else 0.0) + 1e-8
    return weights


def pf_ppo_max_random(rows, **_):
    weights = [0.0] * len(rows)
    for group in groups_of(sessions_of(rows)):
        best = max(reward(rows, s) for s in group)
        for s in group:
            for i in s.rows:
                weights[i] = (0.4 if reward(rows, s) == best else 0.1) + 1e-8
    return weights


def curve(rows, *, rollouts, before=(), **_):
    """``before``: pass rates of the groups, a list for each earlier step."""
    bins = rollouts + 1
    rates = [pass_rate(rows, group) for group in groups_of(sessions_of(rows))]
    past = [rate for of_step in before[-10:] for rate in of_step] if before else rates
    known = [rate for rate in past if 0 < rate < 1]

    def weigh(group: list[Session]) -> float:
        rate = pass_rate(rows, group)
        if not 0 < rate < 1:
            return 0.0
        own = math.floor(rate * bins)
        same = sum(math.floor(r * bins) == own for r in known)
        below = sum(math.floor(r * bins) <= own for r in known)
        return same / below if below else 0.0

    return per_group_weights(rows, weigh)


def difficulty_length(rows, *, max_length, **_):
    weights = [0.0] * len(rows)
    for group in groups_of(sessions_of(rows)):
        hard = 1 - float(pass_rate(rows, group))
        for s in group:
            for i in s.rows:
                weights[i] = (0.5 + 1.5 * hard) * (1.5 - min(sum(rows[i].mask) / max_length, 1.0))
    return weights


def ar(rows, **_):
    return [[0.5 * math.exp(p) + 0.5 for p in row.log_probs] for row in rows]


def ar_paper(rows, **_):
    return [[0.2 * math.exp(p) + 0.8 for p in row.log_probs] for row in rows]


def high_entropy(rows, **_):
    counted = [e for row in rows for e, m in zip(row.entropy, row.mask, strict=True) if m]
    threshold = quantile(counted, 0.8) if counted else 0.0
    return [[1.0 if e >= threshold - 1e-9 else 0.0 for e in row.entropy] for row in rows]


SELECT = {
    "difffilter": difffilter,
    "topk": topk,
    "maxvar": maxvar,
    "gfpo": gfpo,
    "dapo": dapo,
    "vcrl": vcrl,
    "overlong": overlong,
    "failed": failed,
}
REWEIGHT = {
    "softmax": softmax,
    "per": per,
    "diffband": diffband,
    "diffband_reward": diffband_reward,
    "pf_ppo": pf_ppo,
    "pf_ppo_max_min": pf_ppo_max_min,
    "pf_ppo_max_random": pf_ppo_max_random,
    "curve": curve,
    "difficulty_length": difficulty_length,
    "ar": ar,
    "ar_paper": ar_paper,
    "high_entropy": high_entropy,
}
"""By preset."""
