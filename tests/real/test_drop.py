"""Dropped rows leave the batch of the real trainer, and what is left is trained on as meant."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from dataflex_hooks import RewardDecision, UpdateDecision, hookimpl
from tests.real.plugins import Decide

pytestmark = pytest.mark.real

NO_CRITIC = {"critic.enable": False}
DROP_HALF = {
    "plugin": "select",
    "scorer": "reward_difficulty",
    "actuator": {"name": "topk_fraction", "params": {"fraction": 0.5}},
}


class Early:
    """Decides at post_reward by ``make(batch)``."""

    provides = {"rewards", "keep"}
    requires = {"post_reward": ("rm_scores", "responses", "prompts")}

    def __init__(self, make) -> None:
        self.make = make

    @hookimpl
    def post_reward(self, batch, ctx) -> RewardDecision:
        return self.make(batch)


def first_sessions(batch, n: int) -> torch.Tensor:
    """(bs,) bool: the first n sessions of every group."""
    return batch.session_number < n


def first_rows(batch, n: int) -> torch.Tensor:
    """(bs,) bool: n rows, whatever their group."""
    return torch.arange(batch.bs) < n


def tokens(outcome, name="response_mask") -> int:
    return int(sum(int(mask.sum()) for mask in outcome.of(name).values()))


def real_rows(outcome) -> int:
    return len(outcome.keys) - len(outcome.padding)


def per_mini_batch(outcome, rows: int) -> list[int]:
    """Real rows of each mini-batch of ``rows`` rows on one rank."""
    real = [i not in set(outcome.padding) for i in range(len(outcome.keys))]
    return [sum(real[i : i + rows]) for i in range(0, len(real), rows)]


def finite(outcome) -> bool:
    values = [v for name, v in outcome.metrics.items() if name.startswith(("actor/", "critic/"))]
    return bool(values) and all(math.isfinite(float(value)) for value in values)


@contextmanager
def with_models(live, critic=False, reference=False):
    live.trainer.use_critic, live.trainer.use_reference_policy = critic, reference
    try:
        yield
    finally:
        live.trainer.use_critic = live.trainer.use_reference_policy = False


# ------------------------------------------------------------------ what a drop does to the gradient


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_half_dropped_against_half_masked(live, stored, aggregation):
    """Advantages of the whole group: the gradients are parallel, and differ by what is known of the denominators."""
    loss = {"loss_agg_mode": aggregation}

    def run(**settings):
        outcome = live.update(stored, {"plugins": {"half": DROP_HALF | settings}}, loss=loss, settings=NO_CRITIC)
        return outcome, live.gradient_direction()

    masked, mask_direction = run()
    dropped, drop_direction = run(effect="drop", advantages="group")
    assert real_rows(masked) == len(stored.keys) and real_rows(dropped) == len(stored.keys) // 2
    assert float(mask_direction @ drop_direction) == pytest.approx(1.0, abs=1e-5)
    kept_tokens = sum(int(mask.sum()) for key, mask in masked.of("response_mask").items() if key in dropped.keys)
    ratio = len(dropped.keys) / real_rows(dropped)
    if aggregation == "token-mean":
        ratio = tokens(masked) / kept_tokens
    assert ratio > 1.5
    assert dropped.grad_norm / masked.grad_norm == pytest.approx(ratio, rel=1e-4)
    for key, advantages in dropped.of("advantages").items():
        assert torch.equal(advantages, masked.of("advantages")[key])
    # Opposite case: nothing dropped.
    everything = live.update(stored, plugins={"all": Early(lambda b: RewardDecision(keep=b.rewards > -9))}, loss=loss)
    assert everything.grad_norm == pytest.approx(live.update(stored, loss=loss).grad_norm, rel=1e-6)


def one_zero(batch) -> torch.Tensor:
    return (batch.session_number == 0).float()


def test_advantages_over_kept_rows_and_over_the_group(live, stored):
    """Rewards 1, 0, 0, ...; the first two sessions of every group stay."""

    def run(advantages, n=2):
        keep = lambda b: RewardDecision(one_zero(b), first_sessions(b, n), advantages=advantages)  # noqa: E731
        outcome = live.update(stored, plugins={"p": Early(keep)}, settings=NO_CRITIC)
        return {round(float(a[0]), 2) for a in outcome.of("advantages").values()}, real_rows(outcome)

    assert run("kept") == ({0.71, -0.71}, 16)
    assert run("group") == ({2.47, -0.35}, 16)
    assert run(None) == ({2.47, -0.35}, 16)
    # One session a group: verl alone would use its raw reward, 1.
    assert run("kept", n=1) == ({2.47}, 8)


def test_a_lone_session_without_a_baseline_is_dropped_too(live, stored):
    def keep(batch):
        alone = (batch.group == 0) & (batch.session_number == 0)
        return RewardDecision(keep=alone | ((batch.group == 1) & first_sessions(batch, 3)))

    with with_models(live, reference=True):
        settings = {**NO_CRITIC, "algorithm.use_kl_in_reward": True}
        live.trainer.kl_ctrl_in_reward = getattr(live.trainer, "kl_ctrl_in_reward", None) or _fixed_kl()
        outcome = live.update(stored, plugins={"p": Early(keep)}, settings=settings)
    assert real_rows(outcome) == 3 and outcome.metrics["dataflex/lone_rows"] == 1


def _fixed_kl():
    from verl.trainer.ppo.core_algos import FixedKLController

    return FixedKLController(kl_coef=0.001)


# ------------------------------------------------------------------ mini-batches


SMALL = {
    **NO_CRITIC,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "critic.ppo_mini_batch_size": 4,
}


@pytest.mark.parametrize("kept", [9, 7, 1])
@pytest.mark.parametrize("hook", ["post_reward", "post_advantage"])
def test_few_rows_with_a_critic_whose_mini_batch_is_larger(live, stored, kept, hook):
    """Actor mini-batches of 8 rows, the critic's of 32: padded to 32, spread 3 2 2 2, 2 2 2 1 and 1 0 0 0."""
    if hook == "post_reward":
        plugin = Early(lambda b: RewardDecision(keep=first_rows(b, kept)))
    else:
        plugin = Decide(lambda b: UpdateDecision(keep=first_rows(b, kept)))
    with with_models(live, critic=True):
        settings = {**SMALL, "critic.enable": True, "algorithm.adv_estimator": "gae"}
        outcome = live.update(stored, plugins={"p": plugin}, settings=settings)
    assert real_rows(outcome) == kept and len(outcome.keys) == 32
    assert max(per_mini_batch(outcome, 8)) - min(per_mini_batch(outcome, 8)) <= 1
    assert finite(outcome) and outcome.grad_norm > 0
    assert outcome.metrics["critic/grad_norm"] > 0
    assert outcome.metrics["dataflex/kept_frac"] == pytest.approx(kept / len(stored.keys))


