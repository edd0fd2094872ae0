"""What is logged about a merged update.

verl guesses how to reduce a metric from "max", "min", "sum" and "total" in its name; no fixed part of a name holds
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.errors import FieldError
from dataflex_hooks.resolve import ResolvedUpdate
from dataflex_hooks.segments import segment_sum


def exact_sum(values: Tensor, batch: RolloutBatch) -> float:
    """Sum (T,) values over the batch, rounded once over rows, so that the order of rows cannot change a bit."""
    return math.fsum(segment_sum(values, batch.row_of_token, batch.bs).tolist())


def update_metrics(
    decisions: Sequence[ResolvedUpdate], weights: Tensor, kept: Tensor, coefficient: Tensor, batch: RolloutBatch
) -> dict[str, float]:
    """Describe the merged ``weights`` (T,) and each plugin's part in them.

    ``kept_frac``: share of sessions with a kept token; ``kept_tokens_frac``: of valid tokens. ``weight_mean``: mean
    over all valid tokens under the loss coefficients, the factor on the policy-gradient loss; ``weight_std`` likewise,
    ``weight_kept_mean`` over kept tokens only, ``weight_largest``. ``ess_frac``: (sum w)^2 / (n sum w^2) over rows.
    ``reward_all``, ``reward_kept``: mean reward of all and of kept sessions, where rewards are in the batch and any
    session is kept. Per plugin: ``<label>/kept_frac`` and ``<label>/masked_rows/<reason>`` (a count) of its own mask,
    ``<label>/weight_mean`` and ``<label>/weight_std`` of its weights as given.
    """
    valid = batch.response_mask
    session_kept = _sessions_with(kept, batch)
    merged = weights.to(torch.float64)
    mean, std = _mean_and_std(merged, coefficient, batch)
    metrics = {
        "kept_frac": _share(session_kept),
        "kept_tokens_frac": int(kept.sum()) / max(1, int(valid.sum())),
        "weight_mean": mean,
        "weight_std": std,
        "weight_kept_mean": _mean_and_std(merged, torch.where(kept, coefficient, 0.0), batch)[0],
        "weight_largest": float(weights.max()) if len(weights) else 0.0,
        "ess_frac": _effective_share(batch.mean_over_tokens(weights).to(torch.float64)),
        **_reward_metrics(session_kept, batch),
    }
    for decision in decisions:
        if decision.keep is not None:
            keep = decision.keep if decision.keep_per_token else batch.expand_rows(decision.keep)
            own = keep & valid
            metrics[f"{decision.label}/kept_frac"] = _share(_sessions_with(own, batch))
            if decision.reason:
                rows = torch.bincount(batch.row_of_token[own], minlength=batch.bs)
                metrics[f"{decision.label}/masked_rows/{decision.reason}"] = float((rows == 0).sum())
        if decision.factor is not None:
            factor = decision.factor if decision.factor_per_token else batch.expand_rows(decision.factor)
            mean, std = _mean_and_std(factor, coefficient, batch)
            metrics[f"{decision.label}/weight_mean"] = mean
            metrics[f"{decision.label}/weight_std"] = std
    return {f"dataflex/{name}": value for name, value in metrics.items()}


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


def _reward_metrics(session_kept: Tensor, batch: RolloutBatch) -> dict[str, float]:
    try:
        rewards = batch.session_rewards
    except FieldError:
        return {}
    metrics = {"reward_all": math.fsum(rewards.tolist()) / max(1, len(rewards))}
    if bool(session_kept.any()):
        metrics["reward_kept"] = math.fsum(rewards[session_kept].tolist()) / int(session_kept.sum())
    return metrics
