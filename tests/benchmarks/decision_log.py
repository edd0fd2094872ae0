"""Cost of the decision log and speed of what-if: 8,192 rollouts a step, 512 prompts of 16, 11 million tokens.

``python -m tests.benchmarks.decision_log [--json FILE]`` prints a table and what holds of the limits:

- at most 50 ms a step on the step's path, by the clock; the files are written in a thread, and what both take of the
  processor is in the table too
- at most 60 bytes a rollout on disk without tokens, with two plugins, eight domains and graded rewards
- what-if of ``difffilter`` over the log: at least 200,000 rollouts in a second of one processor; by the clock it takes
  no longer where nothing else runs

Each time is the least of several. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

import dataflex_hooks as dh
from dataflex_hooks.decision_log.reader import DecisionLog
from dataflex_hooks.domain_stats import DOMAIN_COLUMN
from dataflex_hooks.whatif.run import what_if
from dataflex_hooks.whatif.steps import LogSource
from dataflex_hooks.whatif.strategy import Strategy
from dataflex_verl import presets
from dataflex_verl.decision_log import RunLog, open_log
from tests.benchmarks.methods import GROUPS, LONGEST, SIZE, make_batch

STEPS, REPEATS = 16, 5
LIMITS = {"path_ms": 50.0, "bytes_a_rollout": 60.0, "rollouts_a_second": 200_000.0}
BLOCK = {"plugins": {**presets.block("difffilter")["plugins"], **presets.block("per")["plugins"]}}


def rollouts(seed: int = 0) -> dh.RolloutBatch:
    """The batch of the methods' benchmark with ids as verl gives them, domains, graded rewards and their advantages."""
    plain, rng = make_batch(seed), np.random.default_rng(seed)
    reward = np.round(rng.random((GROUPS, SIZE)), 3).astype(np.float32)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)
    ids = [uuid.UUID(int=int.from_bytes(rng.bytes(16), "big")) for _ in range(GROUPS)]
    domains = np.array([f"domain {index % 8}" for index in range(GROUPS)], dtype=object).repeat(SIZE)
    fields = {name: plain.values(name) for name in ("response_mask", "responses")}
    fields["rm_scores"] = torch.zeros(plain.n_tokens)
    fields["rm_scores"][plain.offsets[1:] - 1] = torch.from_numpy(reward.reshape(-1))
    fields["advantages"] = torch.from_numpy(advantage.reshape(-1)).repeat_interleave(plain.lengths)
    keys = [f"{name}_{session}_0" for name in ids for session in range(SIZE)]
    return dh.RolloutBatch(keys, plain.offsets, {DOMAIN_COLUMN: domains}, fields, plain._prompts)


def new_log(folder: Path) -> RunLog:
    config = OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(folder), "v1": {"trainer_mode": "sync"}},
            "algorithm": {"adv_estimator": "grpo"},
            "data": {},
            "actor_rollout_ref": {"rollout": {"n": SIZE, "response_length": LONGEST}},
            "dataflex": {**BLOCK, "log_decisions": True},
        }
    )
    hooks = dh.HookManager.from_config(
        config.dataflex, estimator="grpo", has_groups=True, rollout_n=SIZE, response_length=LONGEST
    )
    log = open_log(config, hooks, dh.LossCoefficients("token"), ["DataFlex plan: of the benchmark"])
    assert log is not None
    return log


def measure_log(folder: Path) -> dict[str, float]:
    log, path, thread = new_log(folder), [], []
    batch = rollouts()
    fields = {name: batch.values(name) for name in ("response_mask", "responses", "rm_scores", "advantages")}
    for step in range(1, STEPS + 1):
        # New objects: what a batch has worked out once is not there the next time.
        fresh = dh.RolloutBatch(batch.keys, batch.offsets, dict(batch._fields), fields, batch._prompts)
        ctx = dh.StepContext(step, explain=True)
        reward = log.hooks.post_reward(fresh, ctx)
        update = log.hooks.post_advantage(fresh, ctx, dh.LossCoefficients("token"))
        started, processor = time.perf_counter(), time.process_time()
        log.rewarded(fresh, reward, ctx)
        log.advantaged(fresh, update, False, None)
        log.end_of_step()
        path.append(time.perf_counter() - started)
        log.wait()
        thread.append(time.process_time() - processor)
    size = sum(file.stat().st_size for file in log.folder.glob("*.parquet"))
    return {
        "path_ms": 1e3 * min(path),
        "processor_ms": 1e3 * min(thread),
        "bytes_a_rollout": size / (STEPS * batch.bs),
    }


def measure_whatif(folder: Path) -> dict[str, float]:
    seconds, processor = [], []
    for _ in range(REPEATS):
        started, used = time.perf_counter(), time.process_time()
        source = LogSource(DecisionLog.open(folder))
        result = what_if(source, [Strategy("difffilter", presets.block("difffilter"))])
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return {
        "rollouts_a_second": result.rollouts / min(processor),
        "rollouts_a_second_by_the_clock": result.rollouts / min(seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        figures = {**measure_log(Path(place)), **measure_whatif(Path(place))}
    for name, value in figures.items():
        limit = f"  (limit {LIMITS[name]:,.0f})" if name in LIMITS else ""
        print(f"{name:32} {value:14,.1f}{limit}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    missed = figures["path_ms"] > LIMITS["path_ms"] or figures["bytes_a_rollout"] > LIMITS["bytes_a_rollout"]
    return int(missed or figures["rollouts_a_second"] < LIMITS["rollouts_a_second"])


if __name__ == "__main__":
    raise SystemExit(main())
