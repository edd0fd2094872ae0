"""Merged decisions become changes of the stored batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta

from dataflex_hooks import (
    ConfigError,
    DataFlexConfig,
    Generated,
    LossCoefficients,
    MergedReward,
    MergedUpdate,
    Problem,
)
from dataflex_hooks.entries import GROUP_ESTIMATORS
from dataflex_hooks.keep import lone_rows
from dataflex_verl import added_passes, bridge, drop, group_advantages
from dataflex_verl.added_checks import TokenRow
from dataflex_verl.deal import fill
from dataflex_verl.drop_checks import shuffle_problem, shuffled
from dataflex_verl.estimators import why_no_group_advantages

_log = logging.getLogger("dataflex_verl")


@dataclass
class StepState:
    """What one update has been decided so far.

    Attributes:
        generated: the step before anything was dropped, None while nothing has looked.
        resized: rows have left the batch or come to it, and are spread evenly over its mini-batches.
        added: rows have come to it.
        skip_update: no optimizer step is to be made.
        fill: factor by row key that makes up for uneven mini-batches, None without any.
        advantages: to write after verl's estimator, None to leave its own.
    """

    generated: Generated | None = None
    resized: bool = False
    added: bool = False
    skip_update: bool = False
    fill: dict[str, float] | None = None
    advantages: group_advantages.GroupAdvantages | None = None


def apply_reward(
    batch: KVBatchMeta,
    rows: bridge.FetchedRows,
    merged: MergedReward,
    state: StepState,
    config: DictConfig,
    added: Mapping[str, TokenRow],
) -> tuple[KVBatchMeta, dict[str, float]]:
    """Write new rewards and take dropped rows out, before verl balances the batch.

    ``added`` are rows about to come, by key: those that name a group count in the baselines of what is left of it.

    Returns:
        The batch, and metrics of what the drop made necessary.
    """
    view = rows.view
    state.skip_update = merged.skip_update
    if merged.rewards is not None:
        view = view.with_token_field("rm_scores", merged.rewards)
        batch = bridge.write_field(batch, "rm_scores", rows.of(merged.rewards))
    if merged.row_keep is None:
        return batch, {}
    refuse_shuffle(config)
    keep, lone = merged.row_keep, lone_rows(view, merged.row_keep)
    why_not = why_no_group_advantages(config)
    over = merged.advantages or ("kept" if why_not else "group")
    if over == "group" and why_not:
        raise ConfigError([Problem("RewardDecision.advantages", over, f"'kept': {why_not}")])
    if str(config.algorithm.adv_estimator) not in GROUP_ESTIMATORS:
        lone = torch.zeros_like(lone)
    metrics = {"dataflex/lone_rows": float(lone.sum())}
    if over == "group" or (bool(lone.any()) and not why_not):
        only = keep if over == "group" else lone
        # Rows that join a group have the baseline of that group's rows: in the others, verl's over what is left.
        groups = set(view.uid[only.cpu().numpy()]) if over == "kept" else set(view.uid)
        joined = {key: row for key, row in added.items() if row.uid in groups}
        state.advantages = group_advantages.compute(config, rows.keys, view, only.numpy(), joined)
    elif bool(lone.any()):
        # verl would hand a group of one its raw reward as advantage, and there is no baseline to give it instead.
        keep = keep & ~lone
        if not bool(keep.any()):
            state.skip_update = True
            return batch, metrics
    state.resized = True
    return drop.drop(batch, _by_position(batch, rows.keys, keep)), metrics


def apply_update(
    batch: KVBatchMeta,
    rows: bridge.FetchedRows,
    merged: MergedUpdate,
    state: StepState,
    settings: DataFlexConfig,
    coefficients: LossCoefficients,
    shape: Callable[[], drop.Shape],
    config: DictConfig,
) -> tuple[KVBatchMeta, dict[str, float]]:
    """Take dropped rows out and write masks and weights, before the critic and the actor are updated.

    Returns:
        The batch, and metrics of how mini-batches were made up for.
    """
    weights, factor = rows.of(merged.weights), rows.verl_weights
    changed, metrics = merged.changed, {}
    if settings.apply_to == "advantages":
        factor = rows.view.values("advantages")
    keep = merged.in_batch
    if keep is not None:
        refuse_shuffle(config)
        batch = drop.drop_padded(batch, _by_position(batch, rows.keys, keep), shape())
        factor = None if factor is None else factor[rows.view.expand_rows(keep)]
        weights, state.resized = weights.select(keep), True
    if merged.excluded is not None:
        out = merged.excluded if keep is None else merged.excluded & keep
        mask = rows.of(rows.view.values("response_mask")).select(out)
        batch = bridge.write_field(batch, "response_mask", mask.times(torch.zeros(len(mask.keys))))
    if state.added:
        weights, factor = added_passes.join(batch, weights, factor, merged.update_scale, settings.apply_to)
    if state.resized and coefficients.divides_by_rows:
        filled, metrics = _fill(batch, weights.keys, shape(), settings.max_fill)
        weights, changed = weights.times(filled), changed or bool((filled != 1).any())
        state.fill = dict(zip(weights.keys, filled.tolist(), strict=True))
    if not changed:
        return batch, metrics
    if factor is not None:
        weights = weights.times_values(factor)
    if settings.apply_to == "advantages":
        return bridge.write_field(batch, "advantages", weights), metrics
    return bridge.write_weights(batch, weights), metrics


def refuse_shuffle(config: DictConfig) -> None:
    """Raise ConfigError if verl would shuffle rows over mini-batches again; a plugin may drop without declaring it."""
    if names := shuffled(config):
        raise ConfigError([shuffle_problem(name) for name in names])


def _fill(batch: KVBatchMeta, keys: list[str], shape: drop.Shape, most: float) -> tuple[torch.Tensor, dict[str, float]]:
    real = drop.is_real(batch)
    if shape.actor_mini is None:
        return torch.ones(len(keys)), {}
    factors, cut = fill(real, shape.layout(len(batch)), shape.actor_mini, most)
    if cut:
        _log.warning("%d mini-batch(es) have less than 1/%g of their rows: their step is smaller than meant", cut, most)
    by_key = dict(zip(batch.keys, factors.tolist(), strict=True))
    filled = torch.tensor([by_key[key] for key in keys], dtype=torch.float64)
    metrics = {"dataflex/fill_largest": float(factors[real].max(initial=1.0)), "dataflex/fill_cut": float(cut)}
    return filled, metrics


def _by_position(batch: KVBatchMeta, keys: list[str], keep: torch.Tensor) -> list[bool]:
    stays = {key for key, kept in zip(keys, keep.tolist(), strict=True) if kept} | set(added_passes.added_keys(batch))
    return [key in stays for key in batch.keys]
