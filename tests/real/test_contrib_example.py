"""The README's plugin on the real trainer: what is too long has no weight and no gradient."""

from __future__ import annotations

import pytest

from tests.wheels import contrib_site

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def keep_short():
    with contrib_site().on_path():
        from dataflex_example import KeepShort

        yield KeepShort


def test_long_responses_are_masked_and_the_gradient_follows(live, stored, keep_short):
    plain = live.update(stored)
    lengths = {key: len(value) for key, value in plain.of("response_mask").items()}
    longest = sorted(set(lengths.values()))[0]
    assert longest < max(lengths.values())
    masked = live.update(stored, plugins={"short": keep_short(longest=longest)})
    for key, weights in masked.of("rollout_is_weights").items():
        assert weights.tolist() == [float(lengths[key] <= longest)] * len(weights)
    assert masked.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)
    too_long = sum(length > longest for length in lengths.values())
    assert masked.metrics["dataflex/short/masked_rows_total/too_long"] == too_long > 0


def test_with_room_for_all_of_them_nothing_changes(live, stored, keep_short):
    assert live.update(stored, plugins={"short": keep_short()}).grad_norm == live.update(stored).grad_norm


def test_with_no_room_at_all_the_gradient_is_zero(live, stored, keep_short):
    assert live.update(stored, plugins={"short": keep_short(longest=0)}).grad_norm == 0.0
