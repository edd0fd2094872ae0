"""Floors and caps hold exactly, and shares stay shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflex_hooks.mixers.reward_gap import RewardGap
from dataflex_hooks.proportions import bound_problems, bounded, share_problems, shares_of, softmax

unit = st.floats(0, 1)


def some_bounds(raw_floor, raw_cap):
    floor = np.array(raw_floor) * (0.999 / max(1.0, sum(raw_floor)))
    cap = np.maximum(floor, np.array(raw_cap))
    return floor, cap / min(1.0, cap.sum()) if cap.sum() > 0 else np.ones(len(cap))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6).flatmap(lambda k: st.tuples(*(st.lists(unit, min_size=k, max_size=k) for _ in range(3)))))
def test_every_share_is_within_its_bounds_and_they_sum_to_one(given_lists):
    raw, raw_floor, raw_cap = given_lists
    if not sum(raw) > 1e-6:
        raw = [1.0] * len(raw)
    floor, cap = some_bounds(raw_floor, raw_cap)
    cap = np.minimum(1.0, np.maximum(cap, floor))
    if cap.sum() < 1:
        cap = np.ones(len(cap))
    result = bounded(np.array(raw) / sum(raw), floor, cap)
    assert result.sum() == pytest.approx(1, abs=1e-9)
    assert (result >= floor).all() and (result <= cap).all()


def test_a_floor_alone_is_the_formula_exactly():
    shares = softmax([0.0, 1.0, 2.0], 0.5)
    floor = np.full(3, 0.05)
    assert bounded(shares, floor, np.ones(3)).tolist() == (floor + (1 - floor.sum()) * shares).tolist()


def test_what_a_cap_cuts_off_goes_to_the_others_in_proportion():
    result = bounded(np.array([0.8, 0.15, 0.05]), np.zeros(3), np.array([0.5, 1.0, 1.0]))
    assert result == pytest.approx([0.5, 0.375, 0.125])
    result = bounded(np.array([1.0, 0.0, 0.0]), np.zeros(3), np.array([0.5, 1.0, 0.5]))
    assert result == pytest.approx([0.5, 0.5 * 2 / 3, 0.5 / 3])


def test_a_domain_has_a_floor_and_a_cap_of_its_own():
    mixer = RewardGap(temperature=0.1, floor={"a": 0.3}, cap={"b": 0.4}, domains=["a", "b", "c"])
    shares = mixer.act({"a": 1.0, "b": 0.0, "c": 0.5}, None)
    q = softmax([0.0, 1.0, 0.5], 0.1)
    assert q[1] > 0.9
    assert shares[1] == 0.4
    assert shares[0] >= 0.3
    level = (1 - 0.4 - 0.3) / (q[0] + q[2])
    assert shares == pytest.approx([0.3 + level * q[0], 0.4, level * q[2]])


@pytest.mark.parametrize(
    ("floor", "cap", "wrong"),
    [
        (0.4, 1.0, "floor: got 0.4; accepted: floors of 3 domains that sum to at most 1 (they sum to 1.2)"),
        (0.0, 0.3, "cap: got 0.3; accepted: caps of 3 domains that sum to at least 1 (they sum to 0.9)"),
        ({"a": 0.5}, {"a": 0.4}, "'0.5 above the cap 0.4 of domain 'a''"),
        ({"x": 0.1}, 1.0, "floor.x: got 0.1; accepted: one of a, b, c"),
    ],
)
def test_bounds_that_no_shares_can_have_are_named(floor, cap, wrong):
    problems = [str(problem).replace('"', "'") for problem in bound_problems(floor, cap, ("a", "b", "c"))]
    assert len(problems) == 1
    assert wrong in problems[0]


def test_a_third_of_the_floor_each_is_allowed():
    assert bound_problems(1 / 3, 1.0, ("a", "b", "c")) == []
    assert bounded(np.array([1.0, 0.0, 0.0]), np.full(3, 1 / 3), np.ones(3)) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    "given_shares",
    [[0.5, 0.5], [0.5, -0.1, 0.6], [float("nan"), 1, 1], [0, 0, 0], "abc", {"a": 1, "b": 1}, {"a": 1, "b": 1, "x": 1}],
)
def test_shares_that_cannot_be_are_refused(given_shares):
    assert len(share_problems("proportions", given_shares, ("a", "b", "c"))) == 1


def test_shares_are_taken_by_place_or_by_name_and_normalised():
    assert shares_of([9, 1], ("a", "b")).tolist() == [0.9, 0.1]
    assert shares_of({"b": 9, "a": 1}, ("a", "b")).tolist() == [0.1, 0.9]
    assert share_problems("proportions", {"b": 9, "a": 1}, ("a", "b")) == []
