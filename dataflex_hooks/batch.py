"""Read-only views of one training step's rollouts, as jagged values or padded as on a verl ``DataProto``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch_fields import PaddedFields, RowColumns, as_array, read_only
from dataflex_hooks.errors import FieldError
from dataflex_hooks.row_keys import content_hash
from dataflex_hooks.rows import Rows
from dataflex_hooks.segments import row_max, row_sum

ALIASES: Mapping[str, str] = MappingProxyType(
    {"token_level_scores": "rm_scores", "token_level_rewards": "rm_scores"},
)
"""DataProto names of a field that is stored once: the raw reward, before any KL penalty."""


def stored_names(names: Iterable[str]) -> frozenset[str]:
    """Names of batch fields as they are stored; ``uid`` is in the row keys and not among them."""
    return frozenset(ALIASES.get(name, name) for name in names) - {"uid"}


_ROWS = ("offsets", "lengths", "group", "session", "session_number", "output_index")
_SHARED = (*_ROWS, "group_of_session")


class RolloutBatch(Rows):
    """Rows of one step with their data; padding rows are already excluded by the host.

    Tensors are shared, not copied: changing one in place is an error that the host traces to the plugin. Besides the
    methods here, ``batch.batch[name]`` gives a token field padded to (bs, Lmax) and ``batch.non_tensor_batch[name]`` a
    column, as on a verl ``DataProto``.

    Args:
        keys: ``"{uid}_{session}_{index}"``, one a row.
        offsets: (bs + 1,) int64, starts at 0.
        fields: per-row columns, each of length bs.
        token_fields: jagged values, each (T,); ``response_mask`` is 1 for tokens that the model wrote and that the loss
            counts ("valid"), 0 for tool tokens and others.
        prompts: token ids of all prompts, (P,), and their (bs + 1,) offsets.

    Attributes:
        by_row: decisions on whole responses stay one weight a row in place of one a token, and nothing reads tokens to
            describe them. For hosts that have rows and no tokens.

    Raises:
        ValueError: lengths that do not agree, or a key of another form.
    """

    by_row = False

    def __init__(
        self,
        keys: Sequence[str],
        offsets: Tensor,
        fields: Mapping[str, Any],
        token_fields: Mapping[str, Tensor],
        prompts: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(keys, offsets)
        self._keys = keys
        self._fields = dict(fields)
        self._token_fields = dict(token_fields)
        self._prompts = prompts
        self._tracked: dict[str, tuple[Tensor, int]] = {}
        self._magnitudes: dict[tuple[str, str], Tensor] = {}
        for name in _SHARED:
            self._track(name, getattr(self, name))
        for name, values in self._token_fields.items():
            if values.shape != (self.n_tokens,):
                raise ValueError(f"token field {name!r} must be ({self.n_tokens},), got {tuple(values.shape)}")
            self._track(name, values)
        for name, column in self._fields.items():
            if len(column) != self.bs:
                raise ValueError(f"field {name!r} must have {self.bs} rows, got {len(column)}")
        if prompts is not None and prompts[1].shape != (self.bs + 1,):
            raise ValueError(f"prompt offsets must be ({self.bs + 1},), got {tuple(prompts[1].shape)}")
        self.batch = PaddedFields(tuple(self._token_fields), self._pad)
        self.non_tensor_batch = RowColumns(tuple({"uid": None, **self._fields}), self.column)

    @property
    def keys(self) -> Sequence[str]:
        """``"{uid}_{session}_{index}"`` of each row."""
        return self._keys

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """(bs,) int64: tokens of each row's prompt; raises FieldError without ``prompts``."""
        if self._prompts is None:
            raise self._missing("token field", "prompts")
        return self._track("prompt_lengths", self._prompts[1].diff())

    @cached_property
    def field_names(self) -> tuple[str, ...]:
        """Names of everything that is there, sorted: token fields, columns, ``uid`` and ``prompts``."""
        prompts = () if self._prompts is None else ("prompts",)
        return tuple(sorted({*self._token_fields, *self._fields, "uid", *prompts}))

    def values(self, name: str) -> Tensor:
        """Return the jagged (T,) values of a token field; raises FieldError when it is not there."""
        values = self._token_fields.get(name, self._token_fields.get(ALIASES.get(name, name)))
        if values is None:
            raise self._missing("token field", name)
        return values

    def column(self, name: str) -> NDArray[Any]:
        """Return a per-row column as a read-only (bs,) array; raises FieldError when it is not there."""
        if name == "uid":
            return self.uid
        if name not in self._fields:
            raise self._missing("column", name)
        return read_only(as_array(self._fields[name]))

    def _pad(self, name: str) -> Tensor:
        return self._track(f"{name} (padded)", self.to_padded(self.values(name)))

    def _missing(self, what: str, name: str) -> FieldError:
        return FieldError(
            f"no {what} {name!r} in this batch; there is: {', '.join(self.field_names)}. A plugin or component has to "
            f"declare the fields it reads in `requires`, and the trainer has to have computed them before this hook"
        )

    @cached_property
    def response_mask(self) -> Tensor:
        """(T,) bool: valid tokens, those that the loss counts."""
        return self._track("response_mask (bool)", self.values("response_mask").bool())

    @cached_property
    def valid_weights(self) -> Tensor:
        """(T,) float32: 1 at valid tokens, 0 elsewhere."""
        return self._track("valid_weights", self.response_mask.to(torch.float32))

    @cached_property
    def n_valid(self) -> Tensor:
        """(bs,) int64: number of valid tokens of each row, |o_i|."""
        return self._track("n_valid", row_sum(self.response_mask, self.offsets).to(torch.int64))

    @cached_property
    def _counted(self) -> Tensor | None:
        # Mostly every token is valid, and then no mask needs to be read along with the values.
        return None if bool(self.response_mask.all()) else self.response_mask

    @cached_property
    def rewards(self) -> Tensor:
        """(bs,) float32: raw reward of each row, the sum of ``rm_scores`` over its tokens."""
        return self._track("rewards", row_sum(self.values("rm_scores"), self.offsets).to(torch.float32))

    @cached_property
    def session_rewards(self) -> Tensor:
        """(n_sessions,) float32: raw reward of each session's final output."""
        rewards = torch.empty(self.n_sessions, dtype=torch.float32, device=self.offsets.device)
        rewards[self.session[self.is_final]] = self.rewards[self.is_final]
        return self._track("session_rewards", rewards)

    @cached_property
    def mean_reward(self) -> float:
        """Mean of ``session_rewards``, rounded once, so that the order of rows does not matter; 0 without rows."""
        return math.fsum(self.session_rewards.tolist()) / max(1, self.n_sessions)

    def sum_over_tokens(self, values: Tensor) -> Tensor:
        """Sum (T,) values over each row's valid tokens: (bs,) float32, 0 without any."""
        return row_sum(values, self.offsets, self._counted).to(torch.float32)

    def mean_over_tokens(self, values: Tensor) -> Tensor:
        """Average (T,) values over each row's valid tokens: (bs,) float32, 0 without any."""
        return (row_sum(values, self.offsets, self._counted) / self.n_valid.clamp(min=1)).to(torch.float32)

    def max_over_tokens(self, values: Tensor) -> Tensor:
        """Largest of each row's valid (T,) values: (bs,) float32, 0 without any."""
        largest = row_max(values, self.offsets, self._counted)
        return torch.where(self.n_valid > 0, largest, 0.0).to(torch.float32)

    @property
    def prompts(self) -> tuple[Tensor, Tensor]:
        """Token ids of all prompts, (P,), and their (bs + 1,) offsets; raises FieldError when not there."""
        if self._prompts is None:
            raise self._missing("token field", "prompts")
        return self._prompts

    @cached_property
    def prompt_hash(self) -> NDArray[np.int64]:
        """(bs,) int64: 64-bit hash of each row's prompt tokens, the same on every machine. Needs ``prompts``."""
        return read_only(content_hash(*self.prompts))

    @cached_property
    def response_hash(self) -> NDArray[np.int64]:
        """(bs,) int64: 64-bit hash of each row's response tokens. Needs ``responses``."""
        return read_only(content_hash(self.values("responses"), self.offsets))

    @property
    def weighed(self) -> Tensor:
        """(bs,) int64: how many tokens of each row merging counts, which is ``n_valid``."""
        return self.n_valid

    def magnitude(self, name: str, agg: str = "mean") -> Tensor:
        """Mean, sum or largest of abs(values) of a token field over each row's valid tokens: (bs,) float32.

        Worked out once. Rollouts read back from a decision log have the mean without having the tokens.
        """
        if (name, agg) not in self._magnitudes:
            over_tokens = {"mean": self.mean_over_tokens, "sum": self.sum_over_tokens, "max": self.max_over_tokens}
            size = over_tokens[agg](self.values(name).abs())
            self._magnitudes[name, agg] = self._track(f"{agg} of abs({name})", size)
        return self._magnitudes[name, agg]

    @cached_property
    def tie_rank(self) -> Tensor:
        """(bs,) int64: rank by (prompt tokens, response tokens, session number, output index), for breaking ties.

        Token sequences are compared by 64-bit hashes: an order that is arbitrary, but the same for equal content
        wherever the row stands and whatever its uuid. Rows equal in all four are interchangeable; between them the uid
        decides, only to make the order total. Needs ``prompts`` and ``responses``; raises FieldError without.
        """
        columns = (self.group, self.output_index, self.session_number)
        order = np.lexsort((*(column.cpu().numpy() for column in columns), self.response_hash, self.prompt_hash))
        rank = np.empty(self.bs, dtype=np.int64)
        rank[order] = np.arange(self.bs)
        return self._track("tie_rank", torch.from_numpy(rank).to(self.offsets.device))

    def with_token_field(self, name: str, values: Tensor) -> RolloutBatch:
        """Return a batch of the same rows in which the token field ``name`` holds ``values`` (T,)."""
        token_fields = {**self._token_fields, name: values}
        return RolloutBatch(self._keys, self.offsets, self._fields, token_fields, self._prompts)

    def _track(self, name: str, tensor: Tensor) -> Tensor:
        # Tensors made under inference_mode keep no version, so they cannot be watched.
        if not tensor.is_inference():
            self._tracked[name] = (tensor, tensor._version)
        return tensor

    def mutated(self) -> list[str]:
        """Names of tensors of this batch that were changed in place since they were handed out."""
        return [name for name, (tensor, version) in self._tracked.items() if tensor._version != version]


