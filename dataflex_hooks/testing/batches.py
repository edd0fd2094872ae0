"""Builders of rollout batches: out of rows, out of groups of rewards, or at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, ROW_COLUMN
from dataflex_hooks.segments import segment_mean

PerToken = float | tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One model output. Values per token are given as a tuple; a single number stands for every token.

    Attributes:
        uid: of its group; rows of one prompt share it.
        session, output: number of the rollout in its group, and of the output in that rollout.
        length: response tokens.
        reward: raw outcome reward; lies on the last token.
        advantage, log_prob: ``advantages`` and ``old_log_probs``.
        mask: ``response_mask``: 0 for tokens that the model did not write.
        tokens, prompt: token ids; None makes some up, the same for the same group, session and output.
        domain: in the columns ``domain``, ``data_source`` and ``dataflex_domain``.
    """

    uid: str
    session: int = 0
    output: int = 0
    length: int = 2
    reward: float = 0.0
    advantage: PerToken = 0.0
    log_prob: PerToken = -0.5
    mask: int | tuple[int, ...] = 1
    tokens: tuple[int, ...] | None = None
    prompt: tuple[int, ...] | None = None
    domain: str = "math"


def make_batch(
    rows: Sequence[Row],
    *,
    columns: Mapping[str, Any] | None = None,
    token_fields: Mapping[str, Tensor] | None = None,
    without: Sequence[str] = (),
) -> RolloutBatch:
    """Build a batch out of rows.

    Args:
        rows: in batch order.
        columns: more columns, each of length bs.
        token_fields: more jagged values, each (T,), or others in place of those built from the rows.
        without: names of token fields, columns, or ``"prompts"``, to leave out.

    Returns:
        Token fields ``response_mask``, ``responses``, ``rm_scores``, ``advantages``, ``old_log_probs``; prompts; the
        columns ``domain``, ``data_source``, ``dataflex_domain``, ``dataflex_row`` (a number a group) and those given.

    Raises:
        ValueError: lengths that do not agree.
    """
    _check_lengths(rows)
    number = {uid: place for place, uid in enumerate(sorted({row.uid for row in rows}))}
    seeds = [100 + 7 * number[row.uid] for row in rows]
    responses = [
        row.tokens or tuple(1000 * row.session + 10 * row.output + seed + t for t in range(row.length))
        for row, seed in zip(rows, seeds, strict=True)
    ]
    prompts = [row.prompt or (seed, 5) for row, seed in zip(rows, seeds, strict=True)]
    scores = [[0.0] * (row.length - 1) + [row.reward] for row in rows]
    fields: dict[str, Tensor] = {
        "response_mask": _per_token(rows, "mask", torch.int64),
        "responses": torch.tensor([token for tokens in responses for token in tokens], dtype=torch.int64),
        "rm_scores": torch.tensor([s for row, of in zip(rows, scores, strict=True) for s in of[: row.length]]),
        "advantages": _per_token(rows, "advantage", torch.float32),
        "old_log_probs": _per_token(rows, "log_prob", torch.float32),
        **(token_fields or {}),
    }
    domains = [row.domain for row in rows]
    named = dict.fromkeys(("domain", "data_source", DOMAIN_COLUMN), domains)
    all_columns = {**named, ROW_COLUMN: [number[row.uid] for row in rows], **(columns or {})}
    return RolloutBatch(
        keys=[f"{row.uid}_{row.session}_{row.output}" for row in rows],
        offsets=_offsets([row.length for row in rows]),
        fields={name: column for name, column in all_columns.items() if name not in without},
        token_fields={name: values for name, values in fields.items() if name not in without},
        prompts=None if "prompts" in without else (_tokens(prompts), _offsets([len(tokens) for tokens in prompts])),
    )


