"""What is logged about a merged update.

verl guesses how to reduce a metric from "max", "min", "sum" and "total" in its name; a fixed part of a name holds
"total" where a count is to be added up over the updates of a step, and none of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.errors import FieldError
from dataflex_hooks.keep import groups_of, sessions_of
from dataflex_hooks.merge_reward import Generated
from dataflex_hooks.metric_names import label_metric
from dataflex_hooks.resolve import ResolvedUpdate
from dataflex_hooks.segments import row_max, row_sum
from dataflex_hooks.token_weights import TokenWeights, exact_sum, mean_and_std


def update_metrics(
    decisions: Sequence[ResolvedUpdate],
    merged: TokenWeights,
    kept: Tensor,
    coefficient: Tensor,
    batch: RolloutBatch,
    generated: Generated,
) -> dict[str, float]:
    """Describe the merged weights and each plugin's part in them.

    Args:
        decisions: of the plugins.
        merged: the weights.
        kept: (bs,) float64, kept tokens of each row.
        coefficient: (bs,) float64, what the loss gives each valid token of a row.
        batch, generated: the rows, and what the step generated.

    ``kept_frac``: share of the generated sessions with a kept token, ``kept_groups_frac`` of the groups,
    ``kept_tokens_frac`` of the valid tokens in the batch. ``weight_mean``: mean over all valid tokens under the loss
    coefficients, the factor on the policy-gradient loss; ``weight_std`` likewise, ``weight_kept_mean`` over kept tokens
    only, ``weight_largest``. ``ess_frac``: (sum w)^2 / (n sum w^2) over rows. ``reward_all``, ``reward_kept``: mean
    reward of all generated and of kept sessions, where rewards are in the batch and any session is kept. Per plugin:
    ``<label>/kept_frac`` and ``kept_groups_frac`` of its own mask and drop, ``masked_rows_total/<reason>`` and
    ``dropped_rows_total/<reason>`` (counts), ``weight_mean``, ``weight_std``, ``weight_largest`` and ``ess_frac`` of
    its weights as given.
    """
    rows_kept = kept > 0
    session_kept, n_valid = sessions_of(rows_kept, batch), batch.n_valid
    mean, std = mean_and_std(merged.values, True, coefficient, batch)
    kept_weight = exact_sum(coefficient * kept)
    merged_metrics = {
        "kept_frac": int(session_kept.sum()) / max(1, generated.rollouts),
        "kept_groups_frac": int(groups_of(rows_kept, batch).sum()) / max(1, generated.groups),
        "kept_tokens_frac": int(kept.sum()) / max(1, int(n_valid.sum())),
        "weight_mean": mean,
        "weight_std": std,
        "weight_kept_mean": exact_sum(coefficient * merged.row_sums) / kept_weight if kept_weight else 0.0,
        "weight_largest": merged.largest,
        "ess_frac": _effective_share(merged.row_sums / n_valid.clamp(min=1)),
        **_reward_metrics(session_kept, batch, generated),
    }
    metrics = {f"dataflex/{name}": value for name, value in merged_metrics.items()}
    for decision in decisions:
        if decision.mask is not None or decision.keep is not None:
            metrics |= _own_metrics(decision, batch)
        if decision.factor is not None:
            mean, std = mean_and_std(decision.factor, decision.factor_per_token, coefficient, batch)
            metrics[label_metric(decision.label, "weight_mean")] = mean
            metrics[label_metric(decision.label, "weight_std")] = std
            largest, share = _extent(decision.factor, decision.factor_per_token, batch)
            metrics[label_metric(decision.label, "weight_largest")] = largest
            metrics[label_metric(decision.label, "ess_frac")] = share
    return metrics


def neutral_metrics(batch: RolloutBatch, generated: Generated) -> dict[str, float]:
    """What :func:`update_metrics` says of an update that nobody decided anything about, without looking at tokens."""
    has_valid = batch.n_valid > 0
    session_kept = sessions_of(has_valid, batch)
    any_valid = float(bool(has_valid.any()))
    metrics = {
        "kept_frac": int(session_kept.sum()) / max(1, generated.rollouts),
        "kept_groups_frac": int(groups_of(has_valid, batch).sum()) / max(1, generated.groups),
        "kept_tokens_frac": any_valid,
        "weight_mean": any_valid,
        "weight_std": 0.0,
        "weight_kept_mean": any_valid,
        "weight_largest": any_valid,
        "ess_frac": _share(has_valid),
        **_reward_metrics(session_kept, batch, generated),
    }
    return {f"dataflex/{name}": value for name, value in metrics.items()}


def _own_metrics(decision: ResolvedUpdate, batch: RolloutBatch) -> dict[str, float]:
    """What one plugin's mask and drop alone would keep."""
    own, metrics = batch.n_valid > 0, {}
    if decision.mask is not None:
        per_token = decision.mask_per_token
        rows = row_sum(decision.mask, batch.offsets, batch.response_mask) > 0 if per_token else decision.mask
        own = own & rows
        metrics[label_metric(decision.label, "masked_rows_total", decision.reason)] = float((~own).sum())
    if decision.keep is not None:
        own = own & decision.keep
        metrics[label_metric(decision.label, "dropped_rows_total", decision.reason)] = float((~decision.keep).sum())
    named = metrics if decision.reason else {}
    named[label_metric(decision.label, "kept_frac")] = _share(sessions_of(own, batch))
    named[label_metric(decision.label, "kept_groups_frac")] = _share(groups_of(own, batch))
    return named


def _extent(factor: Tensor, per_token: bool, batch: RolloutBatch) -> tuple[float, float]:
    """Largest of a plugin's weights at valid tokens, and their effective sample size over rows."""
    has_valid = batch.n_valid > 0
    if not bool(has_valid.any()):
        return 0.0, 0.0
    if not per_token:
        rows = torch.where(has_valid, factor.to(torch.float64), 0.0)
        return float(rows.max()), _effective_share(rows)
    means = row_sum(factor, batch.offsets, batch.response_mask) / batch.n_valid.clamp(min=1)
    return float(row_max(factor, batch.offsets, batch.response_mask).max()), _effective_share(means)


def _share(marked: Tensor) -> float:
    return int(marked.sum()) / max(1, len(marked))


def _effective_share(row_weights: Tensor) -> float:
    largest = float(row_weights.max()) if len(row_weights) else 0.0
    if largest == 0.0:
        return 0.0
    # The share is the same at any scale; squares of very large or small weights would leave the range of numbers.
    scaled = row_weights / largest
    return math.fsum(scaled.tolist()) ** 2 / (len(scaled) * math.fsum((scaled**2).tolist()))


def _reward_metrics(session_kept: Tensor, batch: RolloutBatch, generated: Generated) -> dict[str, float]:
    metrics = {} if generated.reward is None else {"reward_all": generated.reward}
    try:
        rewards = batch.session_rewards
    except FieldError:
        return metrics
    if bool(session_kept.all()) and len(rewards):
        metrics["reward_kept"] = batch.mean_reward
    elif bool(session_kept.any()):
        metrics["reward_kept"] = math.fsum(rewards[session_kept].tolist()) / int(session_kept.sum())
    return metrics
