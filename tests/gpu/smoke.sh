#!/usr/bin/env bash
# A ten-minute check on one GPU: stock vLLM, stock verl, and this package by pip install and overrides only.
# All responses masked must give a gradient of exactly zero; nothing masked must give one above zero.
#
# Needs a Python environment with verl 0.9.x, vLLM and a GPU; set MODEL to a local Hugging Face model directory.
#   MODEL=/models/Qwen2.5-0.5B-Instruct tests/gpu/smoke.sh
set -euo pipefail

MODEL=${MODEL:?set MODEL to a local Hugging Face model directory}
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python -m pip install --quiet --no-deps "$root"
python -m pip install --quiet pluggy wrapt typer rich hydra-core omegaconf safetensors

python - "$work" <<'PY'
import sys
import pyarrow as pa
import pyarrow.parquet as pq

rows = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {a} + {a % 7}? Answer with the number only."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + a % 7)},
        "extra_info": {"index": a},
    }
    for a in range(64)
]
pq.write_table(pa.Table.from_pylist(rows), f"{sys.argv[1]}/train.parquet")
pq.write_table(pa.Table.from_pylist(rows[:8]), f"{sys.argv[1]}/val.parquet")
# The reward is the parity of the length: it varies within every group, whatever the model says.
with open(f"{sys.argv[1]}/reward.py", "w") as f:
    f.write(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return float(len(solution_str) % 2)\n"
    )
PY

run() { # run NAME LOW HIGH: one step with the band (LOW, HIGH); prints actor/grad_norm
    local name=$1 low=$2 high=$3
    VERL_FILE_LOGGER_PATH="$work/$name.jsonl" python -m verl.trainer.main_ppo \
        data.train_files="$work/train.parquet" data.val_files="$work/val.parquet" \
        data.train_batch_size=8 data.max_prompt_length=128 data.max_response_length=64 \
        actor_rollout_ref.model.path="$MODEL" \
        actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.use_dynamic_bsz=True \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.rollout.enforce_eager=True \
        reward.custom_reward_function.path="$work/reward.py" \
        algorithm.adv_estimator=grpo trainer.n_gpus_per_node=1 trainer.nnodes=1 \
        trainer.total_training_steps=1 trainer.val_before_train=False trainer.logger=[console,file] \
        trainer.default_local_dir="$work/$name" trainer.resume_mode=disable \
        trainer.v1.trainer_mode=dataflex_sync +dataflex.mechanism=select \
        +dataflex.scorer.name=reward_difficulty \
        +dataflex.actuator.name=threshold_band \
        +dataflex.actuator.params.low="$low" +dataflex.actuator.params.high="$high" \
        >"$work/$name.log" 2>&1 || { tail -n 40 "$work/$name.log" >&2; exit 1; }
    python - "$work/$name.jsonl" <<'PY'
import json
import sys

records = [json.loads(line) for line in open(sys.argv[1])]
data = next(r["data"] for r in records if "actor/grad_norm" in r["data"])
print(data["actor/grad_norm"], data["dataflex/kept_frac"])
PY
}

read -r masked masked_kept <<<"$(run masked 5 6)"
read -r open open_kept <<<"$(run open -1 2)"
echo "all masked:     grad_norm=$masked kept_frac=$masked_kept"
echo "nothing masked: grad_norm=$open kept_frac=$open_kept"
python - "$masked" "$masked_kept" "$open" "$open_kept" <<'PY'
import sys

masked, masked_kept, opened, open_kept = map(float, sys.argv[1:])
assert masked == 0.0 and masked_kept == 0.0, "a masked response still reached the gradient"
assert opened > 0.0 and open_kept == 1.0, "without a mask there must be a gradient"
print("GPU smoke passed")
PY
