"""What dropping saves, and what our hooks cost, on the live trainer.

Saved: log-prob and update time at a kept share, against the same batch with nothing dropped, with long responses and
many mini-batches. The cost that does not depend on rows (dispatch, the pass over one row) is measured with one row left
and taken off both sides. Cost: `timing_s/dataflex` of stacked presets against verl's own `adv` phase of a plain run on
the same stored batch.

    python -m tests.benchmarks.drop [--rows 160] [--tokens 512] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from dataflex_verl.local.settings import local_environment

os.environ.update(local_environment())

import torch  # noqa: E402

from dataflex_hooks import RewardDecision, hookimpl  # noqa: E402
from dataflex_verl import presets  # noqa: E402
from dataflex_verl.demo.build import build_demo  # noqa: E402
from tests.real.conftest import base_overrides  # noqa: E402
from tests.real.harness import LiveTrainer, StoredBatch, compose_config, start_ray  # noqa: E402

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
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    generator = torch.Generator().manual_seed(0)
    vocabulary = int(short.fields["responses"].values().max()) + 1
    fields, tags = [], []
    for number in range(rows):
        source = number % len(short.keys)
        row = {name: short.fields[source][name] for name in short.fields.keys()}
        response = torch.randint(3, vocabulary, (tokens,), generator=generator)
        ids, ones = torch.cat([row["prompts"], response]), torch.ones(tokens, dtype=torch.int64)
        rewards = torch.zeros(tokens)
        rewards[-1] = float(torch.rand(1, generator=generator) > 0.5)
        row.update(
            responses=response,
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(len(ids)),
            response_mask=ones,
            loss_mask=ones,
            rm_scores=rewards,
            rollout_log_probs=torch.full((tokens,), -1.0),
        )
        fields.append(row)
        lengths = {"prompt_len": len(row["prompts"]), "response_len": tokens, "seq_len": len(ids)}
        tags.append({**short.tags[source], **lengths})
    keys = [f"group{number // MINI}_{number % MINI}_0" for number in range(rows)]
    return StoredBatch(keys, tags, list_of_dict_to_tensordict(fields))


def our_time(live: LiveTrainer, stored: StoredBatch, rounds: int) -> dict[str, float]:
    """Milliseconds of our hooks with stacked presets, and of verl's `adv` phase without us; medians."""
    block = {"plugins": {**presets.block("difffilter")["plugins"], **presets.block("per")["plugins"]}}
    ours, verls = [], []
    for _ in range(rounds):
        ours.append(live.update(stored, block).metrics["timing_s/dataflex"])
        verls.append(live.update(stored, plain=True).timing["adv"])
    ms = {"ours_ms": statistics.median(ours) * 1e3, "verls_adv_ms": statistics.median(verls) * 1e3}
    return {
        **{name: round(value, 2) for name, value in ms.items()},
        "ratio": round(ms["ours_ms"] / ms["verls_adv_ms"], 2),
    }


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
        short = live.collect()
        stored = long_batch(short, options.rows, options.tokens)

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
            "our_time_short_batch": our_time(live, short, 5),
            "our_time_long_batch": our_time(live, stored, options.rounds),
            "load": round(os.getloadavg()[0], 1),
        }
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
