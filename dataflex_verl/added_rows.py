"""Rows that plugins add (``RewardDecision.add``), stored beside the step's own.

An added row passes everything that a rollout's row passes: balancing, verl's log-prob passes, the update. It has a
prompt id of its own and so is in no group, unless it names one to join. :mod:`dataflex_verl.added_passes` keeps it out
of what is computed over rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from dataflex_verl.added_checks import TokenRow

ADDED = "dataflex_added"
"""Tag of an added row: its advantages (a float a response token, None for the estimator's), and whether log-probs came
and a group was named."""

_FIRST_SESSION = 1_000_000

# What a row without such content has to hold is not known; a zero would steer the update wrongly and unseen.
_REFUSED = {
    "routed_experts": "router replay needs the experts that the rollout recorded",
    "teacher_ids": "distillation needs the teacher's tokens",
    "teacher_logprobs": "distillation needs the teacher's log-probs",
}
_OF_DATASET = object()


def keyed(rows: Sequence[TokenRow], step: int, local_update: int) -> dict[str, TokenRow]:
    """Return rows by the keys they are stored under."""
    # verl splits keys at "_": the prompt id holds none. A session number that no rollout of a group has.
    prefix = f"added-{step:08d}-{local_update}"
    return {
        f"{row.uid}_{_FIRST_SESSION + number}_0" if row.uid else f"{prefix}-{number:06d}_0_0": row
        for number, row in enumerate(rows)
    }


def present(rows: Mapping[str, TokenRow], batch: KVBatchMeta) -> dict[str, TokenRow]:
    """Return the rows whose group, if they name one, is in the batch."""
    groups = {key.rsplit("_", 2)[0] for key in batch.keys}
    return {key: row for key, row in rows.items() if row.uid is None or row.uid in groups}


def put(batch: KVBatchMeta, rows: Mapping[str, TokenRow], domain_key: str) -> KVBatchMeta:
    """Store rows, by their keys, behind those of a batch that verl has not balanced yet.

    Every field that the batch's first row has is there: token fields from the row itself, ``uid`` of its own, the
    domain under ``domain_key``, dictionaries empty, tensors of the dataset 0, other columns None, the generation's
    versions as the first row's.

    Returns:
        The enlarged batch.

    Raises:
        ValueError: the run stores a field that an added row cannot have.
    """
    if not rows:
        return batch
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    template = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)[0]
    keys = list(rows)
    fields = [_fields(row, key, template, domain_key) for key, row in rows.items()]
    _refuse_per_token(batch, [name for name, value in fields[0].items() if value is _OF_DATASET])
    for field in fields:
        field.update({name: torch.zeros_like(template[name]) for name, value in field.items() if value is _OF_DATASET})
    tags = [_tag(row, batch.tags[0]) for row in rows.values()]
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(fields), tags=tags)
    return KVBatchMeta(
        keys=[*batch.keys, *keys],
        tags=[*batch.tags, *tags],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def _tag(row: TokenRow, template: Mapping[str, Any]) -> dict[str, Any]:
    tag = copy.deepcopy(dict(template))
    lengths = {"prompt_len": len(row.prompt), "response_len": len(row.response)}
    tag.update(status="success", **lengths, seq_len=sum(lengths.values()))
    tag[ADDED] = {"advantages": row.advantages, "log_probs": row.log_probs is not None, "joined": row.uid is not None}
    return tag


def _fields(row: TokenRow, key: str, template: Any, domain_key: str) -> dict[str, Any]:
    from verl.trainer.ppo.padding_utils import build_padding_position_ids

    uid, session, _ = key.rsplit("_", 2)
    prompts, responses = torch.tensor(row.prompt), torch.tensor(row.response)
    input_ids = torch.cat([prompts, responses])
    rewards = torch.zeros(len(row.response), dtype=torch.float32)
    rewards[-1] = row.reward
    log_probs = torch.tensor(row.log_probs or [0.0] * len(row.response), dtype=torch.float32)
    known: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "position_ids": build_padding_position_ids(template.get("position_ids"), torch.ones_like(input_ids)),
        "response_mask": torch.ones_like(responses),
        "loss_mask": torch.ones_like(responses),
        "rm_scores": rewards,
        "rollout_log_probs": log_probs,
        "num_turns": 2,
        "uid": uid,
        "session_id": int(session),
        domain_key: row.domain,
    }
    return {name: _field(name, template[name], known, row) for name in template.keys()}


def _field(name: str, of_template: Any, known: Mapping[str, Any], row: TokenRow) -> Any:
    if name in known:
        return known[name]
    if name in _REFUSED:
        raise ValueError(f"rows cannot be added: the run stores {name!r}, and {_REFUSED[name]}")
    if not isinstance(of_template, torch.Tensor):
        # The versions of the weights that generated the row stand in here; verl's metrics read them.
        return copy.deepcopy(of_template) if name == "extra_fields" else _empty(of_template)
    return _OF_DATASET


def _refuse_per_token(batch: KVBatchMeta, names: list[str]) -> None:
    # A tensor of the dataset has one shape in every row (verl's own ``dummy_tensor``); what varies belongs to tokens.
    if not names:
        return
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    for name in names:
        lengths = data[name].offsets().diff() if data[name].is_nested else torch.zeros(1)
        if bool((lengths != lengths[0]).any()):
            raise ValueError(f"rows cannot be added: what stands for them in the field {name!r} is not known")


def _empty(of_template: Any) -> Any:
    value = getattr(of_template, "data", of_template)
    return {} if isinstance(value, Mapping) else None
