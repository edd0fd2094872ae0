"""Windows and statistics per domain, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dataflex_hooks as dh
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, DomainSums, equal_rewards
from dataflex_hooks.domain_window import DomainWindow


def with_domains(batch, domains):
    fields = {DOMAIN_COLUMN: domains}
    names = ("response_mask", "rm_scores", "advantages", "old_log_probs")
    keys = [f"{uid}_{s}_{o}" for uid, s, o in zip(batch.uid, batch.session_number, batch.output_index, strict=True)]
    return dh.RolloutBatch(keys, batch.offsets, fields, {name: batch.values(name) for name in names})


@pytest.fixture
def step(batches):
    """Two math groups of two sessions, one code group; one session has two rows."""
    row = batches.Row
    rows = [
        row("a", 0, reward=1.0, advantage=1.0, length=3),
        row("a", 1, reward=0.0, advantage=-1.0, length=1),
        row("b", 0, reward=0.5, advantage=0.0),
        row("b", 1, reward=0.5, advantage=0.0),
        row("c", 0, 0, reward=0.0, advantage=0.5, length=2, mask=(1, 0)),
        row("c", 0, 1, reward=0.75, advantage=0.5, length=4),
        row("c", 1, reward=0.0, advantage=-2.0, length=2),
    ]
    return with_domains(batches.build(rows), ["math"] * 4 + ["code"] * 3)


def test_statistics_of_a_step(step):
    sums = DomainSums(["code", "math", "prose"])
    sums.add_rewarded(step)
    sums.add_advantages(step, kept=torch.tensor([True, False, True, True, False, True, False]))
    stats = sums.stats(np.array([0.2, 0.5, 0.3]))
    assert stats.domains == ("code", "math", "prose")
    assert (stats.counts.tolist(), stats.groups.tolist(), stats.unscored.tolist()) == ([2, 4, 0], [1, 2, 0], [0, 0, 0])
    assert stats.scores["reward"].tolist() == [0.375, 0.5, 0.0]
    assert stats.scores["abs_advantage"].tolist() == [1.25, 0.5, 0.0]
    assert stats.scores["solve_rate"].tolist() == [0.5, 0.25, 0.0]
    assert stats.scores["kept"].tolist() == [0.5, 0.75, 0.0]
    assert stats.scores["length"].tolist() == [3.5, 2.0, 0.0]
    assert stats.proportions.tolist() == [0.2, 0.5, 0.3]


def test_rows_without_an_advantage_are_left_out_of_its_mean_and_counted(step, batches):
    sums = DomainSums(["code", "math"])
    sums.add_rewarded(step)
    rows = batches.rows([[1.0, 0.0]], advantage=2.0)
    sums.add_advantages(with_domains(batches.build(rows), ["math"] * 2))
    stats = sums.stats(np.array([0.5, 0.5]))
    assert stats.unscored.tolist() == [2, 2]
    assert stats.scores["abs_advantage"].tolist() == [0.0, 2.0]
    assert stats.scores["kept"].tolist() == [0.0, 0.5]


def test_evicted_groups_of_equal_rewards_have_advantage_zero_and_others_none(batches):
    evicted = with_domains(batches.groups([1.0, 1.0], [0.0, 1.0]), ["math"] * 4)
    assert equal_rewards(evicted).tolist() == [True, False]
    sums = DomainSums(["math"])
    sums.add_evicted(evicted)
    kept = with_domains(batches.build(batches.rows([[1.0, 0.0]], advantage=3.0)), ["math"] * 2)
    sums.add_rewarded(kept)
    sums.add_advantages(kept)
    stats = sums.stats(np.ones(1))
    assert (stats.counts.tolist(), stats.groups.tolist(), stats.unscored.tolist()) == ([6], [3], [2])
    assert stats.scores["abs_advantage"].tolist() == [1.5]
    assert stats.scores["reward"][0] == pytest.approx(4 / 6)
    assert stats.scores["kept"][0] == pytest.approx(2 / 6)


def test_rows_of_an_unknown_domain_are_an_error(step):
    with pytest.raises(ValueError, match="rows of domain code; this run has math"):
        DomainSums(["math"]).add_rewarded(step)


def test_a_window_weighs_each_step_by_its_count():
    window = DomainWindow(["a", "b"], 3)
    window.add(1, np.array([100.0, 100.0]), np.array([1, 1]))
    window.add(2, np.array([3.0, 0.0]), np.array([3, 0]))
    window.add(3, np.array([0.0, 5.0]), np.array([1, 2]))
    window.add(3, np.array([1.0, 1.0]), np.array([1, 1]))
    window.add(4, np.array([0.0, 0.0]), np.array([0, 0]))
    window.add(5, np.array([2.0, 0.0]), np.array([1, 0]))
    history = window.history()
    assert history.steps.tolist() == [2, 3, 5]
    assert history.counts.tolist() == [[3, 0], [2, 3], [1, 0]]
    assert history.scores.tolist() == [[1.0, 0.0], [0.5, 2.0], [2.0, 0.0]]
    assert history.mean().tolist() == [1.0, 2.0]
    assert history.total().tolist() == [6, 3]
    assert history.since(3).steps.tolist() == [5]
    with pytest.raises(ValueError, match="step 4 after step 5"):
        window.add(4, np.array([1.0, 0.0]), np.array([1, 0]))


def test_a_saved_window_is_the_same_bit_for_bit():
    window = DomainWindow(["a", "b"], 4)
    for step in range(1, 8):
        window.add(step, np.array([0.1 * step, 0.3]), np.array([3, step % 2]))
    other = DomainWindow(["a", "b"], 4)
    other.load_state_dict(window.state_dict())
    for each in (window, other):
        each.add(8, np.array([0.7, 0.1]), np.array([7, 1]))
    assert other.history().scores.tobytes() == window.history().scores.tobytes()
    assert other.history().counts.tolist() == window.history().counts.tolist()
    with pytest.raises(ValueError, match="of the domains a, b; this run has a, c"):
        DomainWindow(["a", "c"], 4).load_state_dict(window.state_dict())


def test_an_empty_window_has_zeros():
    history = DomainWindow(["a", "b"], 4).history()
    assert (history.mean().tolist(), history.total().tolist()) == ([0.0, 0.0], [0, 0])
