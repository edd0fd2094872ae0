"""Where two outcomes of one step differ, in words; None where they decide the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataflex_hooks.decisions import AddedRow, given_parts
from dataflex_hooks.testing.outcome import Outcome
from dataflex_hooks.testing.rebuild import token_index
from dataflex_hooks.testing.scenario import Step

_SMALLEST = 1e-6
_DIGITS = 5


def difference(step: Step, one: Outcome, variant: Step, other: Outcome, rtol: float) -> str | None:
    """Return the first difference.

    Args:
        step, one: the step as it is, and what was decided.
        variant, other: the same step looked at differently, and what was decided then; its rows are put back in order.
        rtol: relative tolerance of weights, rewards, priorities and proportions.
    """
    batch = step.batch
    rows = torch.arange(batch.bs) if variant.rows is None else variant.rows
    for name, what in (("in_batch", "dropped or not"), ("kept", "kept"), ("excluded", "out of KL and entropy")):
        mine, theirs = getattr(one, name), getattr(other, name)[rows]
        if found := _first(mine != theirs):
            return f"{what}: {_row(step, found[0])}: {bool(mine[found[0]])} and {bool(theirs[found[0]])}"
    tokens = token_index(variant.batch.offsets, rows)
    # A weight outside the response mask reaches nothing; a reward there is part of its row's.
    if text := _tokens(step, "weights", one.weights, other.weights[tokens], rtol, batch.response_mask):
        return text
    if one.token_rewards is not None and other.token_rewards is not None:
        everywhere = torch.ones_like(batch.response_mask)
        if text := _tokens(step, "rewards", one.token_rewards, other.token_rewards[tokens], rtol, everywhere):
            return text
    if one.skip_update != other.skip_update:
        return f"skip_update: {one.skip_update} and {other.skip_update}"
    if not np.isclose(one.update_scale, other.update_scale, rtol=rtol):
        return f"update_scale: {one.update_scale:g} and {other.update_scale:g}"
    return _added(one, other, variant) or _prompts(one, other, variant, rtol) or _proportions(one, other, rtol)


def acts(step: Step, outcome: Outcome) -> bool:
    """Whether anything was decided that a run without the plugin would not do."""
    batch = step.batch
    rewards = outcome.token_rewards
    changed_rewards = rewards is not None and bool((rewards != batch.values("rm_scores")).any())
    weighed = not bool((outcome.weights == batch.response_mask).all())
    refused = outcome.admitted is not None and not bool(outcome.admitted.all())
    told = outcome.priority is not None or outcome.proportions is not None
    return weighed or changed_rewards or refused or told or bool(outcome.added) or outcome.skip_update


def why_nothing(steps: Sequence[Step], outcomes: Sequence[Outcome], label: str) -> str:
    """Say what the plugin under ``label`` decided on steps on none of which it :func:`acts`."""
    decided = [outcome.decisions.get(label, {}) for outcome in outcomes]
    given = [(hook, parts) for hooks in decided for hook, made in hooks.items() if (parts := _parts(made)) is not None]
    if not given:
        return f"nothing was decided on any of {len(steps)} steps: its hooks returned None"
    counted = Counter(given).items()
    said = "; ".join(f"{hook} gave {parts} on {count} of {len(steps)} steps" for (hook, parts), count in counted)
    longest = max(step.batch.longest for step in steps)
    example = "batches=[make_groups([1.0, 0.0], lengths=[[3, 400]])]"
    if {hook for hook, _ in given} == {"pre_rollout"}:
        example = "prompts=make_prompts(4, columns={...}), or columns={...}"
    return (
        f"{said}, and all of it is what happens without the plugin: every row stays, with its weight and reward, and "
        f"every candidate is admitted. Give input on which it acts, such as {example}; responses here have up to "
        f"{longest} tokens"
    )


def _parts(decision: Any) -> str | None:
    return None if decision is None else ", ".join(sorted(given_parts(decision))) or "a decision without any part"


def _tokens(step: Step, name: str, mine: Tensor, theirs: Tensor, rtol: float, counted: Tensor) -> str | None:
    found = _first(~_close(mine, theirs, rtol) & counted)
    if not found:
        return None
    row, place = int(step.batch.row_of_token[found[0]]), int(step.batch.position[found[0]])
    return f"{name}: {_row(step, row)}, token {place}: {float(mine[found[0]]):g} and {float(theirs[found[0]]):g}"


def _prompts(one: Outcome, other: Outcome, variant: Step, rtol: float) -> str | None:
    order = np.arange(len(variant.prompts)) if variant.prompt_rows is None else variant.prompt_rows.numpy()
    for name in ("admitted", "priority"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine is None and theirs is None:
            continue
        if mine is None or theirs is None:
            return f"{name}: given once and not the other time"
        differs = ~np.isclose(mine.astype(float), theirs[order].astype(float), rtol=rtol, atol=_SMALLEST)
        if differs.any():
            place = int(differs.argmax())
            return f"{name}: candidate {place}: {mine[place]} and {theirs[order][place]}"
    return None


def _proportions(one: Outcome, other: Outcome, rtol: float) -> str | None:
    mine, theirs = one.proportions, other.proportions
    if mine is None and theirs is None:
        return None
    if mine is None or theirs is None or not np.allclose(mine, theirs, rtol=rtol, atol=_SMALLEST):
        return f"proportions: {_listed(mine)} and {_listed(theirs)}"
    return None


def _added(one: Outcome, other: Outcome, variant: Step) -> str | None:
    mine = Counter(_plain(row, {}) for _, row in one.added)
    theirs = Counter(_plain(row, variant.uids) for _, row in other.added)
    if mine == theirs:
        return None
    return f"added rows: {len(one.added)} and {len(other.added)}, of which {(mine & theirs).total()} are the same"


def _plain(row: AddedRow, uids: Any) -> tuple[Any, ...]:
    uid = None if row.uid is None else uids.get(row.uid, row.uid)
    rest = (row.advantage, row.reward, row.log_probs)
    return (_text(row.prompt), _text(row.response), row.domain, uid, *(_rounded(value) for value in rest))


def _text(tokens: Any) -> Any:
    return tokens if isinstance(tokens, str) else tuple(int(token) for token in tokens)


def _rounded(value: Any) -> Any:
    if value is None:
        return None
    array = np.asarray(value, dtype=float)
    return tuple(np.round(array, _DIGITS).ravel().tolist())


def _first(differs: Tensor) -> list[int]:
    return [int(place) for place in differs.nonzero().flatten()[:1]]


def _close(one: Tensor, other: Tensor, rtol: float) -> Tensor:
    return torch.isclose(one, other, rtol=rtol, atol=_SMALLEST, equal_nan=True)


def _row(step: Step, row: int) -> str:
    batch = step.batch
    where = f"session {int(batch.session_number[row])}, output {int(batch.output_index[row])}"
    return f"row {row} (uid {batch.uid[row]}, {where})"


def _listed(values: Any) -> str:
    return "none" if values is None else str([round(float(value), 6) for value in values])
