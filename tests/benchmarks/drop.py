"""What dropping saves: log-prob and update time at a kept share, against the same batch with nothing dropped.

Long responses, many mini-batches, on the live trainer. The cost that does not depend on rows (dispatch, optimizer
steps of a mini-batch) is measured with one row left and taken off both sides.

    python -m tests.benchmarks.drop [--rows 160] [--tokens 512] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict

from dataflex_hooks import RewardDecision, hookimpl
from dataflex_verl.demo.build import build_demo
from tests.real.conftest import base_overrides
from tests.real.harness import LiveTrainer, StoredBatch, compose_config, start_ray

PHASES = ("old_log_prob", "update_actor")
MINI = 8


class KeepShare:
    """Keeps a share of the rows, spread over the groups."""

    provides = {"keep"}

    def __init__(self, share: float) -> None:
        self.share = share

    @hookimpl
    def post_reward(self, batch) -> RewardDecision:
        rows = max(1, round(self.share * batch.bs))
        order = torch.argsort(batch.session_number * batch.bs + batch.group)
        keep = torch.zeros(batch.bs, dtype=torch.bool)
        keep[order[:rows]] = True
        return RewardDecision(keep=keep)


def long_batch(short: StoredBatch, rows: int, tokens: int) -> StoredBatch:
    """Rows of ``tokens`` random response tokens, with everything else as a real rollout has it."""
    generator = torch.Generator().manual_seed(0)
    picked = [short.fields[i % len(short.keys)] for i in range(rows)]
    vocabulary = int(short.fields["responses"].values().max()) + 1
    responses = [torch.randint(3, vocabulary, (tokens,), generator=generator) for _ in range(rows)]
    prompts = [row["prompts"] for row in picked]
    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    rewards = [torch.zeros(tokens) for _ in range(rows)]
    for row in rewards:
        row[-1] = float(torch.rand(1, generator=generator) > 0.5)
    ones = [torch.ones(tokens, dtype=torch.int64) for _ in range(rows)]
    nested = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": ids,
        "position_ids": [torch.arange(len(row)) for row in ids],
        "response_mask": ones,
        "loss_mask": ones,
        "rm_scores": rewards,
        "rollout_log_probs": [torch.full((tokens,), -1.0) for _ in range(rows)],
    }
    positions = [i % len(short.keys) for i in range(rows)]
    columns = {name: short.fields[name] for name in short.fields.keys() if name not in nested}
    fields = TensorDict(
        {name: torch.nested.as_nested_tensor(value, layout=torch.jagged) for name, value in nested.items()},
        batch_size=rows,
    )
    for name, column in columns.items():
        if not (isinstance(column, torch.Tensor) and column.is_nested):
            fields[name] = (
                torch.stack([column[i] for i in positions]) if isinstance(column, torch.Tensor) else column[0]
            )
    keys = [f"group{i // MINI}_{i % MINI}_0" for i in range(rows)]
    tags = [
        {**short.tags[p], "prompt_len": len(prompts[i]), "response_len": tokens, "seq_len": len(ids[i])}
        for i, p in enumerate(positions)
    ]
    return StoredBatch(keys, tags, fields)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        demo = build_demo(Path(directory) / "demo", seed=0)
        overrides = [
            *base_overrides(demo),
            "trainer.v1.trainer_mode=dataflex_sync",
            f"data.max_response_length={options.tokens}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            f"actor_rollout_ref.rollout.n={MINI}",
        ]
        config = compose_config([item for item in overrides if "max_response_length=6" not in item])
        start_ray(config)
        import transfer_queue as tq

        tq.init(config.transfer_queue)
        live = LiveTrainer(config, Path(directory))
        stored = long_batch(live.collect(), options.rows, options.tokens)

        def seconds(share: float) -> float:
            plugins = None if share == 1 else {"p": KeepShare(share)}
            timing = live.update(stored, plugins=plugins).timing
            return sum(timing[phase] for phase in PHASES)

        shares = (1.0, 0.5, 0.1, 1 / options.rows)
        seconds(1.0)
        times = {share: statistics.median(seconds(share) for _ in range(options.rounds)) for share in shares}
        fixed = times[1 / options.rows]
        result = {
            "rows": options.rows,
            "tokens": options.tokens,
            "mini_batches": options.rows // MINI,
            "seconds": {f"kept {share:.3g}": round(value, 2) for share, value in times.items()},
            "ratio": {f"kept {share}": round((times[share] - fixed) / (times[1.0] - fixed), 3) for share in (0.5, 0.1)},
            "ratio_with_fixed_cost": {f"kept {share}": round(times[share] / times[1.0], 3) for share in (0.5, 0.1)},
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
