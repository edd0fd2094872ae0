"""Rollouts read back from a log, in the form that plugins see: rows without tokens, or with those that were logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch import ALIASES, RolloutBatch
from dataflex_hooks.batch_fields import PaddedFields, RowColumns, read_only
from dataflex_hooks.errors import FieldError
from dataflex_hooks.segments import row_sum

Ints = NDArray[np.int64]
Array = NDArray[Any]


@dataclass(frozen=True)
class LoggedRows:
    """Rows of one update. What the log does not have is None.

    Attributes:
        uid: (bs,) int64, index into ``uid_names``, which is sorted.
        uid_names: ids of the prompts in this step.
        session, output: (bs,) int64.
        reward: (bs,) float32, sum over the response.
        lengths, valid: (bs,) int64, tokens of the response, and valid ones.
        advantage, abs_advantage: (bs,) float32, means over valid tokens; NaN where none was computed.
        prompt_hash, response_hash: (bs,) int64.
        columns: other columns, such as the domain, (bs,) each.
        domain_code: (bs,) int64, index into ``domain_names``.
        signals: numbers that the reward function returned, (bs,) float32 each.
        tokens: jagged (T,) values by field, in the order of the rows.
    """

    uid: Ints
    uid_names: Array
    session: Ints
    output: Ints
    reward: NDArray[np.float32]
    lengths: Ints | None = None
    valid: Ints | None = None
    advantage: NDArray[np.float32] | None = None
    abs_advantage: NDArray[np.float32] | None = None
    prompt_hash: Ints | None = None
    response_hash: Ints | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    domain_code: Ints | None = None
    domain_names: Array = field(default_factory=lambda: np.zeros(0, dtype=object))
    signals: Mapping[str, Array] = field(default_factory=dict)
    tokens: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.uid)

    def take(self, rows: Array) -> LoggedRows:
        """The rows at ``rows``, indices or (bs,) bool, without values of tokens."""

        def of(values: Any) -> Any:
            return None if values is None else values[rows]

        return LoggedRows(
            uid=self.uid[rows],
            uid_names=self.uid_names,
            session=self.session[rows],
            output=self.output[rows],
            reward=self.reward[rows],
            lengths=of(self.lengths),
            valid=of(self.valid),
            advantage=of(self.advantage),
            abs_advantage=of(self.abs_advantage),
            prompt_hash=of(self.prompt_hash),
            response_hash=of(self.response_hash),
            domain_code=of(self.domain_code),
            domain_names=self.domain_names,
            columns={name: values[rows] for name, values in self.columns.items()},
            signals={name: values[rows] for name, values in self.signals.items()},
        )


class LoggedBatch(RolloutBatch):
    """A step's batch made of logged rows.

    Everything about rows is as in the run. Values of tokens are there as far as they were logged; asking for others is
    a FieldError that says so. ``rm_scores`` has the reward on the last token, as verl's outcome rewards have it.

    Args:
        rows: what was logged.
        by_row: merge decisions on whole responses without looking at tokens.
        lengths_matter: where lengths are not known, whether that makes merged weights wrong: then merging needs them.
    """

    by_row: bool

    def __init__(self, rows: LoggedRows, by_row: bool = True, lengths_matter: bool = True) -> None:
        self.rows = rows
        self.by_row = by_row
        self._lengths_matter = lengths_matter
        n = len(rows)
        known = np.zeros(n, dtype=np.int64) if rows.lengths is None else rows.lengths
        offsets = torch.from_numpy(np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(known)]))
        present, group = np.unique(rows.uid, return_inverse=True)
        self._tracked = {}
        self._magnitudes = {}
        self._fields, self._token_fields, self._prompts = dict(rows.columns), dict(rows.tokens), None
        self._arrange(rows.uid_names[rows.uid], group.reshape(-1).astype(np.int64), rows.session, rows.output, offsets)
        if rows.lengths is None:
            del self.lengths
        del present
        self.batch = PaddedFields(tuple(self._token_fields), self._pad)
        self.non_tensor_batch = RowColumns(tuple({"uid": None, **self._fields}), self.column)

    def __getattr__(self, name: str) -> Any:
        if name == "lengths":
            self._lacks("lengths", "the lengths of responses")
        raise AttributeError(name)

    @cached_property
    def _keys(self) -> list[str]:  # type: ignore[override]
        rows = zip(self.uid, self.session_number.tolist(), self.output_index.tolist(), strict=True)
        return [f"{uid}_{session}_{output}" for uid, session, output in rows]

    def _lacks(self, name: str, what: str) -> NoReturn:
        raise FieldError(f"{name}: {what} are not in this log; there is: {', '.join(self.field_names)}")

    @cached_property
    def field_names(self) -> tuple[str, ...]:
        """Names of everything that is there, sorted."""
        rows = self.rows
        there = {*self._token_fields, *self._fields, *(f"signal {key}" for key in rows.signals), "uid", "rm_scores"}
        optional = {"advantages (mean per response)": rows.advantage, "lengths": rows.lengths}
        optional |= {"valid tokens": rows.valid, "hashes of prompts and responses": rows.response_hash}
        return tuple(sorted(there | {name for name, values in optional.items() if values is not None}))

    @cached_property
    def rewards(self) -> Tensor:
        """(bs,) float32: raw reward of each row."""
        return self._track("rewards", torch.from_numpy(np.ascontiguousarray(self.rows.reward)))

    @cached_property
    def n_valid(self) -> Tensor:
        """(bs,) int64: valid tokens of each row; raises FieldError where lengths were not logged."""
        if self.rows.valid is None:
            self._lacks("response_mask", "numbers of valid tokens")
        return self._track("n_valid", torch.from_numpy(np.ascontiguousarray(self.rows.valid)))

    @property
    def weighed(self) -> Tensor:
        """(bs,) int64: valid tokens; 1 each where they are not known and make no difference to merging."""
        if self.rows.valid is None and not self._lengths_matter:
            return torch.ones(self.bs, dtype=torch.int64)
        return self.n_valid

    @cached_property
    def response_mask(self) -> Tensor:
        """(T,) bool: valid tokens, where they were logged or all tokens are valid."""
        if "response_mask" not in self._token_fields:
            if self.rows.valid is None or self.rows.lengths is None or bool((self.n_valid != self.lengths).any()):
                self._lacks("response_mask", "masks of tokens")
            return self._track("response_mask (bool)", torch.ones(self.n_tokens, dtype=torch.bool))
        return super().response_mask

    def values(self, name: str) -> Tensor:
        """Return the jagged (T,) values of a token field; raises FieldError when they were not logged."""
        stored = ALIASES.get(name, name)
        if stored in self._token_fields:
            return self._token_fields[stored]
        if stored == "rm_scores" and self.rows.lengths is not None:
            values = torch.zeros(self.n_tokens, dtype=torch.float32)
            written = self.lengths > 0
            values[self.offsets[1:][written] - 1] = self.rewards[written]
            return values
        if stored == "response_mask" and self.rows.lengths is not None:
            return self.response_mask.to(torch.int64)
        hint = "write the log with dataflex.log_decisions=tokens"
        raise FieldError(
            f"no token field {name!r} in this log; there is: {', '.join(self.field_names)}. To have it, {hint}, "
            f"which keeps advantages, old_log_probs, entropy and response_mask"
        )

    def column(self, name: str) -> Array:
        """Return a per-row column as a read-only (bs,) array; raises FieldError when it was not logged."""
        if name == "extra_fields" and self.rows.signals:
            infos = np.empty(self.bs, dtype=object)
            keys, columns = list(self.rows.signals), list(self.rows.signals.values())
            infos[:] = [
                {"reward_extra_info": dict(zip(keys, values, strict=True))} for values in zip(*columns, strict=True)
            ]
            return read_only(infos)
        return super().column(name)

    def magnitude(self, name: str, agg: str = "mean") -> Tensor:
        """Mean of abs(advantages) as it was logged; anything else from the tokens, where those were logged.

        Raises:
            FieldError: it was not logged, or not for every row.
        """
        if name != "advantages" or agg != "mean" or "advantages" in self._token_fields:
            return super().magnitude(name, agg)
        size = self.rows.abs_advantage
        if size is None:
            self._lacks("advantages", "advantages")
        if bool(np.isnan(size).any()):
            raise FieldError(
                f"advantages: {int(np.isnan(size).sum())} of {self.bs} rollouts have none in this log, since the run "
                f"dropped them before advantages were computed"
            )
        return torch.from_numpy(np.ascontiguousarray(size))

    @cached_property
    def prompt_hash(self) -> Ints:
        """(bs,) int64: logged hash of each row's prompt."""
        if self.rows.prompt_hash is None:
            self._lacks("prompts", "hashes of prompts, by which ties are broken,")
        return self.rows.prompt_hash

    @cached_property
    def response_hash(self) -> Ints:
        """(bs,) int64: logged hash of each row's response."""
        if self.rows.response_hash is None:
            self._lacks("responses", "hashes of responses, by which ties are broken,")
        return self.rows.response_hash

    def with_token_field(self, name: str, values: Tensor) -> RolloutBatch:
        """Return a batch of the same rows in which a token field holds ``values`` (T,)."""
        rows = replace(self.rows, tokens={**self._token_fields, name: values})
        if name == "rm_scores":
            total = row_sum(values, self.offsets).to(torch.float32).numpy()
            rows = replace(rows, reward=np.asarray(total, dtype=np.float32))
        return LoggedBatch(rows, self.by_row, self._lengths_matter)