@dataclass(frozen=True)
class PromptBatch:
    """Candidate prompts, before they are fetched and tokenised.

    Attributes:
        dataset_rows: (n,) int64, row of each prompt in the training dataset.
        domains: (n,) object array of domain names, or None when no domain column is configured.
        columns: static dataset columns by name, each (n,).
    """

    dataset_rows: NDArray[np.int64]
    domains: NDArray[np.object_] | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.dataset_rows)


@dataclass(frozen=True)
class DomainStats:
    """Statistics per domain of the rollouts of one step, all of them: also those dropped, or evicted by a filter.

    Attributes:
        domains: (K,) names, in the order of every other array.
        counts: (K,) int64, sessions (responses) of the step.
        scores: means over sessions by name, each (K,) float64, 0 for a domain without any: ``reward`` (raw outcome),
            ``abs_advantage`` (mean over valid tokens; over the sessions that have an advantage), ``solve_rate`` (share
            with a reward above 0.5), ``kept`` (share that entered the update with a mask of 1), ``length`` (valid
            tokens).
        groups: (K,) int64, prompts.
        unscored: (K,) int64, sessions without an advantage: dropped or evicted before it was computed. Groups evicted
            for equal rewards have advantage 0 and are not among them.
        proportions: (K,) float64, in force when the step's prompts were chosen.
    """

    domains: tuple[str, ...]
    counts: NDArray[np.int64]
    scores: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    groups: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    unscored: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    proportions: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, dtype=np.float64))
