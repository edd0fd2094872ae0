"""What holds for any decisions: order of plugins and rows, neutrality, scale, averages, bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflex_hooks import LabelledDecision, LossCoefficients, UpdateDecision, merge_update
from dataflex_hooks.keep import FALLBACKS, KeepRules

KINDS = st.sampled_from(["token", "sequence"])
properties = settings(max_examples=40, deadline=None)


@st.composite
def cases(draw, batches, normalized_only=False):
    """Rows with lengths and tool tokens, and up to four labelled decisions about them."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    rows = []
    for index, length in enumerate(lengths):
        mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        reward = draw(st.sampled_from([0.0, 0.5, 1.0]))
        uid = draw(st.sampled_from(["u1", "u2", "u3"]))
        rows.append(batches.Row(uid, session=index, length=length, mask=tuple(mask), reward=reward))
    total = sum(lengths)
    decisions = []
    for label in draw(st.permutations(["alpha", "beta", "gamma", "delta"]))[: draw(st.integers(0, 4))]:
        size = draw(st.sampled_from([len(rows), total]))
        weight = st.floats(0, 1e6, width=32, allow_subnormal=False)
        decisions.append(
            (
                label,
                {
                    "mask": draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size)),
                    "keep": draw(st.none() | st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))),
                    "weights": draw(st.none() | st.lists(weight, min_size=size, max_size=size)),
                    "normalize": "mean" if normalized_only else draw(st.sampled_from(["mean", "none"])),
                    "update_scale": None if normalized_only else draw(st.none() | st.floats(0, 10)),
                },
            )
        )
    return rows, decisions


def decide(parts):
    tensors = {name: torch.tensor(parts[name]) for name in ("mask", "keep", "weights") if parts[name] is not None}
    return UpdateDecision(**{**parts, **tensors})


def merge(batch, decisions, kind, mask_scale="none", rules=None):
    labelled = [LabelledDecision(label, decide(parts)) for label, parts in decisions]
    return merge_update(labelled, batch, LossCoefficients(kind), mask_scale, rules)


RULES = st.builds(KeepRules, st.none() | st.integers(1, 4) | st.floats(0.1, 0.9), st.sampled_from(FALLBACKS))


@given(data=st.data(), kind=KINDS, mask_scale=st.sampled_from(["none", "kept"]), rules=RULES)
@properties
def test_plugin_order_does_not_change_a_bit(batches, data, kind, mask_scale, rules):
    rows, decisions = data.draw(cases(batches))
    batch = batches.build(rows)
    merged = merge(batch, decisions, kind, mask_scale, rules)
    again = merge(batch, data.draw(st.permutations(decisions)), kind, mask_scale, rules)
    assert (merged.in_batch is None) == (again.in_batch is None)
    assert merged.in_batch is None or torch.equal(merged.in_batch, again.in_batch)
    assert torch.equal(merged.weights, again.weights)
    assert torch.equal(merged.token_mask, again.token_mask)
    assert merged.metrics == again.metrics


@given(data=st.data(), kind=KINDS, mask_scale=st.sampled_from(["none", "kept"]), rules=RULES)
@properties
def test_permuted_rows_give_permuted_results(batches, data, kind, mask_scale, rules):
    rows, decisions = data.draw(cases(batches))
    batch = batches.build(rows)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = batches.build([rows[i] for i in order])
    tokens = torch.cat([torch.arange(batch.offsets[i], batch.offsets[i + 1]) for i in order])

    def shuffle(values):
        if values is None:
            return None
        index = order if len(values) == len(rows) else tokens.tolist()
        return [values[i] for i in index]

    moved = [
        (label, {**parts, **{name: shuffle(parts[name]) for name in ("mask", "keep", "weights")}})
        for label, parts in decisions
    ]
    merged = merge(batch, decisions, kind, mask_scale, rules)
    result = merge(shuffled, moved, kind, mask_scale, rules)
    assert (merged.in_batch is None) == (result.in_batch is None)
    assert merged.in_batch is None or torch.equal(result.in_batch, merged.in_batch[list(order)])
    assert torch.equal(result.weights, merged.weights[tokens])
    assert torch.equal(result.row_keep, merged.row_keep[list(order)])
    assert result.metrics["dataflex/weight_mean"] == merged.metrics["dataflex/weight_mean"]


@given(data=st.data(), kind=KINDS, constant=st.sampled_from([1.0, 0.25, 1024.0]))
@properties
def test_a_constant_normalised_factor_is_exactly_neutral(batches, data, kind, constant):
    rows, decisions = data.draw(cases(batches))
    batch = batches.build(rows)
    ones = (
        "neutral",
        {"mask": None, "keep": None, "weights": [constant] * len(rows), "normalize": "mean", "update_scale": None},
    )
    assert torch.equal(merge(batch, decisions, kind).weights, merge(batch, [*decisions, ones], kind).weights)


@given(data=st.data(), kind=KINDS, scale=st.floats(1e-6, 1e6))
@properties
def test_scaling_a_normalised_factor_changes_nothing(batches, data, kind, scale):
    rows, decisions = data.draw(cases(batches, normalized_only=True))
    batch = batches.build(rows)
    scaled = [
        (label, {**parts, "weights": parts["weights"] and [w * scale for w in parts["weights"]]})
        for label, parts in decisions
    ]
    expected = merge(batch, decisions, kind).weights
    torch.testing.assert_close(merge(batch, scaled, kind).weights, expected, rtol=1e-4, atol=1e-6)


@given(data=st.data(), kind=KINDS)
@properties
def test_kept_normalised_weights_average_one(batches, data, kind):
    rows, decisions = data.draw(cases(batches, normalized_only=True))
    batch = batches.build(rows)
    merged = merge(batch, decisions, kind)
    coefficient = LossCoefficients(kind).of_rows(batch)[batch.row_of_token] * batch.response_mask
    kept = merged.token_mask & batch.response_mask
    if not bool(merged.weights.any()):
        return
    mean = float((coefficient * merged.weights)[kept].sum() / coefficient[kept].sum())
    assert mean == pytest.approx(1.0, rel=1e-5)


@given(data=st.data(), kind=KINDS)
@properties
def test_masks_alone_stay_exactly_zero_and_one(batches, data, kind):
    rows, decisions = data.draw(cases(batches, normalized_only=True))
    masks = [(label, {**parts, "weights": None}) for label, parts in decisions]
    batch = batches.build(rows)
    merged = merge(batch, masks, kind)
    assert torch.equal(merged.weights, (merged.token_mask & batch.response_mask).float())


@given(data=st.data(), kind=KINDS, mask_scale=st.sampled_from(["none", "kept"]))
@properties
def test_weights_are_finite_and_zero_where_nothing_is_kept(batches, data, kind, mask_scale):
    rows, decisions = data.draw(cases(batches))
    batch = batches.build(rows)
    merged = merge(batch, decisions, kind, mask_scale)
    assert bool(torch.isfinite(merged.weights).all()) and bool((merged.weights >= 0).all())
    assert not bool(merged.weights[~(merged.token_mask & batch.response_mask)].any())
    assert all(value == value and abs(value) != float("inf") for value in merged.metrics.values())
