"""What is logged about domains, and warnings with thresholds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks import DomainStats
from dataflex_hooks.metric_names import domain_metric

_log = logging.getLogger("dataflex_verl")

STARVED_STEPS = 20
"""A domain with a share is starved when it trained no prompt in so many steps in which its share came to one."""

LOW_ADMISSION = 0.1
"""Admission is low when fewer candidates than this share were admitted in a step."""

_NAMES = {"reward": "reward", "abs_advantage": "advantage", "solve_rate": "solved", "kept": "kept", "length": "length"}

Counts = NDArray[np.int64]
Shares = NDArray[np.float64]


def domain_metrics(
    stats: DomainStats,
    *,
    generated: Counts,
    trained: Counts,
    passes: Shares,
    proposed: Shares,
    scores: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of a step.

    Args:
        stats: of the step.
        generated, trained: (K,) prompts submitted in the step, and prompts in its update.
        passes: (K,) epochs of each domain.
        proposed: (K,) proportions for the prompts that follow.
        scores: the configured scorer's mean by domain.

    Returns:
        ``prop`` (in force in the step), ``proposed``, ``generated`` and ``trained`` (shares of prompts), ``epochs``,
        ``responses``, ``groups``, ``unscored``; for domains with responses ``reward``, ``advantage`` (mean absolute),
        ``solved``, ``kept``, ``length``; and ``score``.
    """
    metrics: dict[str, float] = {}
    for index, domain in enumerate(stats.domains):
        values = {
            "prop": stats.proportions[index],
            "proposed": proposed[index],
            "generated": generated[index] / max(1, generated.sum()),
            "trained": trained[index] / max(1, trained.sum()),
            "epochs": passes[index],
            "responses": stats.counts[index],
            "groups": stats.groups[index],
            "unscored": stats.unscored[index],
        }
        if stats.counts[index]:
            means = {short: stats.scores[name][index] for name, short in _NAMES.items() if name in stats.scores}
            values |= {short: mean for short, mean in means.items() if short != "advantage"}
        if stats.counts[index] > stats.unscored[index]:
            values[_NAMES["abs_advantage"]] = stats.scores["abs_advantage"][index]
        if domain in scores:
            values["score"] = scores[domain]
        metrics |= {domain_metric(name, domain): float(value) for name, value in values.items()}
    return metrics


class DomainWatch:
    """Warns, once a stretch, of domains that get nothing and of candidates that are mostly refused."""

    def __init__(self, domains: Sequence[str]) -> None:
        self._domains = tuple(domains)
        k = len(self._domains)
        self._due, self._steps = np.zeros(k), np.zeros(k, dtype=np.int64)
        self._warned: set[str] = set()
        self._drawn, self._admitted, self._forced = (np.zeros(k, dtype=np.int64) for _ in range(3))

    def starved(self, proportions: Shares, trained: Counts, step: int) -> None:
        """Take note of a step: proportions in force and prompts trained, (K,) each."""
        self._due = np.where(trained > 0, 0.0, self._due + proportions * trained.sum())
        self._steps = np.where(trained > 0, 0, self._steps + (proportions > 0))
        for index, domain in enumerate(self._domains):
            if trained[index] > 0:
                self._warned.discard(domain)
            elif self._steps[index] >= STARVED_STEPS and self._due[index] >= 1 and domain not in self._warned:
                self._warned.add(domain)
                _log.warning(
                    "domain %r has trained no prompt for %d steps up to step %d, though its share is %.3g",
                    domain,
                    self._steps[index],
                    step,
                    proportions[index],
                )

    def admission(self, drawn: Counts, admitted: Counts, forced: Counts) -> dict[str, float]:
        """Take note of candidates so far, (K,) each; return the step's metrics."""
        new = (drawn - self._drawn, admitted - self._admitted, forced - self._forced)
        self._drawn, self._admitted, self._forced = drawn.copy(), admitted.copy(), forced.copy()
        metrics: dict[str, float] = {}
        for index, domain in enumerate(self._domains):
            if new[0][index]:
                metrics[domain_metric("admitted", domain)] = float(new[1][index] / new[0][index])
            metrics[domain_metric("forced", domain)] = float(new[2][index])
        total = int(new[0].sum())
        share = float(new[1].sum()) / total if total else 1.0
        if share >= LOW_ADMISSION:
            self._warned.discard("")
        elif "" not in self._warned:
            self._warned.add("")
            _log.warning("only %.1f%% of %d candidate prompts were admitted in this step", 100 * share, total)
        return metrics
