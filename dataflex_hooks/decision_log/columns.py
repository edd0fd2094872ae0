"""One update of a run as a table: a row a rollout, whole columns at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import RolloutBatch
from dataflex_hooks.decision_log.rows import own_keep, row_weights
from dataflex_hooks.decision_log.schema import Labels
from dataflex_hooks.decision_log.states import judge
from dataflex_hooks.domain_stats import ROW_COLUMN
from dataflex_hooks.merge import MergedUpdate
from dataflex_hooks.merge_reward import MergedReward
from dataflex_hooks.segments import row_sum

Array = NDArray[Any]
_INFO = "reward_extra_info"
_NUMERIC = (bool, int, float, np.bool_, np.integer, np.floating)


@dataclass
class UpdateRecord:
    """What the host noted of one update.

    Attributes:
        step, update: global step, and update within it.
        applied: False in shadow mode.
        rewarded: all rows of the rollout, as ``post_reward`` saw them.
        reward: what was decided about them.
        advantaged: the rows at ``post_advantage``, in any order; None if the update never came there.
        decided: what was decided about those.
        skip_update: no optimizer step was made.
        fill: factor by row key that made up for uneven mini-batches.
        evicted: rows that verl's filter evicted before.
    """

    step: int
    update: int
    applied: bool
    rewarded: RolloutBatch
    reward: MergedReward
    advantaged: RolloutBatch | None = None
    decided: MergedUpdate | None = None
    skip_update: bool = False
    fill: Mapping[str, float] | None = None
    evicted: list[RolloutBatch] = field(default_factory=list)


def schema(labels: Labels) -> Any:
    """The Arrow schema of a log."""
    lists = {"list<uint8>": pa.list_(pa.uint8()), "list<float32>": pa.list_(pa.float32())}
    return pa.schema([(c.name, lists.get(c.type) or pa.type_for_alias(c.type)) for c in labels.columns()])


def signal_keys(batch: RolloutBatch) -> tuple[str, ...]:
    """Names of the numbers that the reward function returned beside the reward, as far as every row has them."""
    infos = _infos(batch)
    if not infos:
        return ()
    keys = [key for key, value in infos[0].items() if isinstance(value, _NUMERIC)]
    return tuple(sorted(str(key) for key in keys if all(isinstance(info.get(key), _NUMERIC) for info in infos)))


def table(
    record: UpdateRecord, labels: Labels, domain_columns: Sequence[str], shares: Mapping[str, float] | None = None
) -> Any:
    """Lay out one update.

    Args:
        record: what the host noted.
        labels: which columns there are.
        domain_columns: where a row's domain stands, first come first served.
        shares: proportion in force by domain, None without a mixer.

    Returns:
        A ``pyarrow.Table``: evicted rows, rows of the rollout in the order of ``post_reward``, added rows.
    """
    kind = schema(labels)
    parts = []
    for batch in record.evicted:
        own = {**_facts_of(batch, domain_columns, labels), "state": _text("evicted", batch.bs)}
        parts.append(_fill_up(kind, batch.bs, {**own, "why": _text("verl: filter_groups", batch.bs)}))
    parts.append(_fill_up(kind, record.rewarded.bs, _generated(record, labels, domain_columns)))
    if record.reward.add:
        parts.append(_fill_up(kind, len(record.reward.add), _added(record.reward)))
    whole = pa.concat_tables(parts)
    n = whole.num_rows
    common = {
        "step": pa.array(np.full(n, record.step, dtype=np.int32)),
        "update": pa.array(np.full(n, record.update, dtype=np.int32)),
        "skip_update": pa.array(np.full(n, record.skip_update)),
    }
    if shares is not None:
        common["proportion"] = _shares(whole["domain"], shares)
    for name, values in common.items():
        whole = whole.set_column(kind.get_field_index(name), kind.field(name), values.cast(kind.field(name).type))
    return whole


def _fill_up(kind: Any, n: int, columns: Mapping[str, Any]) -> Any:
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(n, field.type) for field in kind
    ]
    return pa.Table.from_arrays(arrays, schema=kind)


def _generated(record: UpdateRecord, labels: Labels, domain_columns: Sequence[str]) -> dict[str, Any]:
    batch, reward = record.rewarded, record.reward
    columns = _facts_of(batch, domain_columns, labels)
    if reward.rewards is not None:
        columns["new_reward"] = _numbers(row_sum(reward.rewards, batch.offsets).to(torch.float32))
    place = _places(batch, record.advantaged)
    verdict = judge(record, place)
    columns["state"], columns["why"] = verdict.state, verdict.why
    columns.update(_said(reward.decisions, batch))
    if record.advantaged is None or record.decided is None:
        return columns
    there = pa.array(place, mask=place < 0)
    for name, values in _at_update(record.advantaged, record.decided, labels).items():
        later = values.take(there)
        columns[name] = later if name not in columns else _first(later, columns[name])
    # A dropped row has no weight, also where shadow mode leaves it in the batch.
    columns["weight"] = _where(verdict.in_update, columns["weight"])
    if record.fill is not None:
        factors = np.array([record.fill.get(key, 1.0) for key in batch.keys], dtype=np.float32)
        columns["fill"] = pa.array(factors, mask=~verdict.in_update)
    return columns


def _facts_of(batch: RolloutBatch, domain_columns: Sequence[str], labels: Labels) -> dict[str, Any]:
    """What is known of rows when their rewards are."""
    names, code = np.unique(batch.uid.astype(str), return_inverse=True)
    columns = {
        "uid": _coded(code.reshape(-1), names),
        "session": _numbers(batch.session_number),
        "output": _numbers(batch.output_index),
        "reward": _numbers(batch.rewards),
        "response_tokens": _numbers(batch.lengths),
        "valid_tokens": _numbers(batch.n_valid),
    }
    there = set(batch.field_names)
    domain = next((name for name in domain_columns if name in there), None)
    if domain is not None:
        names, code = np.unique(batch.column(domain).astype(str), return_inverse=True)
        columns["domain"] = _coded(code.reshape(-1), names)
    if ROW_COLUMN in there:
        columns["dataset_row"] = pa.array(batch.column(ROW_COLUMN).astype(np.int64))
    if {"prompts", "responses"} <= there:
        columns["prompt_hash"], columns["response_hash"] = pa.array(batch.prompt_hash), pa.array(batch.response_hash)
        columns["prompt_tokens"] = _numbers(batch.prompt_lengths)
    if labels.signals:
        infos = _infos(batch)
        for key in labels.signals:
            columns[f"signal_{key}"] = pa.array(_signal([info.get(key) for info in infos] or [None] * batch.bs))
    return columns


def _at_update(batch: RolloutBatch, decided: MergedUpdate, labels: Labels) -> dict[str, Any]:
    """What is known of the rows that came as far as ``post_advantage``, in their order there."""
    columns = {
        "loss_tokens": _numbers(batch.n_valid),
        "weight": _numbers(row_weights(batch, decided)),
        **_said(decided.decisions, batch),
    }
    there = set(batch.field_names)
    if "advantages" in there:
        columns["advantage"] = _numbers(batch.mean_over_tokens(batch.values("advantages")))
        columns["abs_advantage"] = _numbers(batch.magnitude("advantages"))
    if labels.tokens:
        ends = pa.array(batch.offsets.cpu().numpy().astype(np.int32))
        for name in ("response_mask", "advantages", "old_log_probs", "entropy"):
            if name in there:
                kind = torch.uint8 if name == "response_mask" else torch.float32
                values = batch.values(name).detach().to(kind).cpu().contiguous().numpy()
                columns[name] = pa.ListArray.from_arrays(ends, pa.array(values))
    return columns


def _said(decisions: Sequence[Any], batch: RolloutBatch) -> dict[str, Any]:
    """Score, keep and own weight of each plugin that decided."""
    columns = {}
    for decision in decisions:
        label = decision.label
        if decision.scores is not None:
            columns[f"score_{label}"] = _numbers(decision.scores.to(torch.float32))
        kept = own_keep(decision, batch)
        if kept is not None:
            columns[f"keep_{label}"] = _numbers(kept)
        factor = getattr(decision, "factor", None)
        if factor is not None:
            own = batch.mean_over_tokens(factor) if decision.factor_per_token else factor
            columns[f"factor_{label}"] = _numbers(own.to(torch.float32))
    return columns


def _added(reward: MergedReward) -> dict[str, Any]:
    rows = [row for _, row in reward.add]
    tokens = [None if isinstance(row.response, str) else len(row.response) for row in rows]
    flat = [row.advantage if isinstance(row.advantage, (int, float)) else None for row in rows]
    return {
        "uid": pa.array([row.uid or "" for row in rows], pa.string()),
        "session": pa.array(np.arange(len(rows), dtype=np.int32)),
        "output": pa.array(np.zeros(len(rows), dtype=np.int32)),
        "domain": pa.array([row.domain for row in rows], pa.string()),
        "reward": pa.array([float(row.reward) for row in rows], pa.float32()),
        "advantage": pa.array(flat, pa.float32()),
        "response_tokens": pa.array(tokens, pa.int32()),
        "state": _text("added", len(rows)),
        "why": pa.array([label for label, _ in reward.add], pa.string()),
    }


def _places(rewarded: RolloutBatch, advantaged: RolloutBatch | None) -> NDArray[np.int64]:
    """(bs,) int64: where each row stands at ``post_advantage``, -1 if it never came there."""
    if advantaged is None:
        return np.full(rewarded.bs, -1, dtype=np.int64)
    at = {key: place for place, key in enumerate(advantaged.keys)}
    return np.fromiter((at.get(key, -1) for key in rewarded.keys), dtype=np.int64, count=rewarded.bs)


def _infos(batch: RolloutBatch) -> list[Mapping[str, Any]]:
    if "extra_fields" not in batch.field_names:
        return []
    given = [stored.get(_INFO) if isinstance(stored, Mapping) else None for stored in batch.column("extra_fields")]
    return [info if isinstance(info, Mapping) else {} for info in given]


def _signal(given: Sequence[Any]) -> NDArray[np.float32]:
    """Numbers, NaN for what is none: what was a number in the first step may be a text in a later one."""
    values = [value if isinstance(value, _NUMERIC) else np.nan for value in given]
    try:
        return np.array(values, dtype=np.float64).astype(np.float32)
    except OverflowError:
        # A whole number beyond all floats.
        return np.array([_within(value) for value in values], dtype=np.float32)


def _within(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def _shares(domains: Any, shares: Mapping[str, float]) -> Any:
    coded = domains.combine_chunks().dictionary_encode()
    known = pa.array([shares.get(name) for name in coded.dictionary.to_pylist()], pa.float64())
    return known.take(coded.indices)


def _numbers(values: Tensor) -> Any:
    return pa.array(values.detach().cpu().contiguous().numpy())


def _coded(code: NDArray[np.int64], names: NDArray[Any]) -> Any:
    strings = pa.array([str(name) for name in names], pa.string())
    return strings.take(pa.array(code))


def _text(value: str, n: int) -> Any:
    return pa.repeat(pa.scalar(value), n)


def _where(which: NDArray[np.bool_], values: Any) -> Any:
    import pyarrow.compute as pc

    return pc.if_else(pa.array(which), values, pa.scalar(None, values.type))


def _first(one: Any, other: Any) -> Any:
    import pyarrow.compute as pc

    return pc.coalesce(one, other.cast(one.type))
