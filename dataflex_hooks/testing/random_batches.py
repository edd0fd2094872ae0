"""Batches at random that have everything a run may have: several outputs, tool tokens, all fields and columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, ROW_COLUMN
from dataflex_hooks.testing.batches import grpo_advantages


def random_batch(
    seed: int = 0,
    *,
    groups: int = 6,
    sessions: int = 4,
    outputs: int = 1,
    lengths: tuple[int, int] = (1, 12),
    domains: Sequence[str] = ("math", "code"),
    rewards: Literal["binary", "graded"] | Sequence[float] = "binary",
    tool_share: float = 0.0,
    columns: Mapping[str, Sequence[Any]] | None = None,
    row_columns: Mapping[str, Sequence[Any]] | None = None,
) -> RolloutBatch:
    """Build a batch as a run may have it; equal arguments give equal batches.

    Args:
        seed: of everything below.
        groups, sessions: how many prompts, and rollouts of each.
        outputs: the most outputs a rollout has; each has 1 to ``outputs``.
        lengths: least and most response tokens of a row; one without tokens has no reward.
        domains: each group has one of them, every name at least once where there are groups enough.
        rewards: ``"binary"`` (0 or 1), ``"graded"`` (in [0, 1]), or the values to draw from.
        tool_share: share of tokens, never a row's last, that the model did not write.
        columns: more columns of the dataset: values to draw from, one a group.
        row_columns: more columns: values to draw from, one a row.

    Returns:
        What :func:`~dataflex_hooks.testing.make_batch` gives, with advantages of GRPO, and the token fields
        ``rollout_log_probs``, ``ref_log_prob``, ``entropy``, ``values``, ``returns``, the columns ``num_turns`` and
        ``extra_fields`` (with ``reward_extra_info``: ``acc``, and ``score``, the reward).
    """
    random = np.random.default_rng(seed)
    session_group = np.repeat(np.arange(groups), sessions)
    count = random.integers(1, outputs + 1, groups * sessions)
    group = np.repeat(session_group, count)
    session = np.repeat(np.tile(np.arange(sessions), groups), count)
    output = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    # Names that do not sort as the groups stand, as verl's random ones do not.
    uids = [f"{name:08x}" for name in random.choice(2**31, size=groups, replace=False).tolist()]
    row_length = random.integers(lengths[0], lengths[1] + 1, len(group))
    offsets = np.concatenate([[0], np.cumsum(row_length)])
    mask = random.random(offsets[-1]) >= tool_share
    has_tokens = row_length > 0
    last = offsets[1:][has_tokens] - 1
    mask[last] = True

    reward = np.repeat(_rewards(random, rewards, groups * sessions), count)
    scores = np.zeros(offsets[-1])
    scores[last] = reward[has_tokens]
    prompt_length = random.integers(2, 9, groups)
    prompt_tokens = [random.integers(1, 1000, size) for size in prompt_length]
    named = np.array([*domains, *random.choice(list(domains), max(0, groups - len(domains)))])[:groups]
    names = random.permutation(named)[group].astype(object)
    log_probs = -random.gamma(1.0, 0.5, offsets[-1])
    token_fields = {
        "response_mask": torch.from_numpy(mask.astype(np.int64)),
        "responses": torch.from_numpy(random.integers(1, 1000, offsets[-1])),
        "rm_scores": _floats(scores),
        "rollout_log_probs": _floats(log_probs),
        "old_log_probs": _floats(log_probs + random.normal(0.0, 0.01, offsets[-1])),
        "ref_log_prob": _floats(log_probs + random.normal(0.0, 0.05, offsets[-1])),
        "entropy": _floats(random.gamma(1.0, 0.5, offsets[-1])),
        "values": _floats(random.normal(0.5, 0.2, offsets[-1])),
    }
    per_group = {name: _draw(random, values, groups)[group] for name, values in (columns or {}).items()}
    per_row = {name: _draw(random, values, len(group)) for name, values in (row_columns or {}).items()}
    infos = [{"reward_extra_info": {"acc": float(r > 0.5), "score": float(r)}} for r in reward]
    plain = RolloutBatch(
        keys=[f"{uids[g]}_{s}_{o}" for g, s, o in zip(group, session, output, strict=True)],
        offsets=torch.from_numpy(offsets),
        fields={
            "domain": names,
            "data_source": names,
            DOMAIN_COLUMN: names,
            ROW_COLUMN: random.choice(10_000, size=groups, replace=False)[group],
            "num_turns": random.integers(1, 4, len(group)),
            "extra_fields": infos,
            **per_group,
            **per_row,
        },
        token_fields=token_fields,
        prompts=(
            torch.from_numpy(np.concatenate([prompt_tokens[g] for g in group])),
            torch.from_numpy(np.concatenate([[0], np.cumsum(prompt_length[group])])),
        ),
    )
    advantages = grpo_advantages(plain)
    return plain.with_token_field("advantages", advantages).with_token_field("returns", advantages.clone())


def _rewards(random: np.random.Generator, kind: Literal["binary", "graded"] | Sequence[float], n: int) -> Any:
    if kind == "binary":
        return random.integers(0, 2, n).astype(np.float64)
    if kind == "graded":
        return random.random(n)
    return random.choice(np.array(kind, dtype=np.float64), n)


def _draw(random: np.random.Generator, values: Sequence[Any], n: int) -> Any:
    pool = np.empty(len(values), dtype=object)
    pool[:] = list(values)
    return pool[random.integers(0, len(values), n)]


def _floats(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))
