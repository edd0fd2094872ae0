"""What mask, drop and weight do to the gradient, for each estimator and aggregation.

``docs/effects.md`` holds the same table; its numbers come from :data:`RATIO`, which every cell here checks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dataflex_hooks import UpdateDecision
from tests.real.plugins import Decide
from tests.real.test_drop import first_sessions, real_rows, tokens, with_models

pytestmark = pytest.mark.real

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gae")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
EFFECTS = ("mask", "drop", "weight")
RATIO = {
    ("mask", "token-mean"): "1",
    ("mask", "seq-mean-token-mean"): "1",
    ("mask", "seq-mean-token-sum"): "1",
    ("drop", "token-mean"): "all tokens / kept tokens",
    ("drop", "seq-mean-token-mean"): "all rows / kept rows",
    ("drop", "seq-mean-token-sum"): "all rows / kept rows",
    ("weight", "token-mean"): "w",
    ("weight", "seq-mean-token-mean"): "w",
    ("weight", "seq-mean-token-sum"): "w",
}
"""Gradient of the kept rows' terms, times this, by effect and aggregation; the same for every estimator."""
WEIGHT = 3.0
DOCS = Path(__file__).parents[2] / "docs" / "effects.md"


def decide(effect: str) -> Decide:
    def make(batch):
        keep = first_sessions(batch, 4)
        if effect == "weight":
            return UpdateDecision(weights=torch.where(keep, WEIGHT, 0.0), normalize="none")
        return UpdateDecision(mask=keep) if effect == "mask" else UpdateDecision(keep=keep)

    return Decide(make)


@pytest.fixture(scope="module")
def small(stored):
    """Two prompts of eight rollouts whose rewards vary."""
    rewards = torch.tensor([float(row.sum()) for row in stored.fields["rm_scores"].unbind()])
    uids = sorted({key.rsplit("_", 2)[0] for key in stored.keys})
    groups = {uid: [i for i, key in enumerate(stored.keys) if key.startswith(uid)] for uid in uids}
    varied = [rows for rows in groups.values() if len(set(rewards[rows].tolist())) > 1]
    return stored.select([*varied[0], *varied[1]])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_effect_has_the_gradient_that_the_docs_say(live, small, estimator, aggregation):
    critic = estimator == "gae"
    settings = {
        "critic.enable": critic,
        "algorithm.adv_estimator": estimator,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "critic.ppo_mini_batch_size": 2,
    }

    def run(plugin):
        loss = {"loss_agg_mode": aggregation}
        plugins = {"p": plugin} if plugin else None
        with with_models(live, critic=critic):
            return live.update(small, plugins=plugins, settings=settings, loss=loss)

    plain = run(None)
    masked, dropped, weighted = (run(decide(effect)) for effect in EFFECTS)
    known = {
        "1": 1.0,
        "w": WEIGHT,
        "all rows / kept rows": real_rows(plain) / real_rows(dropped),
        "all tokens / kept tokens": tokens(plain) / tokens(dropped),
    }
    assert real_rows(dropped) == 8 and masked.grad_norm > 0
    assert plain.grad_norm != pytest.approx(masked.grad_norm, rel=1e-3)
    for effect, outcome in (("drop", dropped), ("weight", weighted)):
        ratio = known[RATIO[effect, aggregation]]
        assert ratio > 1.2
        assert outcome.grad_norm / masked.grad_norm == pytest.approx(ratio, rel=1e-4)
    if critic:
        assert all(outcome.metrics["critic/grad_norm"] > 0 for outcome in (plain, masked, dropped, weighted))
    everything = run(Decide(lambda batch: UpdateDecision(keep=batch.session_number >= 0)))
    assert everything.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)


def test_the_table_of_the_docs_is_this_one():
    lines = ["| effect | " + " | ".join(f"`{a}`" for a in AGGREGATIONS) + " |", "|---" * 4 + "|"]
    lines += ["| " + " | ".join([e, *(RATIO[e, a] for a in AGGREGATIONS)]) + " |" for e in EFFECTS]
    assert "\n".join(lines) in DOCS.read_text()
