"""verl's advantages over whole groups, for rows that are left after some of their group have been dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from dataflex_hooks import RolloutBatch
from dataflex_verl.added_checks import TokenRow
from dataflex_verl.bridge import jagged, put


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of rows by key: (|o_i|,) float32 for every response token."""

    by_key: Mapping[str, torch.Tensor]

    def restore(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Write them over what verl computed from the rows that are left; masked tokens stay 0."""
        keys = [key for key in batch.keys if key in self.by_key]
        if not keys:
            return batch
        mask = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        mask = mask["response_mask"]
        values = torch.cat([self.by_key[key] for key in keys]) * mask.values()
        nested = jagged(values, mask.offsets())
        return put(batch, keys, {"advantages": nested, "returns": nested.clone()})


def compute(
    config: DictConfig,
    keys: list[str],
    view: RolloutBatch,
    only: np.ndarray,
    joined: Mapping[str, TokenRow] | None = None,
) -> GroupAdvantages:
    """Run verl's estimator over all rows of ``view``, as verl would have without a drop.

    Args:
        config: verl's whole configuration.
        keys: of the rows of ``view``.
        view: every real row of the step, with its rewards.
        only: (bs,) bool, rows whose advantages are wanted.
        joined: rows that plugins add to these groups, by key; advantages are wanted of those that bring none.
    """
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    joined = joined or {}
    wanted = np.concatenate([only, [row.advantages is None for row in joined.values()]]).astype(bool)
    keys, view = [*keys, *joined], _enlarged(keys, view, joined)
    rewards = view.to_padded(view.values("rm_scores").to(torch.float32))
    mask = view.to_padded(view.values("response_mask"))
    fields = {
        "token_level_scores": rewards,
        "token_level_rewards": rewards,
        "rm_scores": rewards,
        "response_mask": mask,
        "responses": torch.zeros_like(mask),
    }
    data = DataProto(batch=TensorDict(fields, batch_size=view.bs))
    data.non_tensor_batch["uid"] = np.array(view.uid, dtype=object)
    algorithm = config.algorithm
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=keys,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    values = view.to_values(data.batch["advantages"]).to(torch.float32)
    rows = values.split(view.lengths.tolist())
    return GroupAdvantages({keys[i]: rows[i] for i in np.flatnonzero(wanted)})


def _enlarged(keys: list[str], view: RolloutBatch, joined: Mapping[str, TokenRow]) -> RolloutBatch:
    """The rows of ``view`` and those that join them, with what estimators of groups read."""
    if not joined:
        return view
    lengths = torch.tensor([len(row.response) for row in joined.values()])
    last = lengths.cumsum(0)
    rewards = torch.zeros(int(last[-1]))
    rewards[last - 1] = torch.tensor([row.reward for row in joined.values()])
    mask = view.values("response_mask")
    fields = {
        "rm_scores": torch.cat([view.values("rm_scores").to(torch.float32), rewards]),
        "response_mask": torch.cat([mask, torch.ones(len(rewards), dtype=mask.dtype)]),
    }
    return RolloutBatch([*keys, *joined], torch.cat([view.offsets, view.offsets[-1] + last]), {}, fields)