def test_uneven_mini_batches_are_filled_up_in_sequence_mean_modes(live, stored):
    def weights(aggregation, **block):
        plugin = Early(lambda b: RewardDecision(keep=first_rows(b, 13)))
        loss = {"loss_agg_mode": aggregation}
        outcome = live.update(stored, block or None, plugins={"p": plugin}, settings=SMALL, loss=loss)
        assert per_mini_batch(outcome, 8) == [6, 7]
        if "rollout_is_weights" not in outcome.fields:
            return None, outcome
        return {round(float(w[0]), 4) for w in outcome.of("rollout_is_weights").values()}, outcome

    filled, outcome = weights("seq-mean-token-mean")
    assert filled == {round(8 / 6, 4), round(8 / 7, 4)}
    assert outcome.metrics["dataflex/fill_largest"] == pytest.approx(8 / 6)
    assert weights("seq-mean-token-sum")[0] == filled
    assert weights("token-mean")[0] is None
    assert weights("seq-mean-token-mean", max_fill=1.2)[0] == {1.2, round(8 / 7, 4)}
    assert weights("seq-mean-token-mean", max_fill=1)[0] is None


def test_dropped_rows_leave_transfer_queue(live, stored):
    import transfer_queue as tq

    seen = []

    class Look:
        @hookimpl
        def post_advantage(self, batch):
            seen.append((batch.bs, len(tq.kv_list("train")["train"])))

    drop = Early(lambda b: RewardDecision(keep=first_rows(b, 64 - 16)))
    live.update(stored, plugins={"p": drop, "look": Look()}, settings=SMALL)
    live.update(stored, plugins={"look": Look()}, settings=SMALL)
    assert seen == [(48, 48), (64, 64)]


