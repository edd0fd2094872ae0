"""Rows that plugins add (``RewardDecision.add``): checked, tokenised, and stored beside the step's own.

An added row passes everything that a rollout's row passes: balancing, verl's log-prob passes, the update. It has a
prompt id of its own and so is in no group, unless it names one to join. :mod:`dataflex_verl.added_passes` keeps it out
of what is computed over rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta

from dataflex_hooks import AddedRow, DecisionError, Origin

ADDED = "dataflex_added"
"""Tag of an added row: its advantages (a float a response token), and whether log-probs came and a group was named."""

_FIRST_SESSION = 1_000_000

# What a row without such content has to hold is not known; a zero would steer the update wrongly and unseen.
_REFUSED = {
    "routed_experts": "router replay needs the experts that the rollout recorded",
    "teacher_ids": "distillation needs the teacher's tokens",
    "teacher_logprobs": "distillation needs the teacher's log-probs",
}
_OF_DATASET = object()


@dataclass(frozen=True)
class Limits:
    """What rows have to keep to.

    Attributes:
        prompt, response: most tokens.
        vocabulary: token ids are below this.
        log_probs: whether rows of the run have the log-probs of the policy that wrote them.
        bypass: verl takes these for its old log-probs (``rollout_correction.bypass_mode``) and computes none.
    """

    prompt: int
    response: int
    vocabulary: int
    log_probs: bool
    bypass: bool

    @classmethod
    def of(cls, config: DictConfig, tokenizer: Any) -> Limits:
        """Read them from verl's configuration."""
        correction = config.algorithm.get("rollout_correction", None)
        return cls(
            prompt=config.data.max_prompt_length,
            response=config.data.max_response_length,
            vocabulary=len(tokenizer),
            log_probs=bool(config.actor_rollout_ref.rollout.calculate_log_probs),
            bypass=bool(correction and correction.get("bypass_mode", False)),
        )


@dataclass(frozen=True)
class TokenRow:
    """A checked row: token ids, an advantage for every response token, log-probs if given."""

    prompt: list[int]
    response: list[int]
    advantages: list[float]
    reward: float
    domain: str | None
    log_probs: list[float] | None
    uid: str | None


def resolve(
    add: Iterable[tuple[str, AddedRow]],
    limits: Limits,
    tokenizer: Any,
    groups: Collection[str],
    origin_of: Callable[[str], Origin],
) -> list[TokenRow]:
    """Check rows and bring them to token ids.

    Text is tokenised as it stands: no chat template, no special tokens but those written in it, no end of sequence.

    Args:
        add: label of the plugin and row, as merged.
        limits: of the run.
        tokenizer: the policy's.
        groups: uids of the groups in the batch.
        origin_of: what an error says about a plugin, by its label.

    Raises:
        DecisionError: a row is unusable; names the plugin, the number of the row among the plugin's, and the value.
    """
    rows: list[TokenRow] = []
    numbers: dict[str, int] = {}
    for label, given in add:
        number = numbers[label] = numbers.get(label, -1) + 1
        try:
            rows.append(_resolve(given, limits, tokenizer, groups))
        except ValueError as error:
            raise DecisionError(origin_of(label), f"add[{number}]: {error}") from None
    return rows


def _resolve(given: AddedRow, limits: Limits, tokenizer: Any, groups: Collection[str]) -> TokenRow:
    prompt = _tokens("prompt", given.prompt, limits.prompt, "data.max_prompt_length", limits, tokenizer)
    response = _tokens("response", given.response, limits.response, "data.max_response_length", limits, tokenizer)
    if given.advantage is None:
        raise ValueError("advantage is None; accepted: a number, or one for every response token")
    advantages = _numbers("advantage", given.advantage, len(response))
    (reward,) = _numbers("reward", given.reward, 1)
    log_probs = None if given.log_probs is None else _numbers("log_probs", list(given.log_probs), len(response))
    if log_probs is None and limits.bypass:
        raise ValueError(
            "log_probs is None; accepted: one for every response token, since "
            "algorithm.rollout_correction.bypass_mode=True makes them the old log-probs of the loss"
        )
    if log_probs is not None and not limits.log_probs:
        raise ValueError(
            "log_probs are given, and with actor_rollout_ref.rollout.calculate_log_probs=False verl has no use for "
            "them: set it True, or leave log_probs out"
        )
    if log_probs is not None and max(log_probs) > 0:
        raise ValueError(f"log_probs holds {max(log_probs)!r}; accepted: log-probabilities, at most 0")
    if given.domain is not None and not isinstance(given.domain, str):
        raise ValueError(f"domain is {given.domain!r}; accepted: a name or None")
    if given.uid is not None and given.uid not in groups:
        raise ValueError(f"uid is {given.uid!r}; accepted: None, or the uid of a group that is in the batch")
    return TokenRow(prompt, response, advantages, reward, given.domain, log_probs, given.uid)


def _tokens(
    part: str, given: str | Sequence[int], most: int, setting: str, limits: Limits, tokenizer: Any
) -> list[int]:
    if isinstance(given, str):
        tokens = list(tokenizer.encode(given, add_special_tokens=False))
    else:
        try:
            tokens = [int(token) for token in given]
            exact = all(int(token) == token for token in given)
        except (TypeError, ValueError):
            exact = False
        if not exact:
            raise ValueError(f"{part} is {given!r}; accepted: text, or token ids as integers")
    if not tokens:
        raise ValueError(f"{part} is empty; accepted: at least one token")
    if len(tokens) > most:
        raise ValueError(f"{part} has {len(tokens)} tokens; accepted: at most {setting}={most}")
    wrong = [token for token in tokens if not 0 <= token < limits.vocabulary]
    if wrong:
        raise ValueError(f"{part} holds token id {wrong[0]}; accepted: 0 to {limits.vocabulary - 1}, the vocabulary")
    return tokens


def _numbers(part: str, given: Any, length: int) -> list[float]:
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    try:
        values = [float(value) for value in given] if hasattr(given, "__len__") else [float(given)] * length
    except (TypeError, ValueError):
        raise ValueError(f"{part} is {given!r}; accepted: numbers") from None
    if len(values) != length:
        raise ValueError(f"{part} has {len(values)} values; accepted: {length}, one for every response token")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"{part} holds NaN or an infinity; accepted: finite numbers")
    return values


def put(batch: KVBatchMeta, rows: Sequence[TokenRow], step: int, local_update: int, domain_key: str) -> KVBatchMeta:
    """Store rows behind those of a batch that verl has not balanced yet.

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
    # verl splits keys at "_": the prompt id holds none.
    uids = [row.uid or f"added-{step:08d}-{local_update}-{number:06d}" for number, row in enumerate(rows)]
    # A session number that no rollout of the group has.
    sessions = [_FIRST_SESSION + number if row.uid else 0 for number, row in enumerate(rows)]
    keys = [f"{uid}_{session}_0" for uid, session in zip(uids, sessions, strict=True)]
    fields = [_fields(*row, template, domain_key) for row in zip(rows, uids, sessions, strict=True)]
    _refuse_per_token(batch, [name for name, value in fields[0].items() if value is _OF_DATASET])
    for field in fields:
        field.update({name: torch.zeros_like(template[name]) for name, value in field.items() if value is _OF_DATASET})
    tags = [_tag(row, batch.tags[0]) for row in rows]
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


def _fields(row: TokenRow, uid: str, session: int, template: Any, domain_key: str) -> dict[str, Any]:
    from verl.trainer.ppo.padding_utils import build_padding_position_ids

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
        "session_id": session,
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
