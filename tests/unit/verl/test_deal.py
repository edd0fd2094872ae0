"""Real rows are spread evenly over ranks and mini-batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflex_verl.deal import Layout, deal, fill, occupied


@st.composite
def shapes(draw):
    """Ranks, an actor's and a critic's mini-batch, and the numbers of rows, real and in all."""
    ranks = draw(st.integers(1, 4))
    actor, critic = (ranks * draw(st.integers(1, 6)) for _ in range(2))
    size = math.lcm(actor, critic) * draw(st.integers(1, 3))
    return ranks, actor, critic, size, draw(st.integers(0, size))


def counts(dealt, layout, rows, real):
    return np.bincount(layout.mini_batch(rows), weights=dealt < real)


@given(shapes(), st.randoms())
def test_every_mini_batch_of_actor_and_critic_gets_its_share(shape, random):
    ranks, actor, critic, size, real = shape
    layout = Layout(size, ranks, math.gcd(actor, critic))
    dealt = deal([random.randint(1, 50) for _ in range(real)], layout)
    assert sorted(dealt) == list(range(size))
    for rows in (actor, critic, size):
        assert np.ptp(counts(dealt, layout, rows, real)) <= 1
    by_rank = (dealt < real).reshape(ranks, -1).sum(axis=1)
    assert np.ptp(by_rank) <= max(1, size // layout.block)


def test_a_rank_takes_its_part_of_every_mini_batch():
    layout = Layout(size=8, ranks=2, block=4)
    # Rank 0 holds indices 0-3, rank 1 holds 4-7; mini-batch 0 takes the first two of each.
    assert layout.mini_batch(4).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.batch_index().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_tokens_are_balanced_over_ranks():
    layout = Layout(size=16, ranks=2, block=8)
    lengths = [1000, 900, 800, 700, 600, 500, 400, 300, 20, 18, 16, 14, 12, 10, 8, 6]
    dealt = deal(lengths, layout)
    tokens = np.array(lengths)[dealt].reshape(2, -1).sum(axis=1)
    assert abs(tokens[0] - tokens[1]) <= 0.05 * tokens.sum()


@pytest.mark.parametrize(
    ("real", "factors", "cut"), [(8, {1.0}, 0), (6, {4 / 3}, 0), (3, {2.0, 4.0}, 0), (2, {4.0}, 0), (1, {4.0}, 0)]
)
def test_fill_makes_up_for_padding(real, factors, cut):
    layout = Layout(size=8, ranks=1, block=4)
    dealt = deal([5] * real, layout)
    got, n_cut = fill(dealt < real, layout, 4, most=4)
    assert set(got[dealt < real].tolist()) == factors and n_cut == cut


def test_fill_is_limited_and_says_so():
    layout = Layout(size=16, ranks=1, block=8)
    dealt = deal([5, 5], layout)
    got, cut = fill(dealt < 2, layout, 8, most=4)
    assert got[dealt < 2].tolist() == [4.0, 4.0] and cut == 2


def test_mini_batches_of_padding_alone_are_left_out():
    layout = Layout(size=16, ranks=2, block=4)
    dealt = deal([5, 5], layout)
    rows = occupied(dealt < 2, layout, 4)
    # Two real rows fill two of four mini-batches; each rank keeps the same number of rows.
    assert len(rows) == 8 and (rows < 8).sum() == 4
    assert set(np.flatnonzero(dealt < 2)) <= set(rows.tolist())
    assert len(occupied(np.ones(16, dtype=bool), layout, 4)) == 16
