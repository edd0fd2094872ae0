"""The tables of verl's losses and estimators against verl itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, open_dict

from dataflex_hooks import ConfigError
from dataflex_hooks.entries import GROUP_ESTIMATORS
from dataflex_verl.losses import (
    AGGREGATIONS,
    ESTIMATORS,
    LOSS_MODES,
    ConfiguredLoss,
    estimator_of,
    expect_loss,
    misspelled,
)

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def base() -> DictConfig:
    overrides = [f"{ACTOR}.strategy=fsdp2", "actor_rollout_ref.rollout.name=transformers"]
    overrides += [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "algorithm.adv_estimator=grpo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides)


def with_loss(base: DictConfig, mode: str, aggregation: str = "token-mean") -> DictConfig:
    config = base.copy()
    actor = config.actor_rollout_ref.actor
    with open_dict(config):
        actor.policy_loss.loss_mode, actor.loss_agg_mode = mode, aggregation
        if mode == "dro":
            actor.policy_loss.dro_beta = 0.1
        if mode == "bypass_mode":
            actor.policy_loss.rollout_correction = {"loss_type": "ppo_clip"}
    return config


@pytest.mark.parametrize("apply_to", ["weights", "advantages"])
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_the_table_agrees_with_the_probe_for_every_aggregation(base: DictConfig, mode: str, apply_to: str) -> None:
    from dataflex_verl.probe import probe

    for aggregation in AGGREGATIONS:
        config = with_loss(base, mode, aggregation)
        expected = ConfiguredLoss(mode, aggregation).expected(apply_to)
        found = probe(config, apply_to)
        if expected.ignored:  # what is ignored may or may not be additive: it is refused either way
            assert found.ignored and not found.per_response, aggregation
        else:
            assert found == expected, aggregation
        loss = ConfiguredLoss.of(config)
        probed = outcome(lambda loss=loss, found=found: loss.coefficients(found, apply_to))
        assert outcome(lambda config=config: expect_loss(config, apply_to)) == probed


def outcome(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except ConfigError as error:
        return str(error)


def test_the_names_are_those_of_verl() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    assert sorted(LOSS_MODES) == sorted(POLICY_LOSS_REGISTRY)
    assert sorted(ESTIMATORS) == sorted(ADV_ESTIMATOR_REGISTRY)
    assert set(ESTIMATORS) > GROUP_ESTIMATORS


def test_a_loss_of_the_users_own_is_left_to_the_probe(base: DictConfig) -> None:
    found = expect_loss(with_loss(base, "my_loss", "seq-mean-token-mean"))
    assert (found.kind, found.source) == (
        "sequence",
        "loss_mode=my_loss is not verl's own: the run asks it at the start",
    )


def test_everything_wrong_with_the_loss_comes_at_once(base: DictConfig) -> None:
    config = with_loss(base, "vanila", "token_mean")
    config.algorithm.use_pf_ppo = True
    with pytest.raises(ConfigError) as caught:
        expect_loss(config)
    assert [problem.setting for problem in caught.value.problems] == [
        "algorithm.use_pf_ppo",
        f"{ACTOR}.policy_loss.loss_mode",
        f"{ACTOR}.loss_agg_mode",
    ]
    assert [problem.hint for problem in caught.value.problems][1:] == [
        "did you mean 'vanilla'?",
        "did you mean 'token-mean'?",
    ]


@pytest.mark.parametrize(
    ("given", "meant"), [("grop", "grpo"), ("rlooo", "rloo"), ("grpo", None), ("grpo_v2", None), ("mine", None)]
)
def test_a_misspelled_estimator_is_told_from_one_of_the_users_own(base: DictConfig, given, meant) -> None:
    config = base.copy()
    config.algorithm.adv_estimator = given
    estimator, problems = estimator_of(config)
    assert estimator == (meant or given)
    assert [problem.hint for problem in problems] == ([f"did you mean {meant!r}?"] if meant else [])


def test_names_are_not_judged_where_other_modules_may_register_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    assert misspelled("grop", ESTIMATORS) is None
