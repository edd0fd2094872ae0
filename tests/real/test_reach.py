"""Decisions reach the optimizer of the real trainer, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from dataflex_hooks import ConfigError, PluginError, UpdateDecision
from tests.real.plugins import Decide, ReplaceRewards, by_position, mask_all, weigh_all

pytestmark = pytest.mark.real

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
SELECT = {"plugin": "select", "scorer": "advantage_magnitude", "actuator": "topk_fraction"}
REWEIGHT = {"plugin": "reweight", "scorer": "advantage_magnitude", "actuator": "per_advantage"}


def coefficients(aggregation: str, mask: torch.Tensor) -> torch.Tensor:
    """The coefficient of each token of one response, worked out from verl's agg_loss and not from our code."""
    if aggregation == "seq-mean-token-mean":
        return mask.double() / mask.sum()
    return mask.double()


def test_rewards_of_the_stored_batch_vary(stored):
    assert stored.fields["rm_scores"].values().unique().numel() > 1


def test_no_plugin_equals_verls_own_sync_trainer(live, stored):
    ours = live.update(stored)
    verls = live.update(stored, plain=True)
    assert ours.grad_norm == pytest.approx(verls.grad_norm, rel=1e-5)
    assert ours.grad_norm > 0
    assert "rollout_is_weights" not in ours.fields
    assert not [name for name in ours.metrics if name.startswith("dataflex/")]
    assert ours.metrics.keys() == verls.metrics.keys()


