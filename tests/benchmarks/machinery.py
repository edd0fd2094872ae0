"""What the hook machinery itself costs: ten plugins that decide nothing, 8,192 rows. Median of 30 calls a hook.

python tests/benchmarks/machinery.py [--rows 8192] [--length 512] [--plugins 10]

Calls, checks, counting, timing and merging; not building the view, nor the sums over tokens that the view makes once a
batch when somebody first asks for them (rewards, valid tokens): those are shown beside it. ``cpu`` is processor time
of the thread, for machines with other work too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dataflex_hooks import HookManager, LossCoefficients, RolloutBatch, StepContext, hookimpl

ROUNDS = 30


class Nothing:
    """Has an opinion on nothing."""

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> None:
        return None

    @hookimpl
    def post_advantage(self, batch: Any, ctx: Any) -> None:
        return None


def batch_of(rows: int, length: int, per_prompt: int = 8) -> RolloutBatch:
    """Responses of ``length`` tokens on average."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 2, length + length // 2 + 1, (rows,), generator=generator)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    tokens = int(offsets[-1])
    fields = {
        "response_mask": torch.ones(tokens, dtype=torch.int64),
        "rm_scores": torch.rand(tokens, generator=generator),
        "advantages": torch.randn(tokens, generator=generator),
    }
    keys = [f"prompt{row // per_prompt}_{row % per_prompt}_0" for row in range(rows)]
    return RolloutBatch(keys, offsets, {}, fields)


def milliseconds(call: Callable[[], object]) -> dict[str, float]:
    """Median over ROUNDS calls, of wall and of processor time."""
    wall, cpu = [], []
    for _ in range(ROUNDS):
        started, busy = time.perf_counter(), time.thread_time()
        call()
        wall.append(1e3 * (time.perf_counter() - started))
        cpu.append(1e3 * (time.thread_time() - busy))
    return {"wall": round(statistics.median(wall), 3), "cpu": round(statistics.median(cpu), 3)}


def measure(rows: int, length: int, plugins: int) -> dict[str, Any]:
    """Milliseconds a hook, and what the view cost."""
    started = time.perf_counter()
    batch = batch_of(rows, length)
    view = time.perf_counter() - started
    started = time.perf_counter()
    batch.mean_reward, batch.n_valid, batch.valid_weights  # noqa: B018
    sums = time.perf_counter() - started
    hooks = HookManager({f"plugin{number}": Nothing() for number in range(plugins)})
    ctx, loss = StepContext(step=1), LossCoefficients("token")
    return {
        "post_reward_ms": milliseconds(lambda: hooks.post_reward(batch, ctx)),
        "post_advantage_ms": milliseconds(lambda: hooks.post_advantage(batch, ctx, loss)),
        "take_metrics_ms": milliseconds(hooks.calls.take),
        "view_ms": round(1e3 * view, 1),
        "view_sums_ms": round(1e3 * sums, 1),
        "tokens": batch.n_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--plugins", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(options.rows, options.length, options.plugins), indent=1))


if __name__ == "__main__":
    main()