def test_two_ranks_share_what_is_left(live, live_two_workers, stored):
    drop = Early(lambda b: RewardDecision(keep=first_sessions(b, 3)))
    one = live.update(stored, plugins={"p": drop}, settings=NO_CRITIC)
    two = live_two_workers.update(stored, plugins={"p": drop}, settings=NO_CRITIC)
    assert real_rows(one) == real_rows(two) == 24 and len(two.keys) == 64
    real = [i not in set(two.padding) for i in range(64)]
    assert (sum(real[:32]), sum(real[32:])) == (12, 12)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


# ------------------------------------------------------------------ too few left


@pytest.mark.parametrize("hook", ["post_reward", "post_advantage"])
def test_nothing_left_falls_back_as_named(live, stored, hook):
    def plugin(batch):
        keep, scores = torch.zeros(batch.bs, dtype=torch.bool), batch.lengths.double()
        if hook == "post_reward":
            return RewardDecision(keep=keep, scores=scores)
        return UpdateDecision(keep=keep, scores=scores)

    make = Early if hook == "post_reward" else Decide
    live.restore()
    before = live.state()
    skipped = live.update(stored, plugins={"p": make(plugin)}, settings=NO_CRITIC)
    assert "actor/grad_norm" not in skipped.metrics and real_rows(skipped) == len(stored.keys)
    assert skipped.metrics["dataflex/skip_update"] == skipped.metrics["dataflex/fallback"] == 1.0
    assert live.same_state(before)

    plain = live.update(stored, settings=NO_CRITIC)
    assert not live.same_state(before)
    everything = live.update(stored, {"fallback": "keep_all"}, plugins={"p": make(plugin)}, settings=NO_CRITIC)
    assert everything.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    best = live.update(
        stored, {"fallback": "keep_best", "min_keep": 5}, plugins={"p": make(plugin)}, settings=NO_CRITIC
    )
    lengths = sorted((len(mask) for mask in plain.of("response_mask").values()), reverse=True)
    assert real_rows(best) == 5
    assert sorted((len(mask) for mask in best.of("response_mask").values()), reverse=True) == lengths[:5]


def test_masks_have_a_least_only_when_asked(live, stored):
    mask = Decide(lambda b: UpdateDecision(mask=first_rows(b, 3)))
    assert live.update(stored, plugins={"p": mask}).metrics["dataflex/kept_frac"] == pytest.approx(3 / 64)
    asked = live.update(stored, {"min_keep": 0.5}, plugins={"p": mask})
    assert "actor/grad_norm" not in asked.metrics and asked.metrics["dataflex/fallback"] == 1.0


# ------------------------------------------------------------------ KL and entropy


def test_include_takes_masked_responses_out_of_kl_and_entropy(live, stored):
    loss = {"kl_loss_type": "kl", "kl_loss_coef": 0.1, "entropy_coeff": 0.01}

    def run(keep, include):
        make = lambda b: UpdateDecision(mask=torch.full((b.bs,), keep), include=include)  # noqa: E731
        with with_models(live, reference=True):
            return live.update(stored, plugins={"p": Decide(make)}, loss=loss, settings=NO_CRITIC)

    assert run(False, ()).grad_norm > 0
    assert run(False, ("kl", "entropy")).grad_norm == 0.0
    assert run(True, ("kl", "entropy")).grad_norm == pytest.approx(run(True, ()).grad_norm, rel=1e-6)
