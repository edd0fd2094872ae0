"""How decisions become weights: worked examples, refusals, metrics."""

from __future__ import annotations

import math

import pytest
import torch

from dataflex_hooks import DecisionError, LabelledDecision, LossCoefficients, UpdateDecision, merge_update
from dataflex_hooks.metric_names import reduction


def merge(batch, coefficients, mask_scale="none", **decisions):
    labelled = [LabelledDecision(label, decision) for label, decision in decisions.items()]
    return merge_update(labelled, batch, coefficients, mask_scale)


@pytest.fixture
def batch(batches):
    """Three responses of 1, 2 and 4 tokens in two groups; the last has one tool token."""
    return batches.build(
        [
            batches.Row("a", 0, length=1, reward=1.0),
            batches.Row("a", 1, length=2, reward=0.0),
            batches.Row("b", 0, length=4, reward=0.5, mask=(1, 1, 0, 1)),
        ]
    )


def test_coefficients_of_token_and_sequence_means(batch):
    assert LossCoefficients("token").of_rows(batch).tolist() == [1, 1, 1]
    assert LossCoefficients("sequence").of_rows(batch).tolist() == [1, 1 / 2, 1 / 3]


def test_no_decision_changes_nothing(batch, token_mean):
    merged = merge(batch, token_mean)
    assert not merged.changed and not merged.skip_update and not merged.per_token
    assert merged.weights.tolist() == [1, 1, 1, 1, 1, 0, 1]
    assert merged.row_keep.tolist() == [True] * 3
    assert merge(batch, token_mean, nothing=UpdateDecision()).changed is False


def test_a_mask_alone_stays_zero_and_one(batch, token_mean):
    merged = merge(batch, token_mean, sel=UpdateDecision(mask=torch.tensor([True, False, True])))
    assert merged.weights.dtype == torch.float32
    assert merged.weights.tolist() == [1, 0, 0, 1, 1, 0, 1]
    assert merged.row_keep.tolist() == [True, False, True]
    assert merged.token_mask.tolist() == [True, False, False, True, True, True, True]
    assert merged.changed and not merged.per_token


def test_masks_combine_with_and(batch, token_mean):
    merged = merge(
        batch,
        token_mean,
        a=UpdateDecision(mask=torch.tensor([1, 1, 0])),
        b=UpdateDecision(mask=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])),
    )
    assert merged.weights.tolist() == [0, 1, 1, 0, 0, 0, 0]
    assert merged.row_keep.tolist() == [False, True, False]
    assert merged.per_token


def test_weights_average_one_under_token_coefficients(batch):
    merged = merge(batch, LossCoefficients("token"), rw=UpdateDecision(weights=torch.tensor([1.0, 2.0, 3.0])))
    mean = (1 * 1 + 2 * 2 + 3 * 3) / 6
    assert merged.weights.tolist() == pytest.approx([w / mean for w in (1, 2, 2, 3, 3, 0, 3)])


def test_weights_average_one_under_sequence_coefficients(batch):
    merged = merge(batch, LossCoefficients("sequence"), rw=UpdateDecision(weights=torch.tensor([1.0, 2.0, 6.0])))
    assert merged.weights.tolist() == pytest.approx([w / 3 for w in (1, 2, 2, 6, 6, 0, 6)])


def test_only_kept_weights_are_averaged(batch):
    merged = merge(
        batch,
        LossCoefficients("sequence"),
        sel=UpdateDecision(mask=torch.tensor([True, False, True])),
        rw=UpdateDecision(weights=torch.tensor([1.0, 50.0, 3.0])),
    )
    assert merged.weights.tolist() == pytest.approx([0.5, 0, 0, 1.5, 1.5, 0, 1.5])


def test_raw_factors_and_scales_act_as_written(batch, token_mean):
    merged = merge(
        batch,
        token_mean,
        norm=UpdateDecision(weights=torch.tensor([5.0, 5.0, 5.0])),
        raw=UpdateDecision(weights=torch.tensor([0.5, 2.0, 3.0]), normalize="none"),
        half=UpdateDecision(update_scale=0.5),
        twice=UpdateDecision(update_scale=3),
    )
    assert merged.weights.tolist() == [0.75, 3.0, 3.0, 4.5, 4.5, 0, 4.5]
    assert merged.update_scale == 1.5


