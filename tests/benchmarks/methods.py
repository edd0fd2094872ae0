"""Cost of the methods on a large step: 512 groups of 16 responses, 11 million tokens, in one process.

``python -m tests.benchmarks.methods [--json FILE]`` prints a table and what holds of the limits:

- token methods, scorer and actuator together: at most 3 times one out-of-place ``torch.exp`` over the same values in
  the same run, ``high_entropy`` at most 12 times
- per-response methods: at most 5 ms for the 8,192 rows, once rewards, lengths and the order of content are known; what
  those cost the first time is in a table of its own
- ``group_solve_rate``, ``gfpo`` and ``max_variance``: at least 10 times as fast as a loop over groups
- peak extra memory of a stacked select and reweight step, merged: at most 1.5 times the bytes it reads

Each time is the least of several runs. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import dataflex_hooks as dh
from dataflex_hooks.plugins.mechanism import act, scores_for
from dataflex_hooks.plugins.reweight import ReweightPlugin
from dataflex_hooks.plugins.select import SelectPlugin
from dataflex_verl import presets

GROUPS, SIZE, MEAN, LONGEST = 512, 16, 1400, 4096
TOKEN_METHODS = {"ar": 3.0, "ar_paper": 3.0, "high_entropy": 12.0}
READ_TOKENS = {"topk": 3.0, "softmax": 3.0, "per": 3.0}
"""Methods per response whose scorer reads every token, with the same limit as token methods."""
FACTS = {"rollouts": SIZE, "response_length": LONGEST}


def make_batch(seed: int = 0) -> dh.RolloutBatch:
    rng = np.random.default_rng(seed)
    n = GROUPS * SIZE
    lengths = np.clip(rng.lognormal(np.log(MEAN) - 0.5 * 0.65**2, 0.65, n).astype(np.int64), 1, LONGEST)
    total = int(lengths.sum())
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    rewards = torch.zeros(total)
    rewards[offsets[1:] - 1] = torch.from_numpy(rng.integers(0, 2, n).astype(np.float32))
    advantages = torch.from_numpy(rng.standard_normal(n).astype(np.float32)).repeat_interleave(
        torch.from_numpy(lengths)
    )
    generator = torch.Generator().manual_seed(seed)
    fields = {
        "response_mask": torch.ones(total, dtype=torch.int64),
        "rm_scores": rewards,
        "advantages": advantages,
        "old_log_probs": -torch.rand(total, generator=generator) * 3,
        "entropy": torch.rand(total, generator=generator) * 2,
        "responses": torch.randint(0, 150_000, (total,), generator=generator),
    }
    prompt_lengths = torch.full((n,), 64)
    prompts = torch.randint(0, 150_000, (GROUPS, 64), generator=generator).repeat_interleave(SIZE, dim=0).flatten()
    keys = [f"{group:032x}_{session}_0" for group in range(GROUPS) for session in range(SIZE)]
    prompt_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), prompt_lengths.cumsum(0)])
    return dh.RolloutBatch(keys, offsets, {}, fields, (prompts, prompt_offsets))


def seconds(run: Callable[[], object], repeat: int = 5) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def build(preset: str) -> SelectPlugin | ReweightPlugin:
    (settings,) = presets.block(preset)["plugins"].values()
    keywords = {name: value for name, value in settings.items() if name != "plugin"}
    cls = {"select": SelectPlugin, "reweight": ReweightPlugin}[settings["plugin"]]
    return cls(**keywords, **FACTS)


def decide(plugin: SelectPlugin | ReweightPlugin, batch: dh.RolloutBatch, step: int = 1) -> torch.Tensor:
    ctx = dh.StepContext(step=step)
    scores = scores_for(plugin.scorer, batch, ctx, plugin.actuator.accepts, plugin.actuator.layout)
    return act(plugin.actuator, scores, batch, ctx)


# ------------------------------------------------------------------ loops over groups, as one would write them first


def loop_group_solve_rate(batch: dh.RolloutBatch) -> torch.Tensor:
    scores = torch.zeros(batch.bs)
    for group in range(batch.n_groups):
        rows = (batch.group == group).nonzero().flatten()
        scores[rows] = (batch.rewards[rows] > 0.5).float().mean()
    return scores


def loop_gfpo(batch: dh.RolloutBatch, k: int = 3) -> torch.Tensor:
    kept = []
    for group in range(batch.n_groups):
        rows = (batch.group == group).nonzero().flatten()
        kept.append(rows[torch.argsort(batch.n_valid[rows], stable=True)[:k]])
    return torch.cat(kept)


def loop_max_variance(batch: dh.RolloutBatch, fraction: float = 0.5) -> torch.Tensor:
    kept = []
    for group in range(batch.n_groups):
        rows = (batch.group == group).nonzero().flatten()
        rewards = batch.rewards[rows].numpy()
        order = np.argsort(-rewards, kind="stable")
        m = int(fraction * len(rows) + 0.5)
        subsets = [np.concatenate([order[: m - a], order[len(order) - a :]]) for a in range(m + 1)]
        best = max(subsets, key=lambda subset: rewards[subset].var())
        kept.append(rows[torch.from_numpy(best)])
    return torch.cat(kept)


LOOPS = {"difffilter": loop_group_solve_rate, "gfpo": loop_gfpo, "maxvar": loop_max_variance}


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """Largest growth of this process's resident memory while ``run`` runs, sampled every millisecond."""
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    samples: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            samples.append(resident())
            time.sleep(0.001)

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return max([*samples, before]) - before