def test_everything_masked_gives_a_gradient_of_exactly_zero(live, stored):
    assert live.update(stored, plugins={"mask": mask_all(False)}).grad_norm == 0.0
    assert live.update(stored, plugins={"mask": mask_all(True)}).grad_norm > 0.0


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_raw_weight_everywhere_scales_the_gradient(live, stored, factor):
    plain = live.update(stored).grad_norm
    weighted = live.update(stored, plugins={"raw": weigh_all(factor, "none")})
    assert weighted.grad_norm == pytest.approx(factor * plain, rel=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_normalised_weight_everywhere_changes_nothing(live, stored, aggregation):
    loss = {"loss_agg_mode": aggregation}
    plain = live.update(stored, loss=loss).grad_norm
    assert live.update(stored, plugins={"norm": weigh_all(7.0, "mean")}, loss=loss).grad_norm == pytest.approx(
        plain, rel=1e-6
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_select_and_reweight_stack_in_either_order(live, stored, aggregation):
    loss = {"loss_agg_mode": aggregation}
    one = live.update(stored, {"plugins": {"top": SELECT, "per": REWEIGHT}}, loss=loss)
    other = live.update(stored, {"plugins": {"per": REWEIGHT, "top": SELECT}}, loss=loss)
    alone = live.update(stored, {"plugins": {"top": SELECT}}, loss=loss)
    weights, masks = one.of("rollout_is_weights"), one.of("response_mask")
    assert all(torch.equal(weights[key], other.of("rollout_is_weights")[key]) for key in weights)
    assert one.grad_norm == other.grad_norm

    kept = {key for key, value in alone.of("rollout_is_weights").items() if value.any()}
    assert 0 < len(kept) < len(weights)
    assert all((weights[key] == 0).all() for key in weights if key not in kept)
    assert all((value == 1).all() for key, value in alone.of("rollout_is_weights").items() if key in kept)
    shares = {key: coefficients(aggregation, masks[key]) for key in kept}
    mean = sum((shares[key] * weights[key]).sum() for key in kept) / sum(shares[key].sum() for key in kept)
    assert float(mean) == pytest.approx(1.0, abs=1e-6)
    assert len({round(float(weights[key][0]), 6) for key in kept}) > 1
    assert one.grad_norm != pytest.approx(live.update(stored, loss=loss).grad_norm, rel=1e-3)


def test_importance_weights_of_verl_are_multiplied_not_overwritten(live, stored):
    drifted = stored.fields.clone()
    generator = torch.Generator().manual_seed(0)
    values = stored.fields["rollout_log_probs"].values()
    values = values + 0.3 * torch.randn(values.shape, generator=generator)
    offsets = stored.fields["rollout_log_probs"].offsets()
    drifted["rollout_log_probs"] = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=1, max_seqlen=6)
    batch = type(stored)(stored.keys, stored.tags, drifted)
    settings = {"algorithm.rollout_correction.rollout_is": "token"}
    verls = live.update(batch, settings=settings).of("rollout_is_weights")
    ours = live.update(batch, settings=settings, plugins={"raw": Decide(by_position)}).of("rollout_is_weights")
    assert torch.cat(list(verls.values())).unique().numel() > 10
    for key, own in verls.items():
        position = torch.arange(len(own))
        factor = torch.where(position % 3 == 2, 0.0, 1.0 + position)
        torch.testing.assert_close(ours[key], own * factor, rtol=1e-6, atol=0)


def test_padding_is_never_scored_counted_or_weighted(live, stored):
    rows = stored.select(list(range(29)))
    mini_batches = {"actor_rollout_ref.actor.ppo_mini_batch_size": 2}
    seen = Decide(lambda batch: UpdateDecision(weights=1.0 + batch.rewards, mask=batch.rewards < 0.5))
    outcome = live.update(rows, plugins={"seen": seen}, settings=mini_batches)
    assert len(outcome.padding) == 3
    (batch,) = seen.batches
    assert batch.bs == 29
    solved = {key: float(value.sum()) > 0.5 for key, value in outcome.of("rm_scores").items()}
    assert outcome.metrics["dataflex/kept_frac"] == pytest.approx(1 - sum(solved.values()) / 29)
    assert outcome.metrics["dataflex/seen/kept_frac"] == outcome.metrics["dataflex/kept_frac"]
    assert outcome.metrics["dataflex/reward_all"] == pytest.approx(sum(solved.values()) / 29)
    for position in outcome.padding:
        assert not outcome.fields["response_mask"][position].any()
        assert (outcome.fields["rollout_is_weights"][position] == 1).all()
    for key, weights in outcome.of("rollout_is_weights").items():
        assert (weights == 0).all() == solved[key]
    assert live.update(rows, plugins={"mask": mask_all(False)}, settings=mini_batches).grad_norm == 0.0


def test_weights_per_token_land_on_the_right_tokens(live, stored):
    outcome = live.update(stored, plugins={"position": Decide(by_position)})
    lengths = set()
    for weights in outcome.of("rollout_is_weights").values():
        position = torch.arange(len(weights))
        assert weights.tolist() == torch.where(position % 3 == 2, 0.0, 1.0 + position).tolist()
        lengths.add(len(weights))
    assert len(lengths) > 1
    # The same factors on the advantages are another way into the same loss.
    scaled = live.update(stored, {"apply_to": "advantages"}, plugins={"position": Decide(by_position)})
    assert "rollout_is_weights" not in scaled.fields
    assert scaled.grad_norm == pytest.approx(outcome.grad_norm, rel=1e-5)
    assert scaled.grad_norm != pytest.approx(live.update(stored).grad_norm, rel=1e-2)


def test_the_built_in_token_method_weighs_each_token_by_its_probability(live, stored):
    block = {"mechanism": "reweight", "scorer": "token_prob", "actuator": "advantage_reweight", "normalize": "none"}
    outcome = live.update(stored, block, fields=("rollout_is_weights", "old_log_probs"))
    for key, weights in outcome.of("rollout_is_weights").items():
        expected = 0.5 * outcome.of("old_log_probs")[key].exp() + 0.5
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)


def test_warmup_step_delays_the_effect(live, stored):
    plain = live.update(stored).grad_norm
    # By reward, not by advantage: masking the smallest advantages may mask only rows without a gradient.
    block = {"mechanism": "select", "scorer": "reward_difficulty", "actuator": "topk_fraction", "warmup_step": 3}
    before = live.update(stored, block, step=2)
    assert before.grad_norm == plain
    assert "rollout_is_weights" not in before.fields
    after = live.update(stored, block, step=3)
    assert after.grad_norm != pytest.approx(plain, rel=1e-3)
    assert after.metrics["dataflex/kept_frac"] == 0.5


def test_shadow_mode_logs_decisions_and_touches_nothing(live, stored):
    stack = {"plugins": {"top": SELECT, "per": REWEIGHT}}
    plain = live.update(stored)
    shadow = live.update(stored, {**stack, "apply": False})
    applied = live.update(stored, stack)
    assert shadow.grad_norm == plain.grad_norm
    assert "rollout_is_weights" not in shadow.fields
    for key, value in plain.of("advantages").items():
        assert torch.equal(shadow.of("advantages")[key], value)
    ours = [name for name in applied.metrics if name.startswith("dataflex/")]
    decided = [name for name in ours if not name.endswith(("_s", "applied"))]
    assert decided and all(shadow.metrics[name] == applied.metrics[name] for name in decided)
    assert (shadow.metrics["dataflex/applied"], applied.metrics["dataflex/applied"]) == (0.0, 1.0)