@pytest.mark.parametrize(("kind", "share"), [("token", 4 / 6), ("sequence", 2 / 3)])
def test_mask_scale_makes_up_for_the_kept_share(batch, kind, share):
    mask = UpdateDecision(mask=torch.tensor([True, False, True]))
    merged = merge(batch, LossCoefficients(kind), "kept", sel=mask)
    assert merged.weights.tolist() == pytest.approx([w / share for w in (1, 0, 0, 1, 1, 0, 1)])
    assert merged.metrics["dataflex/weight_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("mask_scale", ["none", "kept"])
def test_nothing_kept_gives_zeros(batch, token_mean, mask_scale):
    merged = merge(
        batch,
        token_mean,
        mask_scale,
        sel=UpdateDecision(mask=torch.zeros(3)),
        rw=UpdateDecision(weights=torch.tensor([1.0, 2.0, 3.0])),
    )
    assert merged.weights.tolist() == [0.0] * 7
    assert "dataflex/reward_kept" not in merged.metrics
    assert all(math.isfinite(value) for value in merged.metrics.values())


def test_kept_weights_of_zero_give_zeros(batch, token_mean):
    assert merge(batch, token_mean, rw=UpdateDecision(weights=torch.zeros(3))).weights.tolist() == [0.0] * 7


def test_products_of_extreme_factors_stay_finite(batch, token_mean):
    huge = UpdateDecision(weights=torch.tensor([1e300, 2e300, 1e300], dtype=torch.float64))
    tiny = UpdateDecision(weights=torch.tensor([1e-300, 1e-300, 1e-300], dtype=torch.float64))
    merged = merge(batch, token_mean, a=huge, b=huge, c=tiny)
    assert merged.weights.tolist() == pytest.approx([w / 2 for w in (1, 4, 4, 1, 1, 0, 1)])


def test_subnormal_factors_are_normalised_too(batch, token_mean):
    merged = merge(batch, token_mean, rw=UpdateDecision(weights=torch.full((3,), 5e-324, dtype=torch.float64)))
    assert merged.weights.tolist() == [1, 1, 1, 1, 1, 0, 1]


def test_padded_jagged_and_response_weights_agree(batch, token_mean):
    rows = torch.tensor([1.0, 2.0, 3.0])
    jagged = batch.expand_rows(rows)
    merged = [merge(batch, token_mean, rw=UpdateDecision(weights=w)) for w in (rows, jagged, batch.to_padded(jagged))]
    assert torch.equal(merged[0].weights, merged[1].weights) and torch.equal(merged[0].weights, merged[2].weights)
    assert [m.per_token for m in merged] == [False, True, True]


def test_values_at_tool_tokens_do_not_matter(batch, token_mean):
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0])
    assert merge(batch, token_mean, rw=UpdateDecision(weights=weights)).weights.tolist() == [1, 1, 1, 1, 1, 0, 1]


def test_any_plugin_can_skip_the_update(batch, token_mean):
    merged = merge(batch, token_mean, a=UpdateDecision(), b=UpdateDecision(skip_update=True))
    assert merged.skip_update and not merged.changed


def test_token_decisions_are_refused_where_the_loss_is_not_linear_in_them(batch):
    geo_mean = LossCoefficients("sequence", per_token=False, source="loss_mode=geo_mean")
    merge(batch, geo_mean, rw=UpdateDecision(weights=torch.ones(3)))
    with pytest.raises(DecisionError, match=r"'rw'.*decides per token.*loss_mode=geo_mean.*not linear"):
        merge(batch, geo_mean, rw=UpdateDecision(weights=torch.ones(7)))


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (
            {"weights": torch.tensor([1.0, math.nan, 1.0])},
            r"weights are NaN or infinite at 1 of 3 responses, first in row 1",
        ),
        ({"weights": torch.tensor([1.0, 1.0, math.inf])}, r"weights are NaN or infinite.*row 2 \(uid 'b'\)"),
        ({"weights": torch.tensor([1.0, -1.0, -2.0])}, r"weights are negative at 2 of 3 responses, first in row 1"),
        ({"weights": torch.tensor([0, 0, 0, 0, 0, 0, -1.0])}, r"weights are negative at 1 of 7 tokens, first in row 2"),
        ({"weights": torch.ones(5)}, r"weights: shape \(5,\) is none of"),
        ({"weights": torch.ones(3, 5)}, r"weights: shape \(3, 5\) is none of.*padded \(3, 4\)"),
        ({"weights": [1.0, 1.0, 1.0]}, r"weights must be a torch.Tensor, got list"),
        ({"weights": torch.ones(3, dtype=torch.complex64)}, r"must be real or bool, got dtype torch.complex64"),
        ({"mask": torch.tensor([0.0, 0.5, 1.0])}, r"mask holds values other than 0 and 1"),
        ({"mask": torch.ones(4)}, r"mask: shape \(4,\)"),
        ({"normalize": "meen"}, r"normalize is 'meen'; accepted: one of mean, none; did you mean 'mean'\?"),
        ({"update_scale": -1.0}, r"update_scale is -1.0; accepted: a finite number >= 0"),
        ({"update_scale": math.nan}, r"update_scale is nan"),
        ({"skip_update": 1}, r"skip_update is 1; accepted: True or False"),
    ],
)
def test_malformed_decisions_are_refused_with_the_plugins_name(batch, token_mean, decision, message):
    with pytest.raises(DecisionError, match=r"plugin 'culprit' .*" + message):
        merge(batch, token_mean, culprit=UpdateDecision(**decision))


