"""Calls of a slow function: several at a time, each with a time limit and further attempts."""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dataflex_two_stage_reward.function import RewardFunction


class RewardFunctionError(RuntimeError):
    """The expensive reward function gave no reward for a response."""


@dataclass(frozen=True)
class Call:
    """One response to be scored: the keywords, and what an error says about it."""

    keywords: Mapping[str, Any]
    about: Callable[[], str]


@dataclass(frozen=True)
class Limits:
    """How calls are made.

    Attributes:
        concurrency: calls under way at a time.
        timeout: seconds that an attempt may take, None for no limit.
        retries: further attempts after one that failed.
        retry_wait: seconds before the first of them, doubled before each that follows.
    """

    concurrency: int
    timeout: float | None
    retries: int
    retry_wait: float


@dataclass
class Answers:
    """What calls gave: ``scores`` in their order, None for one that failed; attempts beyond the first; the errors."""

    scores: list[float | None]
    retries: int = 0
    errors: list[RewardFunctionError] = field(default_factory=list)


class Caller:
    """Makes calls on an event loop of its own, which lives as long as the plugin, so that clients can stay open.

    Plain functions run in threads. One that exceeds its time limit cannot be stopped: its thread goes on, its result is
    not looked at.
    """

    def __init__(self, function: RewardFunction, limits: Limits) -> None:
        self.function, self.limits = function, limits
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, calls: Sequence[Call], stop_at_first: bool) -> Answers:
        """Call the function once for each, and wait for all.

        Args:
            calls: what to call it with.
            stop_at_first: raise when a call has failed for good, and give up the others.

        Raises:
            RewardFunctionError: a call failed and ``stop_at_first`` is set.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="two_stage_reward", daemon=True).start()
            # The thread does not keep this object alive, and ends after it.
            weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop).atexit = False
        return asyncio.run_coroutine_threadsafe(self._all(calls, stop_at_first), self._loop).result()

    async def _all(self, calls: Sequence[Call], stop_at_first: bool) -> Answers:
        answers = Answers([None] * len(calls))
        places = asyncio.Semaphore(self.limits.concurrency)

        async def one(number: int) -> None:
            async with places:
                try:
                    answers.scores[number] = await self._attempts(calls[number], answers)
                except RewardFunctionError as error:
                    answers.errors.append(error)
                    if stop_at_first:
                        raise

        tasks = [asyncio.ensure_future(one(number)) for number in range(len(calls))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return answers

    async def _attempts(self, call: Call, answers: Answers) -> float:
        limits, attempt = self.limits, 0
        while True:
            try:
                return _reward(await asyncio.wait_for(self._call(call.keywords), limits.timeout))
            except Exception as error:
                attempt += 1
                if attempt > limits.retries:
                    raise RewardFunctionError(self._text(call, error, attempt)) from error
            answers.retries += 1
            await asyncio.sleep(limits.retry_wait * 2 ** (attempt - 1))

    def _call(self, keywords: Mapping[str, Any]) -> Awaitable[Any]:
        if self.function.is_async:
            return self.function.call(**keywords, **self.function.params)
        return _in_thread(lambda: self.function.call(**keywords, **self.function.params))

    def _text(self, call: Call, error: Exception, attempts: int) -> str:
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, (asyncio.TimeoutError, TimeoutError)) and self.limits.timeout and not str(error):
            what = f"no answer within {self.limits.timeout:g} s"
        times = "once" if attempts == 1 else f"{attempts} times"
        return f"{self.function.name} failed {times} for {call.about()}: {what}"


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _reward(result: Any) -> float:
    """Read a result as verl does: a number, or a mapping with ``score``."""
    score = result["score"] if isinstance(result, Mapping) else result
    value = float(score)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}; accepted: a finite number, or a mapping with one under 'score'")
    return value


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run a function in a thread that does not keep the process alive, unlike those of an executor."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            # A future refuses StopIteration, and what is no Exception would end the loop.
            usual = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if usual else RuntimeError(repr(raised))
        with suppress(RuntimeError):  # nobody waits any more, and the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="two_stage_reward call", daemon=True).start()
    return future
