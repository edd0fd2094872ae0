"""The loss probe, on verl's own loss functions and configuration."""

from __future__ import annotations

import pytest
import torch
from hydra import compose, initialize_config_module

from dataflex_hooks import ConfigError
from dataflex_verl.probe import check_loss, probe
from dataflex_verl.trainer import prepare

ACTOR = "actor_rollout_ref.actor"
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]


@pytest.fixture(scope="module")
def verl_config():
    pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")

    def make(mode: str = "vanilla", aggregation: str = "token-mean", *more: str):
        overrides = [
            f"{ACTOR}.strategy=fsdp2",
            "actor_rollout_ref.rollout.name=transformers",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            f"{ACTOR}.policy_loss.loss_mode={mode}",
            f"{ACTOR}.loss_agg_mode={aggregation}",
            *(["++" + f"{ACTOR}.policy_loss.dro_beta=0.1"] if mode == "dro" else []),
            *([f"+{ACTOR}.policy_loss.rollout_correction={{loss_type:ppo_clip}}"] if mode == "bypass_mode" else []),
            *GRPO,
            *more,
        ]
        return compose("ppo_trainer", overrides)

    with initialize_config_module("verl.trainer.config", version_base=None):
        yield make


@pytest.mark.parametrize(
    ("aggregation", "kind"),
    [
        ("token-mean", "token"),
        ("token-sum", "token"),
        ("seq-mean-token-sum", "token"),
        ("seq-mean-token-sum-norm", "token"),
        ("seq-mean-token-mean", "sequence"),
    ],
)
def test_vanilla_passes_under_every_aggregation(verl_config, aggregation, kind):
    found = check_loss(verl_config("vanilla", aggregation))
    assert (found.kind, found.per_token) == (kind, True)


@pytest.mark.parametrize("mode", ["gspo", "gpg", "cispo", "clip_cov", "kl_cov", "dro", "dppo_tv", "dppo_kl"])
def test_other_linear_losses_pass(verl_config, mode):
    assert check_loss(verl_config(mode)).per_token


def test_sapo_averages_per_response_whatever_is_configured(verl_config):
    assert check_loss(verl_config("sapo", "token-mean")).kind == "sequence"


def test_bypass_mode_ignores_weights_and_is_refused(verl_config):
    with pytest.raises(ConfigError, match=r"loss_mode: got 'bypass_mode'.*dataflex.apply_to=advantages"):
        check_loss(verl_config("bypass_mode"))
    assert check_loss(verl_config("bypass_mode"), "advantages").per_token


def test_geo_mean_is_refused_for_decisions_per_token_only(verl_config):
    config = verl_config("geo_mean", "token-mean", "+dataflex.mechanism=reweight")
    found = check_loss(config)
    assert (found.kind, found.per_token) == ("sequence", False)
    pairs = {
        "advantage_magnitude/softmax": True,
        "token_prob/advantage_reweight": False,
    }
    for pair, accepted in pairs.items():
        scorer, actuator = pair.split("/")
        config = verl_config(
            "geo_mean",
            "token-mean",
            "+dataflex.mechanism=reweight",
            f"+dataflex.scorer.name={scorer}",
            f"+dataflex.actuator.name={actuator}",
        )
        if accepted:
            prepare(config)
        else:
            with pytest.raises(ConfigError, match="dataflex.actuator.name: got 'advantage_reweight'.*geo_mean"):
                prepare(config)


@pytest.mark.parametrize("mode", ["kl_cov", "clip_cov", "dro"])
def test_losses_that_are_not_linear_in_the_advantage_refuse_the_way_out(verl_config, mode):
    with pytest.raises(ConfigError, match=rf"loss_mode: got '{mode}'.*dataflex.apply_to=weights"):
        check_loss(verl_config(mode), "advantages")


def test_vanilla_is_linear_in_the_advantage(verl_config):
    assert check_loss(verl_config(), "advantages").per_token


def test_pf_ppo_is_refused(verl_config):
    with pytest.raises(ConfigError, match="algorithm.use_pf_ppo: got True"):
        check_loss(verl_config("vanilla", "token-mean", "algorithm.use_pf_ppo=True"))


def test_the_probe_leaves_the_random_state_alone(verl_config):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    probe(verl_config("clip_cov"))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_problem_of_block_and_loss_comes_at_once(verl_config):
    config = verl_config(
        "bypass_mode",
        "token-mean",
        "+dataflex.mechanism=select",
        "+dataflex.scorer.name=group_solve_rat",
        "+dataflex.actuator.name=threshold_band",
        "+dataflex.actuator.params.low=0.9",
        "+dataflex.actuator.params.high=0.2",
    )
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    text = str(caught.value)
    assert "did you mean 'group_solve_rate'" in text and "low" in text and "bypass_mode" in text


def test_without_plugins_no_loss_is_refused(verl_config):
    hooks, _ = prepare(verl_config("bypass_mode"))
    assert hooks.labels == ()
