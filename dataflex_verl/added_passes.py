"""Added rows on their way through verl's step: in every pass that concerns each row, out of all that compares rows.

verl's estimator, its rollout correction's batch statistics and its metrics see the rows of the rollout alone. Once a
batch is balanced, added rows carry verl's tag for padding, which is what verl's metrics and our hooks leave out; unlike
padding they have a response mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from dataflex_verl.added_rows import ADDED
from dataflex_verl.bridge import RowValues, jagged, put

Pass = Callable[[KVBatchMeta, dict], KVBatchMeta]


def added_keys(batch: KVBatchMeta) -> list[str]:
    """Keys of the added rows of a batch, in its order."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if ADDED in tag]


def mark(batch: KVBatchMeta) -> KVBatchMeta:
    """Give the added rows of a balanced batch the tag by which verl's metrics and our hooks leave padding out."""
    if not added_keys(batch):
        return batch
    return replace(batch, tags=[{**tag, "is_padding": True} if ADDED in tag else tag for tag in batch.tags])


def old_log_prob(run: Pass, batch: KVBatchMeta, metrics: dict, config: DictConfig) -> KVBatchMeta:
    """Run verl's old-log-prob pass over all rows, with its metrics over those of the rollout.

    A row that came without log-probs gets those just computed, so that verl's rollout correction is neutral for it.
    """
    own = {}
    result = run(batch, own)
    added = added_keys(batch)
    if not added:
        metrics.update(own)
        return result
    if own:
        metrics.update(own | _log_prob_metrics(_without(batch, added), config))
    bare = [
        key for key, tag in zip(batch.keys, batch.tags, strict=True) if ADDED in tag and not tag[ADDED]["log_probs"]
    ]
    stored = tq.kv_batch_get(keys=added[:1], partition_id=batch.partition_id)
    if bare and "rollout_log_probs" in stored.keys():
        data = tq.kv_batch_get(keys=bare, partition_id=batch.partition_id, select_fields=["old_log_probs"])
        put(batch, bare, {"rollout_log_probs": data["old_log_probs"].to(torch.float32)})
    return replace(result, keys=batch.keys, tags=batch.tags)


def advantage(run: Pass, batch: KVBatchMeta, metrics: dict, config: DictConfig) -> KVBatchMeta:
    """Run verl's estimator over the rows of the rollout and write the added rows' own advantages beside.

    Rows that joined a group take part in the estimator, and get their own advantages afterwards all the same; those
    that have none keep what the estimator says.

    ``returns`` are the advantages, or under a critic its own values, so that it learns nothing from added rows. verl's
    rollout correction is computed for them from their log-probs; where it is normalised over the batch, by the factor
    of the rollout's rows.
    """
    added = added_keys(batch)
    if not added:
        return run(batch, metrics)
    joined = {key for key, tag in zip(batch.keys, batch.tags, strict=True) if ADDED in tag and tag[ADDED]["joined"]}
    result = run(_without(batch, [key for key in added if key not in joined]), metrics)
    names = ["response_mask", "rm_scores", "old_log_probs", "rollout_log_probs", "values"]
    data = tq.kv_batch_get(keys=added, partition_id=batch.partition_id, select_fields=names)
    mask = data["response_mask"]
    of_row = {key: tag[ADDED]["advantages"] for key, tag in zip(batch.keys, batch.tags, strict=True) if ADDED in tag}
    of_row |= _estimated(batch, [key for key in added if of_row[key] is None])
    advantages = jagged(
        torch.tensor([value for key in added for value in of_row[key]], dtype=torch.float32), mask.offsets()
    )
    fields = {"advantages": advantages, "returns": data["values"] if "values" in data.keys() else advantages.clone()}
    if config.algorithm.use_kl_in_reward:
        fields["token_level_rewards"] = data["rm_scores"]
    fields |= _correction(data, config, metrics)
    stored = put(batch, added, fields)
    return replace(batch, fields=sorted({*(result.fields or ()), *(stored.fields or ())}), extra_info=result.extra_info)


