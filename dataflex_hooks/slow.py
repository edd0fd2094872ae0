"""A soft time limit on the calls of plugins: says which plugin the run is waiting for, and stops nothing."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dataflex_hooks.errors import Origin

LIMIT_S = 30.0
"""Default of ``dataflex.slow_plugin_seconds``: hooks take milliseconds, and all workers wait while one runs. Half a
minute is far from the first and long before anybody would look for the reason of a run that stands still."""

_log = logging.getLogger("dataflex_hooks")
_PERIODS = (0.05, 5.0)


@dataclass(frozen=True)
class _Running:
    origin: Origin
    limit: float
    started: float


class SlowCalls:
    """Warns of calls that take longer than their limit: at the first, and again when one takes twice as long.

    A call is named while it is still running, so that a plugin that hangs is known by name.

    Attributes:
        seconds: by label and hook, the longest call warned of so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = {}
        self._running: _Running | None = None
        self._watching = False
        self._lock = threading.Lock()

    @contextmanager
    def watch(self, origin: Origin, limit: float | None) -> Iterator[None]:
        """Watch the call made inside; ``limit`` in seconds, None for no limit."""
        if limit is None:
            yield
            return
        running = _Running(origin, limit, time.perf_counter())
        self._running = running
        self._start(limit)
        try:
            yield
        finally:
            self._running = None
            self._say(running, time.perf_counter() - running.started, "took")

    def _start(self, limit: float) -> None:
        if self._watching:
            return
        self._watching = True
        shortest, longest = _PERIODS
        period = min(max(limit / 4, shortest), longest)
        # The thread does not keep this object alive, and ends after it.
        threading.Thread(target=_watch, args=(weakref.ref(self), period), name="dataflex-slow", daemon=True).start()

    def look(self) -> None:
        """Warn of a call that is running now, if it is over its limit."""
        running = self._running
        if running is not None:
            self._say(running, time.perf_counter() - running.started, "is still running after")

    def _say(self, running: _Running, seconds: float, how: str) -> None:
        origin, key = running.origin, (running.origin.label, running.origin.hook)
        with self._lock:
            if seconds <= running.limit or seconds < 2 * self.seconds.get(key, 0.0):
                return
            self.seconds[key] = seconds
        _log.warning(
            "%s %s %.3g s, more than slow_plugin_seconds=%g: the whole run waits for it. The next warning comes at "
            "twice that time",
            origin,
            how,
            seconds,
            running.limit,
        )


def _watch(calls: weakref.ref[SlowCalls], period: float) -> None:
    while (watched := calls()) is not None:
        watched.look()
        del watched
        time.sleep(period)
