"""Runs of a comparison, read from folders as verl leaves them, and what they come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflex_verl.analysis.comparison import Comparison, compare_outcomes
from dataflex_verl.analysis.comparison_data import as_data
from dataflex_verl.analysis.comparison_text import markdown
from dataflex_verl.analysis.outcomes import OVERALL, REWARD, RunOutcome, read_outcome
from dataflex_verl.analysis.statistics import smallest_detectable
from dataflex_verl.analysis.verdicts import verdict
from tests.unit.analysis.conftest import Write, metrics_of

STEPS = 4


def score(arm: str, seed: int, gain: float = 0.1) -> dict[str, float]:
    """Validation of a fake run: the seed moves both arms, and the arm's gain a little."""
    base = 0.3 + 0.05 * seed
    return {"add": base + (gain + 0.01 * seed if arm != "none" else 0.0), "sort": base}


def evaluate(tmp_path: Path, arms: list[str], seeds: list[int], steps: int = STEPS, **given) -> Comparison:
    runs = [read_outcome(arm, seed, tmp_path / f"{arm}/seed-{seed}", steps) for seed in seeds for arm in arms]
    return compare_outcomes(runs, arms, steps, **given)


def write_all(write_run: Write, arms: list[str], seeds: list[int], gain: float = 0.1) -> None:
    for arm in arms:
        for seed in seeds:
            records = metrics_of(STEPS, score(arm, seed, gain), reward=0.5 + 0.1 * (arm != "none"))
            write_run(f"{arm}/seed-{seed}", records)


def test_means_and_paired_differences_are_those_worked_out_by_hand(write_run: Write, tmp_path: Path) -> None:
    write_all(write_run, ["none", "per"], [0, 1, 2])
    found = evaluate(tmp_path, ["none", "per"], [0, 1, 2])
    none, per = found.arms
    assert found.outcomes == (OVERALL, "validation, add", "validation, sort", REWARD)
    assert none.means[OVERALL] == pytest.approx(0.35) and per.means[OVERALL] == pytest.approx(0.35 + 0.055)
    # A gain of 0.10, 0.11, 0.12 in one of two domains.
    assert per.against[OVERALL].differences == pytest.approx((0.05, 0.055, 0.06))
    difference = per.against[OVERALL].difference
    assert difference.mean == pytest.approx(0.055) and difference.se == pytest.approx(0.005 / 3**0.5)
    assert per.against["validation, sort"].difference.exact
    # Steps 3 and 4 of four.
    assert none.means[REWARD] == pytest.approx(0.535)
    assert per.against[OVERALL].adjusted == pytest.approx(difference.p)
    assert verdict(found, per) == (
        "per ends 0.055 higher than none in validation, all domains (95 % interval +0.043 to +0.067, 3 seeds): "
        "more than chance explains (adjusted p = 0.003)."
    )


def test_seconds_tokens_and_rollouts_are_reported(write_run: Write, tmp_path: Path) -> None:
    write_all(write_run, ["none", "per"], [0])
    found = evaluate(tmp_path, ["none", "per"], [0], rollouts=96)
    assert (found.runs[0].tokens, found.runs[0].step_seconds) == (400.0, 8.0)
    text = markdown(found, {"verl": "0.9.1"})
    assert text.startswith("# 1 arm against none\n") and "96 generated rollouts" in text


def test_an_effect_lost_in_noise_is_said_to_be_none_with_what_could_be_detected(
    write_run: Write, tmp_path: Path
) -> None:
    for seed, gain in enumerate((0.1, -0.1, 0.02)):
        write_run(f"none/seed-{seed}", metrics_of(STEPS, {"add": 0.4}))
        write_run(f"per/seed-{seed}", metrics_of(STEPS, {"add": 0.4 + gain}))
    found = evaluate(tmp_path, ["none", "per"], [0, 1, 2])
    text = verdict(found, found.arms[1])
    assert "no effect shown" in text and "more than chance" not in text
    detectable = found.arms[1].against[OVERALL].difference.detectable
    # sd 0.1007 of three pairs.
    assert detectable == pytest.approx(0.1007 * 3.264, rel=0.01)
    assert f"a true difference of {detectable:.3f} four times in five" in text