def measure() -> tuple[list[tuple[str, float, str, float, str]], dict[str, float]]:
    """Rows (name, figure, unit, limit, kind) and figures without a limit."""
    torch.set_num_threads(1)
    batch = make_batch()
    values = batch.values("old_log_probs")
    exp = statistics.median(seconds(lambda: values.exp(), 3) for _ in range(5))
    first = {
        "tokens": float(batch.n_tokens),
        "torch.exp_ms": exp * 1e3,
        "rewards_ms": seconds(lambda: batch.rewards, 1) * 1e3,
        "lengths_ms": seconds(lambda: batch.n_valid, 1) * 1e3,
        "order_of_content_ms": seconds(lambda: batch.tie_rank, 1) * 1e3,
    }
    rows = []
    for preset in presets.names():
        if "mix" in (settings["plugin"] for settings in presets.block(preset)["plugins"].values()):
            continue
        plugin = build(preset)
        run = lambda plugin=plugin: decide(plugin, batch)  # noqa: E731
        run()
        took = seconds(run)
        if preset in TOKEN_METHODS or preset in READ_TOKENS:
            limit = TOKEN_METHODS.get(preset) or READ_TOKENS[preset]
            rows.append((preset, took / exp, "x torch.exp", limit, "at most"))
        else:
            rows.append((preset, took * 1e3, "ms", 5.0, "at most"))
        if preset in READ_TOKENS:
            scores = torch.rand(batch.bs)
            took = seconds(lambda: act(plugin.actuator, scores, batch, dh.StepContext(step=1)))  # noqa: B023
            rows.append((f"{preset}, actuator alone", took * 1e3, "ms", 5.0, "at most"))
        if preset in LOOPS:
            ours = seconds(run if preset != "difffilter" else lambda: plugin.scorer.score(batch, 1))  # noqa: B023
            loop = seconds(lambda: LOOPS[preset](batch), 3)  # noqa: B023
            name = {"difffilter": "group_solve_rate", "maxvar": "max_variance"}.get(preset, preset)
            first[f"{name}_loop_ms"] = loop * 1e3
            rows.append((f"{name}, against a loop", loop / ours, "x faster", 10.0, "at least"))
    return rows, first


def measure_memory() -> tuple[float, float, float]:
    """Bytes read, and peak extra bytes of the decisions of topk and of ar alone, and of both merged by the host."""
    torch.set_num_threads(1)
    batch = make_batch()
    alone = [build(preset) for preset in ("topk", "ar")]
    alone = [build(preset) for preset in ("topk", "ar")]
    decided = max(peak_extra_bytes(lambda plugin=plugin: decide(plugin, batch)) for plugin in alone)
    batch = make_batch()
    manager = dh.HookManager.from_config(
        {"plugins": {**presets.block("topk")["plugins"], **presets.block("ar")["plugins"]}},
        estimator="grpo",
        has_groups=True,
    )
    read = manager.required_fields("post_advantage", 1) - {"prompts"}
    size = sum(batch.values(name).nbytes for name in read) + GROUPS * SIZE * 64 * 8
    coefficients = dh.LossCoefficients("token")
    extra = peak_extra_bytes(lambda: manager.post_advantage(batch, dh.StepContext(step=1), coefficients))
    return float(size), float(decided), float(extra)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    read, decided, extra = measure_memory()
    rows, first = measure()
    rows.append(("topk, ar, each alone: extra memory", decided / read, "x bytes read", 1.5, "at most"))
    rows.append(("topk and ar, merged: extra memory", extra / read, "x bytes read", 1.5, "at most"))
    print(f"load {load:.1f}; " + "; ".join(f"{name} {value:,.1f}" for name, value in first.items()))
    missed = 0
    for name, figure, unit, limit, kind in rows:
        good = figure <= limit if kind == "at most" else figure >= limit
        missed += not good
        print(f"{name:36s} {figure:8.2f} {unit:12s} {kind} {limit:g}{'' if good else '   MISSED'}")
    if options.json:
        figures = {name: {"figure": figure, "unit": unit, "limit": limit} for name, figure, unit, limit, _ in rows}
        options.json.write_text(json.dumps({"load": load, "first": first, "methods": figures}, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