def make_groups(
    *rewards: Sequence[float],
    lengths: Any = 4,
    domains: Any = "math",
    advantages: Any = None,
    log_probs: Any = -0.5,
    masks: Any = 1,
    columns: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
) -> RolloutBatch:
    """Build a batch out of groups of rewards: ``make_groups([1, 0, 0], [1, 1], lengths=[3, 5])``.

    A group has the uid ``uid_0``, ``uid_1``, ... and a session of one output for each reward.

    Args:
        rewards: one sequence a group.
        lengths, domains, log_probs, masks: one value for all rows; or a list with one value a group; or a list with a
            list a group, one value a row. Values per token are tuples.
        advantages: likewise; None: those of GRPO, worked out from the rewards.
        columns: more columns by name, each given likewise.
        without: as for :func:`make_batch`.

    Raises:
        ValueError: a list that fits neither the groups nor their rows.
    """
    given = {
        "length": lengths,
        "domain": domains,
        "log_prob": log_probs,
        "mask": masks,
        "advantage": 0.0 if advantages is None else advantages,
    }
    spread = {name: spread_over(rewards, value, name) for name, value in given.items()}
    places = [(group, session) for group, of in enumerate(rewards) for session in range(len(of))]
    rows = [
        Row(
            uid=f"uid_{group}",
            session=session,
            reward=float(rewards[group][session]),
            **{name: values[row] for name, values in spread.items()},
        )
        for row, (group, session) in enumerate(places)
    ]
    more = {name: spread_over(rewards, value, name) for name, value in (columns or {}).items()}
    if advantages is not None:
        return make_batch(rows, columns=more, without=without)
    whole = make_batch(rows)
    return make_batch(rows, columns=more, without=without, token_fields={"advantages": grpo_advantages(whole)})


def spread_over(groups: Sequence[Sequence[Any]], value: Any, name: str) -> list[Any]:
    """Bring one value for all, one a group, or one a row to a list with one a row."""
    sizes = [len(of) for of in groups]
    if not isinstance(value, list):
        return [value] * sum(sizes)
    if len(value) != len(sizes):
        raise ValueError(f"{name} has {len(value)} entries; accepted: one value, or a list of one for each group")
    spread: list[Any] = []
    for group, (size, of_group) in enumerate(zip(sizes, value, strict=True)):
        if isinstance(of_group, list) and len(of_group) != size:
            raise ValueError(f"{name}[{group}] has {len(of_group)} entries; the group has {size} rows")
        spread += of_group if isinstance(of_group, list) else [of_group] * size
    return spread


def grpo_advantages(batch: RolloutBatch) -> Tensor:
    """Work out GRPO's advantages from the rewards, as verl does: (T,) float32, 0 where ``response_mask`` is.

    (reward - mean) / (std + 1e-6) over the sessions of a group, of which the final output's reward counts; a group of
    one has mean 0 and std 1.
    """
    rewards, group = batch.session_rewards.to(torch.float64), batch.group_of_session
    sizes = batch.sessions_per_group()
    alone = sizes == 1
    mean = torch.where(alone, 0.0, segment_mean(rewards, group, batch.n_groups).to(torch.float64))
    squares = torch.zeros(batch.n_groups, dtype=torch.float64).index_add_(0, group, (rewards - mean[group]) ** 2)
    std = torch.where(alone, 1.0, (squares / (sizes - 1).clamp(min=1)).sqrt())
    of_session = (rewards - mean[group]) / (std[group] + 1e-6)
    of_row = batch.expand_sessions(of_session.to(torch.float32))
    return batch.expand_rows(of_row) * batch.response_mask


def _check_lengths(rows: Sequence[Row]) -> None:
    # Lengths that are wrong in two rows may add up to the right number of tokens.
    for place, row in enumerate(rows):
        for name in ("mask", "advantage", "log_prob", "tokens"):
            given = getattr(row, name)
            if isinstance(given, tuple) and len(given) != row.length:
                raise ValueError(f"row {place} has {len(given)} values of {name} for length={row.length} tokens")


def _per_token(rows: Sequence[Row], name: str, dtype: torch.dtype) -> Tensor:
    values: list[float] = []
    for row in rows:
        given = getattr(row, name)
        values += given if isinstance(given, tuple) else [given] * row.length
    return torch.tensor(values, dtype=dtype)


def _tokens(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([token for tokens in rows for token in tokens], dtype=torch.int64)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
