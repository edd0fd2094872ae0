"""The package ``dataflex-sft-mix`` on the real trainer: its demonstrations are trained on as its formula says."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.real.test_reach_added import added_of, gradient_norm, own_of

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("contrib")]

FIELDS = ("prompts", "responses", "advantages", "old_log_probs", "response_mask", "rollout_is_weights")


@pytest.fixture(scope="module")
def rows(stored):
    """Seven groups of eight rollouts: room for eight demonstrations in the mini-batch of 64 rows."""
    return stored.select(list(range(56)))


@pytest.fixture(scope="module")
def demos(demo, tmp_path_factory):
    """The first questions of the training data, as chat messages, with their right answers."""
    records = pq.read_table(demo.train_parquet).to_pylist()[:8]
    path = tmp_path_factory.mktemp("demos") / "demos.jsonl"
    lines = [
        {"prompt": record["prompt"], "response": record["reward_model"]["ground_truth"], "domain": record["domain"]}
        for record in records
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mixing(demos, **parameters: Any) -> dict[str, Any]:
    return {"plugins": {"sft_mix": {"data": str(demos), **parameters}}}


def sequences(fields: dict[str, list[torch.Tensor]], names: tuple[str, str] = ("prompts", "responses")) -> list:
    return [[value.tolist() for value in fields[name]] for name in names]


def test_demonstrations_have_the_prompts_of_rollouts_and_are_in_the_batch(live, stored, rows, demos):
    outcome = live.update(rows, mixing(demos), fields=FIELDS)
    prompts, responses = (added_of(outcome, name) for name in ("prompts", "responses"))
    assert len(prompts) == 7 == outcome.metrics["dataflex/added_rows"]
    # Eight questions in a row were generated for: the template gives the same tokens as verl's own rollout.
    generated = {tuple(prompt.tolist()) for prompt in stored.fields["prompts"].unbind()}
    assert {tuple(prompt.tolist()) for prompt in prompts} <= generated
    answers = {json.loads(line)["response"] for line in demos.read_text().splitlines()}
    tokenizer = live.trainer.tokenizer
    assert {tokenizer.decode(tokens, skip_special_tokens=True) for tokens in responses} <= answers
    assert {int(tokens[-1]) for tokens in responses} == {tokenizer.eos_token_id}
    assert all(bool(mask.all()) for mask in added_of(outcome, "response_mask"))
    # The opposite: in a step that is no multiple of `every` there are none.
    assert "dataflex/added_rows" not in live.update(rows, mixing(demos, every=2), fields=FIELDS).metrics


@pytest.mark.parametrize("advantage", [1.0, 0.25])
def test_the_gradient_is_that_of_the_batch_with_weighted_cross_entropy_beside(live, rows, demos, demo, advantage):
    outcome = live.update(rows, mixing(demos, advantage=advantage), fields=FIELDS)
    examples = [
        (outcome_prompt.tolist(), response.tolist(), [advantage] * len(response))
        for outcome_prompt, response in zip(added_of(outcome, "prompts"), added_of(outcome, "responses"), strict=True)
    ]
    own = {name: own_of(outcome, name) for name in ("prompts", "responses", "advantages")}
    examples += [
        (own["prompts"][key].tolist(), own["responses"][key].tolist(), own["advantages"][key].tolist())
        for key in own["advantages"]
    ]
    assert outcome.grad_norm == pytest.approx(gradient_norm(demo.model_dir, examples), rel=1e-4)
    # The opposite: without the demonstrations the same computation gives another gradient.
    assert outcome.grad_norm != pytest.approx(gradient_norm(demo.model_dir, examples[7:]), rel=1e-2)


def test_share_0_and_no_plugin_train_bit_for_bit_alike(live, rows, demos):
    plain = live.update(rows)
    state = live.state()
    none = live.update(rows, mixing(demos, share=0.0))
    assert none.grad_norm == plain.grad_norm and live.same_state(state)
    live.update(rows, mixing(demos))
    assert not live.same_state(state)


def test_the_log_prob_of_a_demonstration_rises(live, rows, demos, tmp_path):
    # A wrong answer, which nothing in the rollouts' rewards makes likelier.
    line = {**json.loads(demos.read_text().splitlines()[0]), "response": "7x"}
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(line))

    def log_prob_at_step_4(every: int) -> float:
        for step in range(1, 5):
            mixed = mixing(path, share=1 / 56, every=every)
            outcome = live.update(rows, mixed, step=step, keep_weights=step > 1, fields=FIELDS)
        (value,) = added_of(outcome, "old_log_probs")
        return float(value.sum())

    before = float(added_of(live.update(rows, mixing(path, share=1 / 56), fields=FIELDS), "old_log_probs")[0].sum())
    trained, untrained = log_prob_at_step_4(every=1), log_prob_at_step_4(every=4)
    assert trained > before + 1.0 and trained > untrained + 1.0


def test_verls_correction_leaves_demonstrations_alone(live, rows, demos):
    settings = {"algorithm.rollout_correction.rollout_is": "token"}
    outcome = live.update(rows, mixing(demos), settings=settings, fields=FIELDS)
    assert all(bool((weights == 1).all()) for weights in added_of(outcome, "rollout_is_weights"))


def test_a_row_too_long_for_the_run_is_refused_at_start_by_line(live, rows, demos, tmp_path):
    path = tmp_path / "long.jsonl"
    long = {**json.loads(demos.read_text().splitlines()[0]), "response": "1234567890"}
    path.write_text(demos.read_text() + json.dumps(long))
    with pytest.raises(ValueError, match=r"sft_mix.data: got long.jsonl line 9: the response has 11 tokens, more than"):
        live.update(rows, mixing(path))
    assert live.update(rows, mixing(path, too_long="skip")).metrics["dataflex/added_rows"] == 7.0
