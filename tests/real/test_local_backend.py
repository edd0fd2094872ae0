"""The real verl trainer on this machine's CPU: families, workers, roles, LoRA, and the same run twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from dataflex_verl.demo.tokenizer import make_tokenizer
from dataflex_verl.local.forkserver import OWNER
from tests.processes import ends
from tests.real.conftest import base_overrides
from tests.real.harness import compose_config
from tests.real.runs import Run, ask, train

pytestmark = pytest.mark.real

PROMPT = [1, 4, 7, 8, 16, 9, 5]


def run(demo, steps: int, *overrides: str, look=None) -> Run:
    short = ["trainer.v1.trainer_mode=sync", f"trainer.total_training_steps={steps}", "trainer.val_before_train=False"]
    run = train(compose_config([*base_overrides(demo), *short, *overrides]), look)
    assert len(run.metrics) == steps
    return run


def greedy_log_probs(trainer) -> list[float]:
    """What the rollout's present weights say of one prompt."""
    answer = ask(trainer, PROMPT, temperature=0, ignore_eos=True, max_tokens=4)
    return answer.log_probs


def assert_rollout_follows_the_actor(run: Run, atol: float = 1e-4) -> None:
    """The log-probabilities that the rollout gave equal the actor's, so its weights are those of the last update."""
    for metrics in run.metrics:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_probs_diff_max"] < atol
    before, after = run.seen
    assert before != after


def test_merged_lora_reaches_the_rollout(ray_session, demo):
    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True"]
    found = run(demo, 2, *lora, "actor_rollout_ref.actor.optim.lr=1e-2", look=greedy_log_probs)
    assert_rollout_follows_the_actor(found)


def test_unmerged_lora_is_refused(ray_session, demo):
    with pytest.raises(Exception, match=r"set actor_rollout_ref\.model\.lora\.merge=True"):
        run(demo, 1, "actor_rollout_ref.model.lora_rank=8")


def test_critic_and_reference_policy_train(ray_session, demo):
    overrides = [
        "algorithm.adv_estimator=gae",
        f"critic.model.path={demo.model_dir}",
        "critic.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
    ]
    found = run(demo, 2, *overrides, look=greedy_log_probs)
    assert_rollout_follows_the_actor(found)
    first, second = found.metrics
    assert first["critic/grad_norm"] > 0 and second["critic/vf_loss"] != first["critic/vf_loss"]
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and second["actor/kl_loss"] > 1e-6


@pytest.fixture(scope="module")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family with learned absolute positions and tied embeddings, without a chat template."""
    directory = tmp_path_factory.mktemp("gpt2")
    tokenizer = make_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)
    return directory


def test_another_family_trains_with_two_data_parallel_workers(ray_session, demo, gpt2_dir):
    overrides = [f"actor_rollout_ref.model.path={gpt2_dir}", "trainer.n_gpus_per_node=2"]
    # A random model earns no reward by chance: the entropy bonus gives it a gradient.
    overrides.append("actor_rollout_ref.actor.entropy_coeff=0.1")
    found = run(demo, 2, *overrides, look=greedy_log_probs)
    assert_rollout_follows_the_actor(found)


STRATEGIES = [
    "trainer.v1.trainer_mode=dataflex_sync",
    "+dataflex.plugins.select.scorer.name=group_solve_rate",
    "+dataflex.plugins.select.actuator.name=threshold_band",
    "+dataflex.plugins.reweight.scorer.name=token_prob",
    "+dataflex.plugins.reweight.actuator.name=advantage_reweight",
]


@pytest.mark.nightly
def test_same_seed_same_run_bit_for_bit(ray_session, demo):
    first, second = (run(demo, 6, *STRATEGIES).metrics for _ in range(2))

    def compared(metrics: dict[str, float]) -> dict[str, float]:
        kept = ("dataflex/", "critic/", "actor/", "training/rollout_", "response_length/")
        machine = ("/perf/", "/mfu", "time")
        return {k: v for k, v in metrics.items() if k.startswith(kept) and not any(part in k for part in machine)}

    for step, (one, other) in enumerate(zip(first, second, strict=True), start=1):
        assert "actor/grad_norm" in one and any(name.startswith("dataflex/") for name in one)
        assert compared(one) == compared(other), step
    assert len({metrics["critic/rewards/mean"] for metrics in first}) > 1


FORKED = """
import json, os, sys, time
from dataflex_verl.local import forkserver
forkserver.start_server()
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False,
         runtime_env={"py_executable": forkserver.py_executable()})

@ray.remote
class Worker:
    def look(self):
        import random, sys, numpy, torch
        return [os.getppid(), ray.WorkerID.from_random().hex(), random.random(), numpy.random.rand(),
                torch.get_num_threads(), "verl.workers.engine_workers" in sys.modules]

workers = [Worker.remote() for _ in range(2)]
print(json.dumps(ray.get([worker.look.remote() for worker in workers])))
"""


def test_forked_workers_share_a_server_and_no_random_state(tmp_path):
    # This process may have a server already, which a child would use and which does not end with it.
    environment = {name: value for name, value in os.environ.items() if name != OWNER}
    command = [sys.executable, "-c", FORKED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    first, second = json.loads(result.stdout.splitlines()[-1])
    assert first[0] == second[0]
    assert all(one != other for one, other in zip(first[1:4], second[1:4], strict=True))
    assert first[4:] == second[4:] == [1, True]
    # The server ends with the driver.
    assert ends(first[0])