def test_a_loss_that_ignores_weights_is_refused_and_takes_advantages(live, stored):
    loss = {
        "policy_loss.loss_mode": "bypass_mode",
        "policy_loss.rollout_correction": {"loss_type": "ppo_clip", "rollout_is": None, "rollout_rs": None},
    }
    with pytest.raises(ConfigError, match="bypass_mode.*apply_to=advantages"):
        live.update(stored, plugins={"mask": mask_all(False)}, loss=loss)
    fields, plugins = ("advantages", "returns"), {"mask": mask_all(False)}
    outcome = live.update(stored, {"apply_to": "advantages"}, plugins=plugins, loss=loss, fields=fields)
    plain = live.update(stored, loss=loss, fields=fields)
    assert outcome.grad_norm == 0.0
    assert plain.grad_norm > 0.0
    for key, returns in plain.of("returns").items():
        assert torch.equal(outcome.of("returns")[key], returns)
        assert not outcome.of("advantages")[key].any()


def test_update_scale_and_skip_update(live, stored):
    plain = live.update(stored).grad_norm
    half = live.update(stored, plugins={"scale": Decide(lambda batch: UpdateDecision(update_scale=0.5))})
    assert half.grad_norm == pytest.approx(0.5 * plain, rel=1e-4)
    skipped = live.update(stored, plugins={"skip": Decide(lambda batch: UpdateDecision(skip_update=True))})
    assert "actor/grad_norm" not in skipped.metrics
    assert skipped.metrics["dataflex/skip_update"] == 1.0
    # Not even momentum or decay moved the weights: the next update starts where this one did.
    assert live.update(stored, keep_weights=True).grad_norm == plain


def test_mask_scale_makes_up_for_the_masked_share(live, stored):
    select = {"mechanism": "select", "scorer": SELECT["scorer"], "actuator": SELECT["actuator"]}
    loss = {"loss_agg_mode": "seq-mean-token-mean"}
    masked = live.update(stored, select, loss=loss)
    scaled = live.update(stored, {**select, "mask_scale": "kept"}, loss=loss)
    assert masked.metrics["dataflex/kept_frac"] == 0.5
    assert scaled.grad_norm == pytest.approx(2 * masked.grad_norm, rel=1e-4)


def test_replaced_rewards_become_advantages(live, stored):
    fields = ("rm_scores", "advantages")
    outcome = live.update(stored, plugins={"length": ReplaceRewards()}, fields=fields)
    plain = live.update(stored, fields=fields)
    groups: dict[str, list[tuple[int, float]]] = {}
    for key, scores in outcome.of("rm_scores").items():
        assert float(scores.sum()) == len(scores)
        groups.setdefault(key.rsplit("_", 2)[0], []).append((len(scores), float(outcome.of("advantages")[key][0])))
    for rows in groups.values():
        lengths = torch.tensor([float(length) for length, _ in rows])
        expected = (lengths - lengths.mean()) / (lengths.std() + 1e-6)
        torch.testing.assert_close(torch.tensor([a for _, a in rows]), expected, rtol=1e-4, atol=1e-5)
    assert outcome.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)


def test_a_missing_field_is_named_with_what_is_there(live, stored):
    plugin = mask_all(True)
    plugin.requires = {"post_advantage": ("values",)}
    with pytest.raises(PluginError) as caught:
        live.update(stored, plugins={"hungry": plugin}, step=4)
    text = str(caught.value)
    assert all(part in text for part in ("hungry", "post_advantage", "step 4", "'values'", "advantages", "rm_scores"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_bad_weights_stop_the_run_and_name_the_plugin(live, stored, bad):
    with pytest.raises(PluginError, match="broken.*post_advantage"):
        live.update(stored, plugins={"broken": weigh_all(bad, "mean")})


def test_two_data_parallel_workers_decide_as_one(live, live_two_workers, stored):
    stack = {"plugins": {"top": SELECT, "per": REWEIGHT}}
    one, two = live.update(stored, stack), live_two_workers.update(stored, stack)
    weights = one.of("rollout_is_weights")
    for key, value in two.of("rollout_is_weights").items():
        torch.testing.assert_close(value, weights[key], rtol=1e-5, atol=0)
    assert {k for k, v in weights.items() if v.any()} == {k for k, v in two.of("rollout_is_weights").items() if v.any()}
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert live_two_workers.update(stored, plugins={"mask": mask_all(False)}).grad_norm == 0.0
