"""The published short form, verbatim, for each method; the estimator is among the user's own arguments."""

from __future__ import annotations

import pytest

OWN = ["data.train_files=train.parquet", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=5"]
PUBLISHED = """
trainer.v1.trainer_mode=dataflex_sync +dataflex.mechanism=select
+dataflex.scorer.name=group_solve_rate +dataflex.scorer.params.success_threshold=0.5
+dataflex.actuator.name=threshold_band +dataflex.actuator.params.low=0.2 +dataflex.actuator.params.high=0.8
+dataflex.warmup_step=0
"""
METHODS = {
    "difffilter": ("select", "group_solve_rate", "success_threshold=0.5", "threshold_band", "low=0.2 high=0.8"),
    "topk": ("select", "advantage_magnitude", "agg=mean", "topk_fraction", "fraction=0.5 largest=true"),
    "softmax": ("reweight", "advantage_magnitude", "agg=mean", "softmax", "temperature=1.0"),
    "per": ("reweight", "advantage_magnitude", "agg=sum", "per_advantage", "alpha=0.5"),
    "ar": ("reweight", "token_prob", "", "advantage_reweight", "alpha=0.5"),
    "reward": ("select", "reward_difficulty", "", "threshold_band", "low=0.0 high=1.0"),
}


def short_form(mechanism: str, scorer: str, scorer_params: str, actuator: str, actuator_params: str) -> list[str]:
    return [
        "trainer.v1.trainer_mode=dataflex_sync",
        f"+dataflex.mechanism={mechanism}",
        f"+dataflex.scorer.name={scorer}",
        *(f"+dataflex.scorer.params.{text}" for text in scorer_params.split()),
        f"+dataflex.actuator.name={actuator}",
        *(f"+dataflex.actuator.params.{text}" for text in actuator_params.split()),
        "+dataflex.warmup_step=0",
    ]


def test_the_form_below_is_the_published_one() -> None:
    assert sorted(short_form(*METHODS["difffilter"])) == sorted(PUBLISHED.split())


@pytest.mark.parametrize("mode", ["dataflex_sync", "dataflex_mix_sync"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_in_the_short_form(check_json, method, mode) -> None:
    mechanism, scorer, _, actuator, _ = METHODS[method]
    found = check_json(*OWN, *short_form(*METHODS[method]), f"trainer.v1.trainer_mode={mode}")
    (row,) = found["plan"]["plugins"]
    assert (row["plugin"], row["label"], row["scorer"], row["actuator"]) == (mechanism, mechanism, scorer, actuator)


def test_a_top_level_window_and_the_published_sampler_setting_are_accepted(check_json) -> None:
    sampler = (
        "+trainer.v1.sampler.custom_sampler={path:'pkg://dataflex_verl.replay_buffer',name:DataFlexMixReplayBuffer}"
    )
    found = check_json(*OWN, *short_form(*METHODS["topk"]), "+dataflex.window=50", sampler)
    assert found["ok"], found["problems"]
