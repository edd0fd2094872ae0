"""Demo reward: exact answers only, in verl's calling convention."""

from __future__ import annotations

import pytest

from dataflex_verl.demo.reward import compute_score


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("12", "12", 1.0),
        (" 12 ", "12", 1.0),
        ("12", 12, 1.0),
        ("1", "12", 0.0),
        ("012", "12", 0.0),
        ("12 13", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_score_is_one_for_the_exact_answer_only(solution: str, truth: object, expected: float) -> None:
    assert compute_score("add", solution, truth) == expected


def test_score_accepts_the_arguments_of_a_reward_manager() -> None:
    score = compute_score(
        data_source="sort", solution_str="358", ground_truth="358", extra_info={"index": 1}, reward_router_address=None
    )
    assert score == 1.0
    assert isinstance(score, float)