def test_overflow_of_raw_factors_is_refused(batch, token_mean):
    big = UpdateDecision(weights=torch.full((3,), 1e30), normalize="none")
    with pytest.raises(DecisionError, match="product of weights and scales of 'a', 'b' overflows float32"):
        merge(batch, token_mean, a=big, b=big)


def test_metrics_describe_the_merged_update(batch):
    merged = merge(
        batch,
        LossCoefficients("sequence"),
        sel=UpdateDecision(mask=torch.tensor([True, False, True]), reason="why"),
        rw=UpdateDecision(weights=torch.tensor([1.0, 2.0, 3.0])),
    )
    row_weights = [0.5, 0.0, 1.5]
    mean = sum(row_weights) / 3
    assert merged.metrics == pytest.approx(
        {
            "dataflex/kept_frac": 2 / 3,
            "dataflex/kept_groups_frac": 1.0,
            "dataflex/kept_tokens_frac": 4 / 6,
            "dataflex/weight_mean": mean,
            "dataflex/weight_std": math.sqrt(sum((w - mean) ** 2 for w in row_weights) / 3),
            "dataflex/weight_kept_mean": 1.0,
            "dataflex/weight_largest": 1.5,
            "dataflex/ess_frac": 2.0**2 / (3 * (0.25 + 2.25)),
            "dataflex/reward_all": 0.5,
            "dataflex/reward_kept": 0.75,
            "dataflex/sel/kept_frac": 2 / 3,
            "dataflex/sel/kept_groups_frac": 1.0,
            "dataflex/sel/masked_rows_total/why": 1.0,
            "dataflex/rw/weight_mean": 2.0,
            "dataflex/rw/weight_std": math.sqrt(2 / 3),
            "dataflex/rw/weight_largest": 3.0,
            "dataflex/rw/ess_frac": 6.0**2 / (3 * 14.0),
        }
    )


def test_kept_share_counts_sessions_not_rows(batches, token_mean):
    row = batches.Row
    batch = batches.build([row("a", 0, 0, reward=9.0), row("a", 0, 1, reward=1.0), row("a", 1, 0), row("b", 0, 0)])
    merged = merge(batch, token_mean, sel=UpdateDecision(mask=torch.tensor([False, True, False, False])))
    assert merged.metrics["dataflex/kept_frac"] == pytest.approx(1 / 3)
    assert merged.metrics["dataflex/reward_all"] == pytest.approx(1 / 3)
    assert merged.metrics["dataflex/reward_kept"] == 1.0


def test_metric_names_reduce_to_the_mean_and_counts_to_the_sum(batch, token_mean):
    merged = merge(
        batch,
        token_mean,
        sel=UpdateDecision(mask=torch.ones(3), reason="r"),
        rw=UpdateDecision(weights=torch.ones(3)),
    )
    counts = {name for name in merged.metrics if reduction(name) == "sum"}
    assert counts == {"dataflex/sel/masked_rows_total/r"}
    assert {reduction(name) for name in merged.metrics.keys() - counts} == {"mean"}


def test_no_decision_logs_what_neutral_decisions_do(batches, token_mean):
    row = batches.Row
    rows = [row("a", 0, 0, reward=9.0), row("a", 0, 1, reward=1.0), row("a", 1, mask=(0, 0)), row("b", mask=(1, 0))]
    for batch in (batches.build(rows), batches.build(rows[2:3])):
        neutral = merge(batch, token_mean, one=UpdateDecision(update_scale=1.0))
        nothing = merge(batch, token_mean)
        assert nothing.metrics == neutral.metrics
        assert nothing.row_keep.tolist() == neutral.row_keep.tolist()
        assert not nothing.changed and neutral.changed


def test_metrics_without_rewards_in_the_batch(batches, token_mean):
    batch = batches.build(batches.rows([[1, 0]]), without=["rm_scores"])
    assert "dataflex/reward_all" not in merge(batch, token_mean).metrics
