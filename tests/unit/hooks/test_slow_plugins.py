"""A plugin that takes long is named: at first, then at twice the time, while it runs, and in a metric."""

from __future__ import annotations

import gc
import logging
import re
import threading
import time

import pytest

import dataflex_hooks as dh
from dataflex_hooks.errors import Origin
from dataflex_hooks.slow import LIMIT_S, SlowCalls
from dataflex_hooks.testing import make_context, make_groups

SLEEPING = """
    import time
    import dataflex_hooks as df

    class Sleeping:
        def __init__(self, seconds=()):
            self.seconds = list(seconds)

        @df.hookimpl
        def post_reward(self):
            time.sleep(self.seconds.pop(0))
"""


@pytest.fixture
def build(distribution):
    distribution("acme-sleep", {"sleep": "acme_sleep:Sleeping"}, {"acme_sleep": SLEEPING}, version="0.9")

    def built(seconds, top=..., own=...):
        plugin = {"plugin": "sleep", "seconds": seconds} | ({} if own is ... else {"slow_plugin_seconds": own})
        block = {"plugins": {"nap": plugin}} | ({} if top is ... else {"slow_plugin_seconds": top})
        return dh.HookManager.from_config(block, estimator="grpo", has_groups=True)

    return built


def run(manager, steps):
    """Call the hook step by step; return the metric of each step, None where it is not there."""
    counts = []
    for step in range(1, steps + 1):
        manager.post_reward(make_groups([1, 0]), make_context(step))
        counts.append(manager.calls.take().get("dataflex/nap/slow_total"))
    return counts


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "dataflex_hooks"]


def test_a_slow_call_is_named_with_plugin_distribution_hook_step_time_and_limit(build, caplog):
    assert run(build([0.0, 0.7, 0.0], own=0.6), 3) == [None, 1.0, 0.0]
    (text,) = said(caplog)
    assert re.fullmatch(
        r"plugin 'nap' \(acme-sleep 0\.9\) in post_reward at step 2 (took|is still running after) 0\.\d+ s, more than "
        r"slow_plugin_seconds=0\.6: the whole run waits for it\. The next warning comes at twice that time",
        text,
    )
    assert caplog.records[0].levelno == logging.WARNING


def test_the_next_warning_comes_at_twice_the_time(caplog):
    slow = SlowCalls()
    for seconds in (1.5, 1.6, 2.9, 3.0, 5.9, 0.5, 6.0):
        running = type("Running", (), {"origin": Origin("p", "post_reward", 1), "limit": 1.0})()
        slow._say(running, seconds, "took")
    assert re.findall(r"took ([\d.]+) s", "\n".join(said(caplog))) == ["1.5", "3", "6"]
    other = type("Running", (), {"origin": Origin("p", "post_advantage", 1), "limit": 1.0})()
    slow._say(other, 1.5, "took")
    assert len(said(caplog)) == 4


def test_a_call_that_hangs_is_named_while_it_runs(caplog):
    slow, done = SlowCalls(), threading.Event()

    def call():
        with slow.watch(Origin("stuck", "post_reward", 3), 0.1):
            done.wait(20)

    thread = threading.Thread(target=call)
    thread.start()
    deadline = time.monotonic() + 15
    while not said(caplog) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "plugin 'stuck' (no distribution) in post_reward at step 3 is still running after" in said(caplog)[0]
    done.set()
    thread.join()


def test_the_watching_thread_ends_with_the_manager(caplog):
    slow = SlowCalls()
    with slow.watch(Origin("p", "post_reward", 3), 0.1):
        pass
    mine = [thread for thread in threading.enumerate() if thread.name == "dataflex-slow"]
    assert mine
    del slow
    gc.collect()
    deadline = time.monotonic() + 15
    while any(thread.is_alive() for thread in mine[-1:]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not mine[-1].is_alive()


@pytest.mark.parametrize(
    ("top", "own", "limit"),
    [(..., ..., LIMIT_S), (5, ..., 5.0), (5, 0.5, 0.5), (None, ..., None), (5, None, None), (None, 2, 2.0)],
)
def test_a_plugins_own_limit_wins_and_null_is_none(top, own, limit):
    plugin = {"plugin": "select"} | ({} if own is ... else {"slow_plugin_seconds": own})
    block = {"plugins": {"p": plugin}} | ({} if top is ... else {"slow_plugin_seconds": top})
    assert dh.parse(block).plugins[0].slow_plugin_seconds == limit


def test_without_a_limit_nothing_is_said(build, caplog):
    assert run(build([0.05], top=0.01, own=None), 1) == [None]
    assert said(caplog) == []


@pytest.mark.parametrize("given", [0, -1, "long", True, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(problems, given):
    block = {"slow_plugin_seconds": given, "plugins": {"p": {"plugin": "select", "slow_plugin_seconds": given}}}
    texts = [text for text in problems(block) if "slow_plugin_seconds" in text]
    assert [text.split(":")[0] for text in texts] == [
        "dataflex.slow_plugin_seconds",
        "dataflex.plugins.p.slow_plugin_seconds",
    ]
    assert all("accepted: a number of seconds > 0, or null for no limit" in text for text in texts)