def test_what_several_arms_can_detect_is_up_to_the_adjusted_test(write_run: Write, tmp_path: Path) -> None:
    gains = {"none": (0.0, 0.0), "gfpo": (-0.0625, -0.0677), "per": (0.01, -0.02), "topk": (0.01, -0.01)}
    for arm, of_seeds in gains.items():
        for seed, gain in enumerate(of_seeds):
            write_run(f"{arm}/seed-{seed}", metrics_of(STEPS, {"add": 0.5 + gain}))
    found = evaluate(tmp_path, list(gains), [0, 1])
    gfpo, per, topk = (verdict(found, arm) for arm in found.arms[1:])
    against = found.arms[1].against[OVERALL]
    assert against.difference.p < 0.05 < against.adjusted and against.difference.high < 0
    assert "no effect shown" in gfpo and "leaves 0 out, but of 3 such intervals" in gfpo
    assert "leaves 0 out" not in per and "among 3 arms four times in five" in per
    assert against.difference.detectable == pytest.approx(
        smallest_detectable(against.difference.sd, 2, alpha=0.05 / 3), rel=1e-9
    )
    # What was measured and not called an effect is not called detectable either.
    assert abs(against.difference.mean) < against.difference.detectable
    assert "topk ends as high as none" in topk and "| topk | 2 of 2 | 0.500 | 0.000 ±" in markdown(found, {})
    assert markdown(found, {}).startswith("# 3 arms against none\n")


def test_small_figures_keep_a_digit(write_run: Write, tmp_path: Path) -> None:
    for seed, gain in enumerate((1e-5, 1.2e-5, 1.1e-5)):
        write_run(f"none/seed-{seed}", metrics_of(STEPS, {"add": 2e-5}))
        write_run(f"per/seed-{seed}", metrics_of(STEPS, {"add": 2e-5 + gain}))
    found = evaluate(tmp_path, ["none", "per"], [0, 1, 2])
    text = verdict(found, found.arms[1])
    assert text.startswith("per ends 1.1e-05 higher than none") and "0.000" not in text


def test_an_arm_equal_to_the_baseline_is_said_to_be_with_a_difference_of_exactly_zero(
    write_run: Write, tmp_path: Path
) -> None:
    write_all(write_run, ["none", "again"], [0, 1], gain=-0.0)
    for seed in (0, 1):
        write_run(f"again/seed-{seed}", metrics_of(STEPS, score("none", seed)))
    found = evaluate(tmp_path, ["none", "again"], [0, 1], alike=[("none", "again")])
    again = found.arms[1]
    assert again.against[OVERALL].differences == (0.0, 0.0) and again.same == (0, 1)
    assert again.against[OVERALL].adjusted is None
    assert "every step's reward and gradient norm are the same, and the difference is exactly 0" in verdict(
        found, again
    )
    assert len(found.notes) == 2 and "gradient norms of all 4 steps are equal" in found.notes[0]


def test_equal_settings_whose_runs_differ_are_said_to_differ_and_from_where(write_run: Write, tmp_path: Path) -> None:
    write_run("none/seed-0", metrics_of(STEPS))
    records = metrics_of(STEPS)
    records[3]["data"]["actor/grad_norm"] += 1e-12
    write_run("again/seed-0", records)
    found = evaluate(tmp_path, ["none", "again"], [0], alike=[("none", "again")])
    assert found.arms[1].same == ()
    assert "their runs differ from step 3 on: training is not deterministic here" in found.notes[0]
    assert "every step" not in verdict(found, found.arms[1])


def test_one_seed_gives_a_difference_and_no_interval(write_run: Write, tmp_path: Path) -> None:
    write_all(write_run, ["none", "per"], [1])
    found = evaluate(tmp_path, ["none", "per"], [1])
    assert verdict(found, found.arms[1]).endswith("under one seed: how much of that is chance cannot be said.")
    row = next(line for line in markdown(found, {}).splitlines() if line.startswith("| per | 1 of 1"))
    assert row == "| per | 1 of 1 | 0.405 | +0.055 | — | — | — |"


def bad_runs(write_run: Write) -> dict[str, str]:
    """Ways in which seed 1 of an arm does not count, and what is said of it."""
    good = metrics_of(STEPS, score("per", 1))
    return {
        "cut": ("ended at step 3 of 4", lambda: write_run("per/seed-1", good, cut=10)),
        "short": ("ended at step 2 of 4", lambda: write_run("per/seed-1", metrics_of(2, score("per", 1)))),
        "long": ("ended at step 5 of 4", lambda: write_run("per/seed-1", metrics_of(5, score("per", 1)))),
        "hole": ("logged 3 of 4 steps", lambda: write_run("per/seed-1", [*good[:2], *good[3:]])),
        "empty": ("the file is empty", lambda: write_run("per/seed-1", [])),
        "absent": ("missing: no run yet", lambda: None),
        "no_validation": ("nothing of validation at step 4", lambda: write_run("per/seed-1", metrics_of(STEPS, {}))),
        "other_domains": ("validated otherwise", lambda: write_run("per/seed-1", metrics_of(STEPS, {"add": 0.9}))),
        "other_samples": (
            "validated otherwise",
            lambda: write_run("per/seed-1", json.loads(json.dumps(good).replace("mean@2", "mean@8"))),
        ),
    }


