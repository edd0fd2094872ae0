"""Which responses are scored, with what, and what becomes of the others."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from dataflex_two_stage_reward import TwoStageReward

from dataflex_hooks import ConfigError
from dataflex_hooks.testing import (
    HookRunner,
    Row,
    assert_plugin_contract,
    make_batch,
    make_groups,
    run_hooks,
    take_rows,
)

MODEL = {"reward_model": {"ground_truth": "42", "style": "rule"}, "extra_info": {"index": 3}}


class Numbers:
    """A tokenizer whose text is the token ids."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(map(str, tokens))


class Judge:
    """Scores a response by its first token; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> float:
        self.asked.append(given)
        return int(given["solution_str"].split()[0]) / 1000


def groups(*rewards: list[float], **more: Any) -> Any:
    return make_groups(*rewards, columns=MODEL, **more)


def two_stage(function: Any = None, **parameters: Any) -> TwoStageReward:
    return TwoStageReward(function or Judge(), **{"k": 2, "tokenizer": Numbers(), **parameters})


def test_the_best_of_each_group_get_the_expensive_reward_and_the_others_leave():
    judge = Judge()
    outcome = run_hooks(two_stage(judge), groups([0.1, 0.9, 0.5, 0.7], [3, 1, 2, 0]))
    assert outcome.in_batch.tolist() == [False, True, False, True, True, False, True, False]
    scored = {1: 1.1, 3: 3.1, 4: 0.107, 6: 2.107}
    assert {row: round(float(outcome.rewards[row]), 4) for row in scored} == scored
    assert len(judge.asked) == 4
    decision = outcome.decisions["plugin"]["post_reward"]
    assert (decision.advantages, decision.reason) == ("kept", "unscored")
    metrics = {name.removeprefix("dataflex/plugin/"): value for name, value in outcome.metrics.items()}
    assert (metrics["calls_total"], metrics["saved_calls_total"], metrics["scored_frac"]) == (4, 4, 0.5)
    assert metrics["cheap_mean"] == pytest.approx((0.9 + 0.7 + 3 + 2) / 4)
    assert metrics["expensive_mean"] == pytest.approx(sum(scored.values()) / 4)


def test_an_unscored_response_counts_as_the_mean_of_its_group_and_never_with_its_cheap_reward():
    batch = groups([0.1, 0.9, 0.5, 0.7], [50, 1, 2, 60])
    rewards = run_hooks(two_stage(), batch).rewards
    assert rewards[:4].tolist() == pytest.approx([2.1, 1.1, 2.1, 3.1])
    assert rewards[4:].tolist() == pytest.approx([0.107, 1.607, 1.607, 3.107])


def test_a_group_of_at_most_k_is_scored_whole():
    outcome = run_hooks(two_stage(k=3), groups([1, 0], [1], [1, 0, 2, 3]))
    assert outcome.in_batch.tolist() == [True, True, True, True, False, True, True]
    assert run_hooks(two_stage(k=9), groups([1, 0], [1, 0, 2, 3])).in_batch.all()


def test_ties_are_broken_by_content_wherever_rows_stand():
    batch = groups([1, 1, 1, 1, 0], [0, 2, 2, 2, 2])
    order = torch.tensor([7, 2, 9, 0, 4, 1, 8, 3, 6, 5])
    straight = run_hooks(two_stage(), batch)
    shuffled = run_hooks(two_stage(), take_rows(batch, order))
    assert straight.in_batch.sum() == 4
    assert torch.equal(straight.in_batch[order], shuffled.in_batch)
    assert torch.equal(straight.rewards[order], shuffled.rewards)


def test_all_outputs_of_a_rollout_share_its_fate_and_the_last_is_judged():
    rows = [Row("a", 0, 0, reward=1), Row("a", 0, 1, reward=1), Row("a", 1, reward=2), Row("a", 2, reward=0)]
    judge = Judge()
    outcome = run_hooks(two_stage(judge), make_batch(rows, columns={name: [MODEL[name]] * 4 for name in MODEL}))
    assert outcome.in_batch.tolist() == [True, True, True, False]
    assert sorted(asked["solution_str"] for asked in judge.asked) == ["110 111", "1100 1101"]
    assert outcome.rewards.tolist() == pytest.approx([0.11, 0.11, 1.1, 0.605])


def test_the_function_gets_what_verls_reward_functions_get_and_the_prompt():
    judge = Judge()
    run_hooks(two_stage(judge, params={"model": "large"}), groups([1, 0], lengths=3, domains="code"))
    assert judge.asked[0] == {
        "data_source": "code",
        "solution_str": "100 101 102",
        "ground_truth": "42",
        "extra_info": {"index": 3},
        "prompt_str": "100 5",
        "model": "large",
    }


def test_a_function_gets_only_what_it_takes_and_only_that_is_required():
    def short(solution_str: str, scale: float = 2.0) -> dict[str, float]:
        return {"score": scale * int(solution_str.split()[-1]), "length": 3}

    plugin = two_stage(short, params={"scale": 10})
    assert plugin.requires == {"post_reward": ("prompts", "responses", "rm_scores")}
    assert run_hooks(plugin, make_groups([1, 0], lengths=1)).rewards.tolist() == [1000, 11000]
    assert two_stage(lambda data_source: 1.0, tokenizer=None).requires["post_reward"][0] == "data_source"


def test_a_function_is_found_in_a_module_and_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "judge_of_test.py").write_text("def score(solution_str):\n    return 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("judge_of_test:score", "judge_of_test.py:score", f"{tmp_path}/judge_of_test.py:score"):
        assert run_hooks(two_stage(name), make_groups([1, 0])).rewards.tolist() == [7, 7]
    sys.modules.pop("judge_of_test")


@pytest.mark.parametrize(
    ("parameters", "setting", "accepted"),
    [
        ({"k": 1}, "k", "an integer >= 2"),
        ({"function": "judge"}, "function", "module:function"),
        ({"function": "not_there_at_all:score"}, "function", "No module named 'not_there_at_all'"),
        ({"function": "not_there.py:score"}, "function", "no file not_there.py"),
        ({"function": "json:scores"}, "function", "no attribute 'scores'"),
        ({"function": "string:digits"}, "function", "digits is a str"),
        ({"function": "operator:truediv"}, "function", "a function that needs no keywords but"),
        ({"function": lambda a, solution_str: 1}, "function", "those in params"),
        ({"function": lambda solution_str: 1, "params": {"b": 1}}, "params.b", "keywords that"),
        ({"params": {"solution_str": 1}}, "params.solution_str", "brings itself"),
        ({"params": 3}, "params", "a mapping of keywords"),
        ({"concurrency": 0}, "concurrency", "an integer >= 1"),
        ({"timeout": 0}, "timeout", "> 0"),
        ({"retries": -1}, "retries", "an integer >= 0"),
        ({"on_failure": "dorp"}, "on_failure", "one of drop, raise"),
        ({"cache": -1}, "cache", "an integer >= 0"),
        ({"tokenizer": None}, "tokenizer", "where a tokenizer lies"),
    ],
)
def test_bad_parameters_are_refused_by_name(parameters, setting, accepted):
    given = dict(parameters)
    with pytest.raises(ConfigError) as caught:
        two_stage(given.pop("function", None), **given)
    (problem,) = caught.value.problems
    assert problem.setting == setting
    assert accepted in str(problem)


def test_equal_responses_are_scored_once_and_those_of_earlier_steps_not_at_all():
    judge = Judge()
    rows = [Row("a", 0, tokens=(7, 8)), Row("a", 1, tokens=(7, 8)), Row("a", 2, tokens=(9, 9), reward=1)]
    batch = make_batch(rows, columns={name: [MODEL[name]] * 3 for name in MODEL})
    runner = HookRunner({"judge": two_stage(judge, k=3)})
    first, second = runner.step(batch), runner.step(batch)
    assert len(judge.asked) == 2
    assert torch.equal(first.rewards, second.rewards)
    counted = ("calls_total", "cache_hits_total", "saved_calls_total")
    assert [first.metrics[f"dataflex/judge/{name}"] for name in counted] == [2, 0, 1]
    assert [second.metrics[f"dataflex/judge/{name}"] for name in counted] == [0, 3, 3]

    without = HookRunner({"judge": two_stage(again := Judge(), k=3, cache=0)})
    without.step(batch), without.step(batch)
    assert len(again.asked) == 4


def test_the_cache_forgets_what_was_not_asked_for_longest():
    runner = HookRunner({"judge": two_stage(judge := Judge(), cache=4)})
    one, other = groups([1, 0]), make_groups([1, 0], [1, 0], columns=MODEL)
    runner.step(one), runner.step(other), runner.step(other)
    assert len(judge.asked) == 4
    third = make_batch(
        [Row("x", s, tokens=(s, 4), prompt=(1,)) for s in (1, 2)], columns={name: [MODEL[name]] * 2 for name in MODEL}
    )
    runner.step(one), runner.step(third), runner.step(one)
    assert len(judge.asked) == 6
    runner.step(other)
    assert len(judge.asked) == 8


def test_equal_prompts_with_other_answers_are_scored_each():
    def judge(solution_str: str, ground_truth: str) -> float:
        return float(ground_truth)

    rows = [Row(uid, s, tokens=(7, 8 + s), prompt=(1,)) for uid in "ab" for s in (0, 1)]
    answers = [{"ground_truth": answer} for answer in ("1", "1", "2", "2")]
    runner = HookRunner({"judge": two_stage(judge)})
    first = runner.step(make_batch(rows, columns={"reward_model": answers}))
    assert first.rewards.tolist() == [1, 1, 2, 2]
    assert first.metrics["dataflex/judge/calls_total"] == 4
    # The same answers in the other order of keys and of rows cost nothing.
    swapped = make_batch(rows, columns={"reward_model": [{"style": "x", **answer} for answer in answers[::-1]]})
    assert runner.step(swapped).rewards.tolist() == [2, 2, 1, 1]
    again = make_batch(rows, columns={"reward_model": [{**answer, "style": "x"} for answer in answers[::-1]]})
    second = runner.step(again)
    assert second.rewards.tolist() == [2, 2, 1, 1] and second.metrics["dataflex/judge/calls_total"] == 0


def test_scores_of_other_params_are_forgotten():
    def judge(solution_str: str, scale: float) -> float:
        return scale

    first = two_stage(judge, params={"scale": 1.0})
    run_hooks(first, groups([1, 0]))
    for scale in (1.0, 5.0):
        resumed = two_stage(judge, params={"scale": scale})
        resumed.load_state_dict(first.state_dict())
        outcome = run_hooks(resumed, groups([1, 0]))
        assert outcome.rewards.tolist() == [scale, scale]
        assert outcome.metrics["dataflex/plugin/calls_total"] == (0 if scale == 1.0 else 2)


def test_the_plan_says_that_rows_are_dropped():
    (row,) = HookRunner({"judge": two_stage()}).hooks.plan()
    assert (row["effect"], row["advantages"]) == ("drop", "kept")


def test_scores_survive_a_checkpoint_unless_the_function_is_another():
    batch, judge = groups([1, 0, 2]), Judge()
    first = two_stage(judge)
    rewards = run_hooks(first, batch).rewards
    resumed = two_stage(later := Judge())
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(run_hooks(resumed, batch).rewards, rewards)
    assert not later.asked
    other = two_stage(lambda solution_str: 5.0)
    other.load_state_dict(first.state_dict())
    assert run_hooks(other, batch).rewards.tolist() == [5, 5, 5]


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
def test_it_keeps_the_contract_of_a_plugin(on_failure):
    def judge(solution_str: str) -> float:
        value = sum(map(int, solution_str.split())) % 11
        if value == 7 and on_failure == "drop":
            raise ValueError("no verdict")
        return value / 4

    assert_plugin_contract(lambda: two_stage(judge, on_failure=on_failure, retries=0))
