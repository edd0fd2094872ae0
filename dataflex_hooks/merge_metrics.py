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
from dataflex_hooks.merge_reward import Generated
from dataflex_hooks.metric_names import label_metric
from dataflex_hooks.resolve import ResolvedUpdate
from dataflex_hooks.segments import segment_sum


def exact_sum(values: Tensor, batch: RolloutBatch) -> float:
    """Sum (T,) values over the batch, rounded once over rows, so that the order of rows cannot change a bit."""
    return math.fsum(segment_sum(values, batch.row_of_token, batch.bs).tolist())


def update_metrics(
    decisions: Sequence[ResolvedUpdate],
    weights: Tensor,
    kept: Tensor,
    coefficient: Tensor,
    batch: RolloutBatch,
    generated: Generated,
) -> dict[str, float]:
    """Describe the merged ``weights`` (T,) and each plugin's part in them.

    ``kept_frac``: share of the generated sessions with a kept token, ``kept_groups_frac`` of the groups,
    ``kept_tokens_frac`` of the valid tokens in the batch. ``weight_mean``: mean over all valid tokens under the loss
    coefficients, the factor on the policy-gradient loss; ``weight_std`` likewise, ``weight_kept_mean`` over kept tokens
    only, ``weight_largest``. ``ess_frac``: (sum w)^2 / (n sum w^2) over rows. ``reward_all``, ``reward_kept``: mean
    reward of all generated and of kept sessions, where rewards are in the batch and any session is kept. Per plugin:
    ``<label>/kept_frac`` of its own mask and drop, ``<label>/masked_rows_total/<reason>`` and
    ``<label>/dropped_rows_total/<reason>`` (counts), ``<label>/weight_mean``, ``<label>/weight_std`` of its weights as
    given.
    """
    valid = batch.response_mask
    session_kept = _sessions_with(kept, batch)
    group_kept = torch.bincount(batch.group[batch.row_of_token[kept]], minlength=batch.n_groups) > 0
    merged = weights.to(torch.float64)
    mean, std = _mean_and_std(merged, coefficient, batch)
    merged_metrics = {
        "kept_frac": int(session_kept.sum()) / max(1, generated.rollouts),
        "kept_groups_frac": int(group_kept.sum()) / max(1, generated.groups),
        "kept_tokens_frac": int(kept.sum()) / max(1, int(valid.sum())),
        "weight_mean": mean,
        "weight_std": std,
        "weight_kept_mean": _mean_and_std(merged, torch.where(kept, coefficient, 0.0), batch)[0],
        "weight_largest": float(weights.max()) if len(weights) else 0.0,
        "ess_frac": _effective_share(batch.mean_over_tokens(weights).to(torch.float64)),
        **_reward_metrics(session_kept, batch, generated),
    }
    metrics = {f"dataflex/{name}": value for name, value in merged_metrics.items()}
    for decision in decisions:
        if decision.mask is not None or decision.keep is not None:
            metrics |= _own_metrics(decision, batch)
        if decision.factor is not None:
            factor = decision.factor if decision.factor_per_token else batch.expand_rows(decision.factor)
            mean, std = _mean_and_std(factor, coefficient, batch)
            metrics[label_metric(decision.label, "weight_mean")] = mean
            metrics[label_metric(decision.label, "weight_std")] = std
    return metrics


def neutral_metrics(batch: RolloutBatch, generated: Generated) -> dict[str, float]:
    """What :func:`update_metrics` says of an update that nobody decided anything about, without looking at tokens."""
    has_valid = batch.n_valid > 0
    session_kept = torch.zeros(batch.n_sessions, dtype=torch.bool, device=has_valid.device)
    session_kept[batch.session[has_valid]] = True
    group_kept = torch.zeros(batch.n_groups, dtype=torch.bool, device=has_valid.device)
    group_kept[batch.group[has_valid]] = True
    any_valid = float(bool(has_valid.any()))
    metrics = {
        "kept_frac": int(session_kept.sum()) / max(1, generated.rollouts),
        "kept_groups_frac": int(group_kept.sum()) / max(1, generated.groups),
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
    own, metrics = batch.response_mask, {}
    if decision.mask is not None:
        own = own & (decision.mask if decision.mask_per_token else batch.expand_rows(decision.mask))
        rows = torch.bincount(batch.row_of_token[own], minlength=batch.bs)
        metrics[label_metric(decision.label, "masked_rows_total", decision.reason)] = float((rows == 0).sum())
    if decision.keep is not None:
        own = own & batch.expand_rows(decision.keep)
        metrics[label_metric(decision.label, "dropped_rows_total", decision.reason)] = float((~decision.keep).sum())
    named = metrics if decision.reason else {}
    named[label_metric(decision.label, "kept_frac")] = _share(_sessions_with(own, batch))
    return named


def _sessions_with(tokens: Tensor, batch: RolloutBatch) -> Tensor:
    """(n_sessions,) bool: sessions that have one of the marked (T,) tokens."""
    return torch.bincount(batch.session[batch.row_of_token[tokens]], minlength=batch.n_sessions) > 0


def _share(marked: Tensor) -> float:
    return int(marked.sum()) / max(1, len(marked))


def _mean_and_std(values: Tensor, coefficient: Tensor, batch: RolloutBatch) -> tuple[float, float]:
    norm = exact_sum(coefficient, batch)
    if norm == 0.0:
        return 0.0, 0.0
    mean = exact_sum(coefficient * values, batch) / norm
    return mean, math.sqrt(exact_sum(coefficient * (values - mean) ** 2, batch) / norm)


def _effective_share(row_weights: Tensor) -> float:
    squares = math.fsum((row_weights**2).tolist())
    return math.fsum(row_weights.tolist()) ** 2 / (len(row_weights) * squares) if squares else 0.0


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
