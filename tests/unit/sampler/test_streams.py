"""Shuffled streams: every row once an epoch, wrapping alone, exact on resume."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflex_verl.streams import Stream, shuffled


def test_the_order_is_a_permutation_that_depends_on_seed_domain_and_epoch():
    base = shuffled(1000, 1, 2, 3)
    assert sorted(base.tolist()) == list(range(1000))
    assert base.tolist() != list(range(1000))
    assert base.tolist() == shuffled(1000, 1, 2, 3).tolist()
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert base.tolist() != shuffled(1000, *other).tolist()


def test_the_order_is_fixed_for_good():
    assert shuffled(8, 0, 0, 0).tolist() == [0, 1, 4, 2, 3, 6, 7, 5]


def test_positions_are_spread_evenly():
    first = [int(shuffled(10, seed, 0, 0)[0]) for seed in range(2000)]
    assert np.bincount(first, minlength=10).min() > 140


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 30), takes=st.lists(st.integers(1, 40), max_size=12))
def test_every_epoch_has_every_row_once_however_it_is_taken(n, takes):
    rows = np.arange(100, 100 + n, dtype=np.int32)
    stream = Stream(rows, 5, 0)
    taken = [row for count in takes for row in stream.take(count)]
    for epoch in range(len(taken) // n):
        assert sorted(taken[epoch * n : (epoch + 1) * n]) == rows.tolist()
    single = Stream(rows, 5, 0)
    assert [single.take_one() for _ in taken] == taken
    assert stream.passes == pytest.approx(len(taken) / n)


def test_epochs_have_different_orders_and_without_shuffling_the_same():
    stream = Stream(np.arange(50), 1, 0)
    assert stream.take(50) != stream.take(50)
    plain = Stream(np.arange(50), 1, 0, shuffle=False)
    assert plain.take(50) == plain.take(50) == list(range(50))


def test_rows_given_back_come_next_in_their_order():
    stream = Stream(np.arange(20), 1, 0)
    first = stream.take(6)
    stream.give_back(first[2:5])
    assert stream.peek(2) == first[2:4]
    assert stream.take(3) == first[2:5]
    assert stream.passes == pytest.approx(6 / 20)


def test_peeking_stops_at_the_wrap_and_takes_nothing():
    stream = Stream(np.arange(5), 1, 0)
    stream.take(3)
    ahead = stream.peek(10)
    assert len(ahead) == 2
    assert stream.take(2) == ahead


@settings(deadline=None)
@given(
    n=st.integers(1, 20),
    before=st.integers(0, 70),
    back=st.integers(0, 5),
    after=st.integers(1, 60),
    shuffle=st.booleans(),
)
def test_a_saved_stream_goes_on_exactly(n, before, back, after, shuffle):
    rows = np.arange(n) * 3
    stream = Stream(rows, 9, 4, shuffle)
    taken = stream.take(before)
    stream.give_back(taken[len(taken) - min(back, len(taken)) :])
    other = Stream(rows, 0, 4)
    other.load_state_dict(stream.state_dict(), 9, shuffle)
    assert other.take(after) == stream.take(after)
    assert other.epoch == stream.epoch
