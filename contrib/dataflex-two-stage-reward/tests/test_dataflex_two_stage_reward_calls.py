"""Calls of the expensive function: at a time, late, failed, repeated."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest
from dataflex_two_stage_reward import TwoStageReward

from dataflex_hooks import PluginError
from dataflex_hooks.testing import HookRunner, make_groups, run_hooks


class Numbers:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


def two_stage(function: Any, **parameters: Any) -> TwoStageReward:
    return TwoStageReward(function, **{"k": 2, "tokenizer": Numbers(), "retry_wait": 0.0, **parameters})


class Counting:
    """Counts how many of its calls are under way at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.Lock()

    def change(self, by: int) -> None:
        with self.lock:
            self.now += by
            self.most = max(self.most, self.now)


class AsyncCounting(Counting):
    async def __call__(self, solution_str: str) -> float:
        self.change(1)
        await asyncio.sleep(0.02)
        self.change(-1)
        return float(solution_str.split()[0])


class PlainCounting(Counting):
    def __call__(self, solution_str: str) -> float:
        self.change(1)
        time.sleep(0.02)
        self.change(-1)
        return float(solution_str.split()[0])


@pytest.mark.parametrize("make", [AsyncCounting, PlainCounting])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_calls_as_configured_are_under_way(make, concurrency):
    judge = make()
    outcome = run_hooks(two_stage(judge, k=6, concurrency=concurrency), make_groups([1, 2, 3, 4, 5, 6]))
    assert judge.most == concurrency
    assert outcome.rewards.tolist() == [100, 1100, 2100, 3100, 4100, 5100]


def test_the_event_loop_lives_on_between_steps():
    loops = set()

    async def judge(solution_str: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 1.0

    runner = HookRunner(two_stage(judge, cache=0))
    runner.step(make_groups([1, 0]))
    runner.step(make_groups([1, 0]))
    (loop,) = loops
    assert loop.is_running()


def test_it_works_where_a_loop_is_running_already():
    async def judge(solution_str: str) -> float:
        return 3.0

    async def trainer() -> list[float]:
        return run_hooks(two_stage(judge), make_groups([1, 0])).rewards.tolist()

    assert asyncio.run(trainer()) == [3, 3]


class Flaky:
    """Fails so many times for each response, then answers."""

    def __init__(self, times: int) -> None:
        self.left: dict[str, int] = {}
        self.times = times

    def __call__(self, solution_str: str) -> float:
        left = self.left.setdefault(solution_str, self.times)
        self.left[solution_str] -= 1
        if left > 0:
            raise ConnectionError("the judge is busy")
        return 1.0


def test_a_failed_attempt_is_repeated():
    outcome = run_hooks({"judge": two_stage(Flaky(2), retries=2)}, make_groups([1, 0]))
    assert outcome.rewards.tolist() == [1, 1]
    assert outcome.metrics["dataflex/judge/retries_total"] == 4
    assert outcome.metrics["dataflex/judge/calls_total"] == 2


def test_the_last_failure_stops_the_run_and_names_the_prompt():
    with pytest.raises(PluginError) as caught:
        run_hooks({"judge": two_stage(Flaky(2), retries=1)}, make_groups([1, 0]))
    text = str(caught.value)
    for part in (
        "'judge'",
        "post_reward",
        "Flaky failed 2 times",
        "the prompt '100 5'",
        "'uid_0'",
        "the judge is busy",
    ):
        assert part in text
    assert isinstance(caught.value.__cause__.__cause__, ConnectionError)


def test_the_wait_before_an_attempt_doubles(monkeypatch):
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("dataflex_two_stage_reward.calls.asyncio.sleep", sleep)
    run_hooks(two_stage(Flaky(3), retries=3, retry_wait=0.5, concurrency=1), make_groups([1, 0]))
    assert waits == [0.5, 1.0, 2.0] * 2


class Late:
    """Answers when it is released, or after half a minute."""

    def __init__(self) -> None:
        self.released, self.answered = threading.Event(), []

    def plain(self, solution_str: str) -> float:
        self.released.wait(30)
        self.answered.append(solution_str)
        return 1.0

    async def coroutine(self, solution_str: str) -> float:
        await asyncio.sleep(30)
        self.answered.append(solution_str)
        return 1.0


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_an_attempt_that_takes_too_long_has_failed_and_is_not_waited_for(kind):
    late = Late()
    with pytest.raises(PluginError, match=r"failed once .* no answer within 0.05 s"):
        run_hooks(two_stage(getattr(late, kind), timeout=0.05, retries=0), make_groups([1, 0]))
    assert late.answered == []
    late.released.set()


@pytest.mark.parametrize("result", [float("nan"), float("inf"), "much", None, {"points": 1}])
def test_what_is_no_reward_is_refused(result):
    with pytest.raises(PluginError, match="failed once for the prompt"):
        run_hooks(two_stage(lambda solution_str: result, retries=0), make_groups([1, 0]))


@pytest.mark.parametrize("raised", [StopIteration, SystemExit, KeyboardInterrupt])
def test_an_exception_that_would_end_the_loop_is_a_failed_call(raised):
    def judge(solution_str: str) -> float:
        raise raised

    plugin = two_stage(judge, retries=0)
    for _ in range(2):
        with pytest.raises(PluginError, match=raised.__name__):
            run_hooks(plugin, make_groups([1, 0]))


def test_a_response_without_a_score_can_leave_and_takes_a_group_of_one_with_it():
    def judge(solution_str: str) -> float:
        if int(solution_str.split()[0]) in (1100, 107):
            raise ValueError("no verdict")
        return float(solution_str.split()[0])

    batch = make_groups([3, 2, 1, 0], [3, 2], [3, 2, 1])
    outcome = run_hooks({"judge": two_stage(judge, k=3, retries=0, on_failure="drop")}, batch)
    assert outcome.in_batch.tolist() == [True, False, True, False, False, False, True, True, True]
    assert outcome.metrics["dataflex/judge/failed_total"] == 2
    assert outcome.rewards[:4].tolist() == [100, 1100, 2100, 1100]


def test_an_error_names_the_prompt_by_its_tokens_where_nothing_was_decoded():
    def judge(data_source: str) -> float:
        raise ValueError("no verdict")

    with pytest.raises(PluginError, match=r"for the prompt \[100, 5\] \(uid 'uid_0', response \d\): ValueError"):
        run_hooks(two_stage(judge, tokenizer="not/there", retries=0), make_groups([1, 0]))


def test_the_event_loop_ends_with_the_plugin():
    async def judge(solution_str: str) -> float:
        return 1.0

    gc.collect()
    before = set(threading.enumerate())
    plugin = two_stage(judge)
    run_hooks(plugin, make_groups([1, 2]))
    (thread,) = [new for new in set(threading.enumerate()) - before if new.name == "two_stage_reward"]
    assert thread.is_alive()
    del plugin
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()
