"""Realised counts stay close to the proportions asked for, whatever these do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflex_verl.credits import Credits

shares = st.lists(st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]) | st.floats(0, 1), min_size=8, max_size=8).filter(
    lambda values: sum(values) > 1e-6
)


@settings(max_examples=60, deadline=None)
@given(k=st.integers(1, 8), changes=st.lists(st.tuples(shares, st.integers(1, 40)), min_size=1, max_size=25))
def test_counts_stay_within_k_prompts_of_the_target_at_every_prompt(k, changes):
    credits = Credits(np.full(k, 1 / k))
    target, counts = np.zeros(k), np.zeros(k)
    for proportions, prompts in changes:
        asked = np.array(proportions[:k])
        if not asked.sum() > 1e-6:
            continue
        credits.set(asked)
        for _ in range(prompts):
            index = credits.next(1)[0]
            target += asked / asked.sum()
            counts[index] += 1
            assert (np.abs(counts - target) < k).all()
            assert asked[index] > 0
    assert counts.tolist() == credits.counts.tolist()
    assert credits.deficit == pytest.approx(target - counts, abs=1e-9)


def test_a_hard_sequence_of_proportions_stays_within_k():
    """Only domains that are behind get a share, the hardest case for choosing the largest credit."""
    k = 16
    credits = Credits(np.full(k, 1 / k))
    for _ in range(3000):
        order = np.argsort(credits.deficit)
        asked = np.zeros(k)
        asked[order[: max(2, k // 2)]] = 1.0
        credits.set(asked)
        credits.next(1)
        assert np.abs(credits.deficit).max() < k


def test_constant_proportions_stay_within_one_prompt():
    credits = Credits(np.array([0.7, 0.2, 0.1]))
    for _ in range(500):
        credits.next(1)
        assert np.abs(credits.deficit).max() < 1


def test_the_next_prompt_follows_new_proportions():
    credits = Credits(np.array([1.0, 0.0]))
    assert credits.next(7) == [0] * 7
    credits.set(np.array([0.0, 1.0]))
    assert credits.next(3) == [1] * 3


def test_a_batch_equals_single_prompts():
    one, many = Credits(np.array([0.55, 0.25, 0.2])), Credits(np.array([0.55, 0.25, 0.2]))
    assert [one.next(1)[0] for _ in range(64)] == many.next(40) + many.next(24)


def test_looking_ahead_counts_nothing():
    credits = Credits(np.array([0.5, 0.3, 0.2]))
    ahead = credits.ahead(20)
    assert credits.counts.sum() == 0
    assert credits.next(20) == ahead


@pytest.mark.parametrize("wrong", [[0.5], [0.5, -0.1, 0.6], [float("nan"), 0.5, 0.5], [0.0, 0.0, 0.0]])
def test_proportions_that_cannot_be_are_refused(wrong):
    credits = Credits(np.full(3, 1 / 3))
    with pytest.raises(ValueError, match="proportions"):
        credits.set(np.array(wrong))
    assert credits.proportions == pytest.approx([1 / 3] * 3)


def test_a_saved_state_goes_on_bit_for_bit():
    credits = Credits(np.array([0.1, 0.2, 0.7]))
    credits.next(333)
    again = Credits(np.full(3, 1 / 3))
    again.load_state_dict(credits.state_dict())
    assert again.next(500) == credits.next(500)
    assert again.deficit.tolist() == credits.deficit.tolist()
