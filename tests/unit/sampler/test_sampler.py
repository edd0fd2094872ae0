"""The sampler: proportions reach the prompts, admission, and exact resume."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflex_hooks import ConfigError, DataFlexError
from dataflex_verl.sampler import DomainSampler


def counts(draws, k):
    return np.bincount([index for draw in draws for index in draw.domains], minlength=k).tolist()


def test_shares_follow_the_proportions_and_not_the_dataset(rows_of):
    sampler = DomainSampler(rows_of([50, 50]), proportions=np.array([0.9, 0.1]))
    for step in range(1, 31):
        sampler.draw(16)
        assert np.abs(sampler.counts - 16 * step * np.array([0.9, 0.1])).max() < 2


def test_without_proportions_domains_have_their_share_of_the_rows(rows_of):
    sampler = DomainSampler(rows_of([30, 10]))
    assert counts([sampler.draw(40)], 2) == [30, 10]
    assert sampler.passes.tolist() == [1.0, 1.0]


def test_a_small_domain_wraps_alone(rows_of):
    sampler = DomainSampler(rows_of([4, 100]), proportions=np.array([0.5, 0.5]))
    rows = [row for _ in range(4) for row in sampler.draw(8).rows if row < 4]
    assert [sorted(rows[start : start + 4]) for start in range(0, 16, 4)] == [[0, 1, 2, 3]] * 4
    assert sampler.passes.tolist() == [4.0, 0.16]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5), fetches=st.lists(st.integers(1, 9), max_size=8))
def test_fetch_size_does_not_change_which_prompts_come(rows_of, sizes, fetches):
    batched, single = DomainSampler(rows_of(sizes), seed=3), DomainSampler(rows_of(sizes), seed=3)
    together = [row for size in fetches for row in batched.draw(size).rows]
    assert [single.draw(1).rows[0] for _ in together] == together


@settings(max_examples=50, deadline=None)
@given(
    before=st.integers(0, 60),
    after=st.integers(1, 40),
    shares=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    admission=st.booleans(),
)
def test_a_saved_state_draws_the_same_prompts(rows_of, before, after, shares, admission):
    def admit(candidates):
        return candidates.dataset_rows % 3 > 0, -candidates.dataset_rows.astype(float)

    def build(seed):
        return DomainSampler(rows_of([5, 9, 20]), seed=seed, admit=admit if admission else None, with_priority=True)

    one = build(11)
    if before:
        one.draw(before)
    one.set_proportions(np.array(shares))
    one.draw(2)
    other = build(0)
    other.load_state_dict(one.state_dict())
    assert [other.draw(3) for _ in range(after)] == [one.draw(3) for _ in range(after)]
    assert other.credits.deficit.tolist() == one.credits.deficit.tolist()
    assert other.drawn.tolist() == one.drawn.tolist()


def test_new_proportions_govern_the_very_next_prompt(rows_of):
    sampler = DomainSampler(rows_of([50, 50]), proportions=np.array([1.0, 0.0]))
    assert sampler.draw(5).domains == [0] * 5
    sampler.set_proportions(np.array([0.0, 1.0]))
    assert sampler.draw(1).domains == [1]


def test_looking_ahead_gives_the_rows_that_come(rows_of):
    sampler = DomainSampler(rows_of([50, 50]), proportions=np.array([0.7, 0.3]))
    ahead = sampler.upcoming(20)
    assert sorted(sampler.draw(20).rows) == sorted(ahead)


def test_refused_candidates_are_passed_over_until_the_stream_wraps(rows_of):
    sampler = DomainSampler(rows_of([10]), admit=lambda c: (c.dataset_rows >= 4, None))
    first = sampler.draw(6).rows
    assert sorted(first) == [4, 5, 6, 7, 8, 9]
    assert sorted(sampler.draw(6).rows) == [4, 5, 6, 7, 8, 9]
    assert int(sampler.counts[0]) == 12
    assert int(sampler.drawn[0]) >= 18 and int(sampler.admitted[0]) >= 12
    assert sampler.streams[0].refused == int(sampler.drawn[0] - sampler.admitted[0])


def test_the_best_by_priority_are_chosen_and_the_others_come_back(rows_of):
    sampler = DomainSampler(
        rows_of([16]), shuffle=False, admit=lambda c: (None, c.dataset_rows.astype(float)), with_priority=True
    )
    assert sampler.draw(2).rows == [15, 14]
    assert sampler.streams[0].peek(3) == [0, 1, 2]
    assert sampler.passes[0] == pytest.approx(2 / 16)


def test_quotas_hold_whatever_is_admitted(rows_of):
    sampler = DomainSampler(
        rows_of([40, 40]), proportions=np.array([0.75, 0.25]), admit=lambda c: (c.dataset_rows % 2 == 0, None)
    )
    for _ in range(10):
        draw = sampler.draw(8)
        assert counts([draw], 2) == [6, 2]
        assert all(row % 2 == 0 for row in draw.rows)


def test_a_starved_domain_takes_the_best_refused_and_warns(rows_of, caplog):
    sampler = DomainSampler(
        rows_of([100, 100]),
        proportions=np.array([0.5, 0.5]),
        admit=lambda c: (c.dataset_rows < 100, c.dataset_rows.astype(float)),
    )
    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        draw = sampler.draw(4)
    assert counts([draw], 2) == [2, 2]
    assert "domain 'd1': 0 of 2 prompts admitted in 16 draws; the best refused ones are taken" in caplog.text
    assert sampler.forced.tolist() == [0, 2]
    assert int(sampler.drawn[1]) == 16


def test_a_starved_domain_is_an_error_on_request(rows_of):
    def admit(candidates):
        return candidates.dataset_rows < 0, None

    sampler = DomainSampler(rows_of([100]), admit=admit, on_starved="error")
    with pytest.raises(DataFlexError, match="domain 'd0': 0 of 3 prompts admitted in 24 draws; on_starved: error"):
        sampler.draw(3)


def test_candidates_carry_rows_and_domains(rows_of):
    seen = []
    sampler = DomainSampler(rows_of([3, 3]), admit=lambda c: seen.append(c) or (None, None))
    draw = sampler.draw(4)
    assert sorted(seen[0].dataset_rows.tolist()) == sorted(draw.rows)
    assert [f"d{row // 3}" for row in seen[0].dataset_rows] == seen[0].domains.tolist()


def test_another_dataset_on_resume_names_both_fingerprints(rows_of):
    state = DomainSampler(rows_of([3, 3], "5 rows, aaaa")).state_dict()
    with pytest.raises(ConfigError) as caught:
        DomainSampler(rows_of([3, 3], "6 rows, bbbb")).load_state_dict(state)
    assert "fingerprint 6 rows, bbbb" in str(caught.value)
    assert "fingerprint 5 rows, aaaa" in str(caught.value)


def test_other_domains_or_another_loader_on_resume_are_errors(rows_of):
    state = DomainSampler(rows_of([3, 3])).state_dict()
    with pytest.raises(ConfigError, match="dataflex.domains: got .*; accepted: those of the checkpoint: d0, d1"):
        DomainSampler(rows_of([3, 3, 3])).load_state_dict(state)
    with pytest.raises(ConfigError, match="a checkpoint that another data loader wrote"):
        DomainSampler(rows_of([3, 3])).load_state_dict({"_snapshot": {}, "_steps_since_snapshot": 0})
