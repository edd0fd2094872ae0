"""Whole runs with ``sft_mix`` and ``replay``: both act, and a resumed run goes on as one that was not interrupted."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch

from tests.real.conftest import base_overrides
from tests.real.harness import compose_config
from tests.real.runs import train

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.usefixtures("contrib")]

SMALL = (
    # Sixteen prompts: a prompt comes again two steps later. Two rollouts of each: groups fail often.
    "data.train_max_samples=16",
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
    "trainer.v1.trainer_mode=dataflex_sync",
    "trainer.total_training_steps=4",
    "trainer.total_epochs=10",
    "trainer.save_freq=2",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "algorithm.rollout_correction.rollout_is=token",
    "+dataflex.plugins.sft_mix.share=0.15",
    "+dataflex=replay",
)
OURS = ("dataflex/sft_mix/", "dataflex/replay/", "dataflex/added_rows", "actor/grad_norm", "critic/score/mean")


@pytest.fixture(scope="module")
def runs(ray_session, contrib, demo, tmp_path_factory):
    """The metrics of a run of four steps, and of one that takes up its checkpoint of step 2; and their folders."""
    directory = tmp_path_factory.mktemp("rows")
    path = directory / "demos.jsonl"
    records = pq.read_table(demo.train_parquet).to_pylist()[100:110]
    lines = [{"prompt": record["prompt"], "response": record["reward_model"]["ground_truth"]} for record in records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(name, *more):
        given = [text for text in base_overrides(demo) if text.split("=")[0] not in {t.split("=")[0] for t in SMALL}]
        given = [text for text in given if not text.startswith("trainer.resume_mode")]
        folder = f"trainer.default_local_dir={directory / name}"
        data = f"+dataflex.plugins.sft_mix.data={path}"
        trained = train(compose_config([*given, *SMALL, folder, data, *more]))
        steps = {int(line["training/global_step"]): line for line in trained.metrics}
        return {number: {k: v for k, v in line.items() if k.startswith(OURS)} for number, line in steps.items()}

    whole = run("whole", "trainer.resume_mode=disable")
    start = directory / "whole" / "global_step_2"
    resumed = run("resumed", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={start}")
    return whole, resumed, directory


def test_both_act_in_a_run(runs):
    whole, _, _ = runs
    taken = [whole[step]["dataflex/sft_mix/demonstrations_total"] for step in (1, 2, 3, 4)]
    # 0.15 of 16 rollouts is 2.4 a step.
    assert taken == [2.0, 2.0, 3.0, 2.0]
    replayed = [whole[step]["dataflex/replay/replayed_total"] for step in (1, 2, 3, 4)]
    assert replayed[:2] == [0.0, 0.0] and sum(replayed) > 0
    both = [a + b for a, b in zip(taken, replayed, strict=True)]
    assert [whole[step]["dataflex/added_rows"] for step in (1, 2, 3, 4)] == both


def test_a_resumed_run_goes_on_with_the_next_demonstration_and_the_same_pool(runs):
    whole, resumed, directory = runs
    assert sorted(resumed) == [3, 4]
    for step in (3, 4):
        assert resumed[step] == whole[step]
    states = [_state(directory / name / "global_step_4") for name in ("whole", "resumed")]
    assert states[0] == states[1]
    assert states[0][0]["sft_mix"]["state"]["position"] == 9 and len(states[0][1][0]) > 1000
    first, second = (sorted((directory / name / "global_step_4").rglob("model_*.pt")) for name in ("whole", "resumed"))
    for one, other in zip(first, second, strict=True):
        assert _same(torch.load(one, weights_only=False), torch.load(other, weights_only=False))


def _state(folder):
    """What the checkpoint says of the plugins, and its tensors byte for byte."""
    record = json.loads((folder / "dataflex" / "state.json").read_text())
    tensors = [path.read_bytes() for path in sorted((folder / "dataflex").glob("*.safetensors"))]
    return record["plugins"], tensors


def _same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(getattr(one[name], "_local_tensor", one[name]), getattr(other[name], "_local_tensor", other[name]))
        for name in one
        if isinstance(one[name], torch.Tensor)
    )