@pytest.mark.parametrize("kind", list(bad_runs(lambda *given: None)))
def test_a_run_that_does_not_count_is_a_marked_gap_and_the_rest_is_evaluated(
    write_run: Write, tmp_path: Path, kind: str
) -> None:
    write_all(write_run, ["none"], [0, 1, 2])
    write_all(write_run, ["per"], [0, 2])
    reason, make = bad_runs(write_run)[kind]
    make()
    found = evaluate(tmp_path, ["none", "per"], [0, 1, 2])
    per = found.arms[1]
    assert per.against[OVERALL].seeds == (0, 2)
    assert per.against[OVERALL].differences == pytest.approx((0.05, 0.06))
    assert per.means[OVERALL] == pytest.approx((0.35 + 0.46) / 2)
    assert any(gap.startswith("seed 1: ") and reason in gap for gap in per.gaps), per.gaps
    assert "Without seed 1" in verdict(found, per)
    assert reason in markdown(found, {})


def test_without_any_pair_nothing_is_said(write_run: Write, tmp_path: Path) -> None:
    write_all(write_run, ["none"], [0])
    write_all(write_run, ["per"], [1])
    found = evaluate(tmp_path, ["none", "per"], [0, 1])
    assert found.arms[1].against[OVERALL].difference is None
    assert "nothing can be said" in verdict(found, found.arms[1])


def test_an_arm_whose_seeds_followed_different_plans_is_left_out(write_run: Write, tmp_path: Path) -> None:
    write_all(write_run, ["none", "per", "topk"], [0, 1])
    for arm, seed, line in (("per", 0, "alpha .5"), ("per", 1, "alpha .7"), ("topk", 0, "k"), ("topk", 1, "k")):
        write_run(f"{arm}/seed-{seed}", metrics_of(STEPS, score(arm, seed)), plan=[line])
    found = evaluate(tmp_path, ["none", "per", "topk"], [0, 1])
    _, per, topk = found.arms
    assert per.means == {} and "different plans (seed 0 and seed 1)" in per.gaps[0]
    assert topk.against[OVERALL].seeds == (0, 1)


def test_a_failed_run_counts_nowhere(write_run: Write, tmp_path: Path) -> None:
    write_all(write_run, ["none", "per"], [0, 1])
    runs = [
        read_outcome(arm, seed, tmp_path / f"{arm}/seed-{seed}", STEPS) for seed in (0, 1) for arm in ("none", "per")
    ]
    runs[3] = RunOutcome("per", 1, "failed", "after step 3: ValueError: it broke")
    found = compare_outcomes(runs, ["none", "per"], STEPS)
    assert found.arms[1].runs == 1 and found.arms[1].against[OVERALL].seeds == (0,)
    assert "failed: after step 3: ValueError: it broke" in markdown(found, {})


def test_a_metric_asked_for_takes_the_place_of_validation(write_run: Write, tmp_path: Path) -> None:
    write_all(write_run, ["none", "per"], [0, 1])
    runs = [
        read_outcome(arm, seed, tmp_path / f"{arm}/seed-{seed}", STEPS, "critic/score/mean")
        for seed in (0, 1)
        for arm in ("none", "per")
    ]
    found = compare_outcomes(runs, ["none", "per"], STEPS, metric="critic/score/mean")
    assert found.main == "critic/score/mean"
    assert found.arms[1].against[found.main].differences == pytest.approx((0.1, 0.1))
    assert "the same amount under all 2 seeds" in verdict(found, found.arms[1])


def test_twelve_seeds_show_the_bootstrap_with_its_coverage(write_run: Write, tmp_path: Path) -> None:
    seeds = list(range(12))
    write_all(write_run, ["none", "per"], seeds)
    text = markdown(evaluate(tmp_path, ["none", "per"], seeds), {})
    assert "Bootstrap (BCa) for per: +0.0" in text and "% of 2,000 simulated samples of 12" in text
    assert "Bootstrap" not in markdown(evaluate(tmp_path, ["none", "per"], seeds[:9]), {})


def test_p_values_are_adjusted_over_the_arms(write_run: Write, tmp_path: Path) -> None:
    arms = ["none", "per", "topk", "ar"]
    write_all(write_run, arms, [0, 1, 2])
    found = evaluate(tmp_path, arms, [0, 1, 2])
    one = found.arms[1].against[OVERALL]
    assert one.adjusted == pytest.approx(3 * one.difference.p)


def test_results_are_plain_json(write_run: Write, tmp_path: Path) -> None:
    write_all(write_run, ["none", "per"], [0, 1])
    data = json.loads(json.dumps(as_data(evaluate(tmp_path, ["none", "per"], [0, 1])), allow_nan=False))
    assert data["arms"][1]["against"][OVERALL]["difference"]["n"] == 2
    assert data["runs"][0]["values"][OVERALL] == pytest.approx(0.3)
    assert "log" not in data["runs"][0]