def join(
    batch: KVBatchMeta, weights: RowValues, factor: torch.Tensor | None, update_scale: float, apply_to: str
) -> tuple[RowValues, torch.Tensor | None]:
    """Put the added rows behind those whose weights are about to be written.

    Masks and weights are decisions about rows that plugins have seen; ``update_scale`` is one about the whole gradient.

    Args:
        batch: the rows of the update.
        weights: of the rows that plugins have seen.
        factor: (T,) what is stored for these and multiplied in: verl's weights, or the advantages; None without.
        update_scale: factor on the whole gradient.
        apply_to: ``"weights"`` or ``"advantages"``.

    Returns:
        Weights and factor of both.
    """
    added = added_keys(batch)
    name = "advantages" if apply_to == "advantages" else "rollout_is_weights"
    names = ["response_mask", *([] if factor is None else [name])]
    data = tq.kv_batch_get(keys=added, partition_id=batch.partition_id, select_fields=names)
    lengths = data["response_mask"].offsets().diff()
    scale = torch.full((int(lengths.sum()),), update_scale, dtype=weights.values.dtype)
    joined = RowValues(
        [*weights.keys, *added], torch.cat([weights.lengths, lengths]), torch.cat([weights.values, scale])
    )
    return joined, factor if factor is None else torch.cat([factor, data[name].values()])


def _without(batch: KVBatchMeta, keys: list[str]) -> KVBatchMeta:
    out = set(keys)
    return batch.select_keys([key for key in batch.keys if key not in out])


def _estimated(batch: KVBatchMeta, keys: list[str]) -> dict[str, list[float]]:
    if not keys:
        return {}
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["advantages"])
    return {key: row.tolist() for key, row in zip(keys, data["advantages"].unbind(), strict=True)}


def _correction(data: TensorDict, config: DictConfig, metrics: dict) -> dict[str, torch.Tensor]:
    """What verl's rollout correction says of the added rows alone, as verl's ``_compute_advantage`` would store it."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    settings = config.algorithm.get("rollout_correction", None)
    if settings is None or settings.get("bypass_mode", False) or "rollout_log_probs" not in data.keys():
        return {}
    own = OmegaConf.create(OmegaConf.to_container(settings, resolve=True))
    own.rollout_is_batch_normalize = False
    mask = data["response_mask"]
    padded = data.select("response_mask", "old_log_probs", "rollout_log_probs").to_padded_tensor()
    corrected, _ = compute_rollout_correction_and_add_to_batch(DataProto(batch=padded), own)
    fields = {"response_mask": _from_padded(mask, corrected.batch["response_mask"])}
    if "rollout_is_weights" in corrected.batch:
        weights = _from_padded(mask, corrected.batch["rollout_is_weights"])
        if settings.get("rollout_is_batch_normalize", False):
            weights = weights / metrics["rollout_corr/rollout_is_batch_norm_factor"]
        fields["rollout_is_weights"] = weights
    return fields


def _log_prob_metrics(batch: KVBatchMeta, config: DictConfig) -> dict[str, Any]:
    """The metrics of verl's ``_compute_old_log_prob`` over ``batch``."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.debug.metrics import calculate_debug_metrics

    with_log_probs = config.actor_rollout_ref.rollout.calculate_log_probs
    names = ["entropy", "old_log_probs", "response_mask"]
    names += ["responses", "rollout_log_probs"] if with_log_probs else []
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    data = DataProto(batch=data.to_padded_tensor())
    actor = config.actor_rollout_ref.actor
    entropy = agg_loss(
        loss_mat=data.batch["entropy"],
        loss_mask=data.batch["response_mask"],
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor,
    )
    return {"actor/entropy": entropy.item(), **(calculate_debug_metrics(data) if with_log_probs else {})}


def _from_padded(like: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    lengths = like.offsets().diff()
    return jagged(padded[torch.arange(padded.shape[1]) < lengths.unsqueeze(1)], like.offsets())
