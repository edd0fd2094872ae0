"""What each call of a plugin did: counted and timed for the metrics, and a line each under ``DATAFLEX_TRACE=1``.

A line has shapes and a summary of the decision, never a tensor::

    dataflex trace: step 3 post_advantage difffilter: 64 rows, 812 tokens; mask keeps 40/64, reason=band; 0.41 ms
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from dataflex_hooks.batch import DomainStats, PromptBatch, RolloutBatch
from dataflex_hooks.errors import Origin
from dataflex_hooks.metric_names import label_metric, label_time, plugin_metric, reduction

Seen = RolloutBatch | PromptBatch | DomainStats
VARIABLE = "DATAFLEX_TRACE"
PREFIX = "dataflex trace: "
_OFF = frozenset({"", "0", "false", "no", "off"})
_LONGEST_TEXT = 60


@dataclass(frozen=True)
class _CallNames:
    time: str
    decided: str
    abstained: str

    @classmethod
    def of(cls, label: str) -> _CallNames:
        return cls(label_time(label), label_metric(label, "decided_total"), label_metric(label, "abstained_total"))


class CallLog:
    """Counts and times the calls of every plugin since the metrics were last taken.

    Args:
        write: gets a line a call; None for no lines. By default stderr where the environment sets ``DATAFLEX_TRACE``.
    """

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        on = os.environ.get(VARIABLE, "").strip().lower() not in _OFF
        self._write = write or (_to_stderr if on else None)
        self._metrics: dict[str, float] = {}
        self._names: dict[str, _CallNames] = {}
        self._slow: set[str] = set()

    def add(
        self,
        origin: Origin,
        seen: Seen,
        decision: object,
        seconds: float,
        error: object = None,
        decides: bool = True,
    ) -> None:
        """Note one call.

        Args:
            origin: plugin, hook and step.
            seen: what the plugin saw.
            decision: what it returned; None abstains.
            seconds: what the call took, the host's checks of the decision included.
            error: the exception that the call ended in.
            decides: False for a call that only hands something over (``observe``): timed, not counted.
        """
        if origin.label not in self._names:
            self._names[origin.label] = _CallNames.of(origin.label)
        names = self._names[origin.label]
        # Both counts every time: a logger draws no line through a metric that comes and goes.
        returned = decides and error is None
        decided, abstained = returned and decision is not None, returned and decision is None
        for name, value in ((names.time, seconds), (names.decided, decided), (names.abstained, abstained)):
            self._metrics[name] = self._metrics.get(name, 0.0) + value
        if self._write is not None:
            did = f"failed: {type(error).__name__}" if error is not None else summary(decision)
            where = f"{PREFIX}step {origin.step} {origin.hook} {origin.label}"
            self._write(f"{where}: {_extent(seen)}; {did}; {1e3 * seconds:.2f} ms")

    def count_slow(self, label: str, slow: bool) -> None:
        """Count a call that was over its time limit; from the first one on every call has the metric."""
        if slow:
            self._slow.add(label)
        if label in self._slow:
            _combine(self._metrics, {label_metric(label, "slow_total"): float(slow)})

    def note(self, label: str, metrics: Mapping[str, float]) -> None:
        """Take the numbers that a plugin logs itself; names as :func:`plugin_metric` accepts them."""
        _combine(self._metrics, {plugin_metric(label, name): float(value) for name, value in metrics.items()})

    def take(self) -> dict[str, float]:
        """Return the metrics of the calls since the last time, and start anew.

        By label: ``timing_s/dataflex/<label>``, seconds over all hooks; ``dataflex/<label>/decided_total`` and
        ``abstained_total``, numbers of calls; and what the plugin logs itself.
        """
        metrics, self._metrics = self._metrics, {}
        return metrics

    def take_into(self, metrics: dict[str, float]) -> None:
        """Move them into ``metrics`` of the same step, where earlier calls may have left some: counts are added."""
        _combine(metrics, self.take())


def _combine(metrics: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        metrics[name] = metrics.get(name, 0.0) + value if reduction(name) == "sum" else value


def _extent(seen: Seen) -> str:
    if isinstance(seen, RolloutBatch):
        return f"{seen.bs} rows, {seen.n_tokens} tokens"
    return f"{len(seen)} candidates" if isinstance(seen, PromptBatch) else f"{len(seen.domains)} domains"


def summary(decision: object) -> str:
    """Describe a decision in a few words: shares of masks, moments of numbers, sizes of lists; never their contents."""
    if decision is None:
        return "no decision"
    if not is_dataclass(decision):
        return type(decision).__name__
    given = {field.name: getattr(decision, field.name) for field in fields(decision)}
    defaults = {field.name: field.default for field in fields(decision)}
    parts = [_part(name, value) for name, value in given.items() if not _is_default(value, defaults[name])]
    return ", ".join(parts) or "nothing given"


def _is_default(value: Any, default: Any) -> bool:
    # Comparing an array gives an array.
    return value is None or (not hasattr(value, "__array__") and bool(value == default))


def _part(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        return _tensor(name, value)
    if isinstance(value, (str, int, float)):
        text = str(value)
        return f"{name}={text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + '...'}"
    try:
        return f"{name} of {len(value)}"
    except TypeError:
        return f"{name} ({type(value).__name__})"


def _tensor(name: str, value: Tensor) -> str:
    if value.numel() == 0:
        return f"{name} {tuple(value.shape)}"
    values = value.detach()
    if name in ("mask", "keep", "admit"):
        return f"{name} keeps {int((values == 1).sum())}/{values.numel()}"
    numbers = values.double()
    moments = f"mean {float(numbers.mean()):.4g}, min {float(numbers.min()):.4g}, max {float(numbers.max()):.4g}"
    return f"{name} {tuple(value.shape)} {moments}"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
