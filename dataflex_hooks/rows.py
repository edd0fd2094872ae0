"""The structure of a batch: which rows belong to which session and group, and where each row's tokens lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflex_hooks.batch_fields import read_only
from dataflex_hooks.row_keys import parse_keys
from dataflex_hooks.segments import segment_max, segment_mean


class Rows:
    """Rows, sessions, groups and tokens of one step.

    A row is one model output. A session (one rollout of a prompt) has one row, or several in a multi-output agent loop;
    a group is all sessions of one prompt, told apart by ``uid``. Response tokens of row ``i`` are
    ``values[offsets[i]:offsets[i + 1]]`` of every jagged ``(T,)`` tensor.

    Args:
        keys: ``"{uid}_{session}_{index}"``, one a row.
        offsets: (bs + 1,) int64, starts at 0; ``T = offsets[-1]``.

    Attributes:
        bs: number of rows.
        uid: (bs,) object array.
        session_number: (bs,) int64, as written in the key.
        output_index: (bs,) int64, as written in the key.
        group: (bs,) int64, dense ids from 0 in order of uid.
        session: (bs,) int64, dense ids from 0 in order of (uid, session number).
        group_of_session: (n_sessions,) int64, never falling: a group's sessions stand together.
        n_groups: how many groups.
        n_sessions: how many sessions.
        n_tokens: T, those of tools included.
        offsets: (bs + 1,) int64, where each row's tokens begin.
        lengths: (bs,) int64, in tokens.
        row_of_token: (T,) int64, the row of each token.
        position: (T,) int64, the place of each token in its row.

    Raises:
        ValueError: lengths that do not agree, or a key of another form.
    """

    def __init__(self, keys: Sequence[str], offsets: Tensor) -> None:
        if offsets.shape != (len(keys) + 1,) or int(offsets[0]) != 0:
            given = tuple(offsets.shape)
            raise ValueError(f"offsets must be ({len(keys) + 1},) from 0 for {len(keys)} keys, got {given}")
        parsed = parse_keys(keys)
        _, group = np.unique(parsed.uid, return_inverse=True)
        self._arrange(parsed.uid, group.astype(np.int64), parsed.session_number, parsed.output_index, offsets)

    def _arrange(
        self,
        uid: NDArray[np.object_],
        group: NDArray[np.int64],
        session_number: NDArray[np.int64],
        output_index: NDArray[np.int64],
        offsets: Tensor,
    ) -> None:
        """Set the structure from (bs,) columns; ``group`` counts from 0 in order of ``uid``."""
        self.bs = len(uid)
        self.offsets = offsets
        self.n_tokens = int(offsets[-1])
        self.lengths = offsets[1:] - offsets[:-1]
        self.uid = read_only(uid)
        self.n_groups = int(group.max(initial=-1)) + 1
        # One number for each pair, in the order of the pairs: session numbers may be any, their ranks are small.
        _, rank = np.unique(session_number, return_inverse=True)
        width = max(self.bs, 1)
        pairs, session = np.unique(group * width + rank.reshape(-1), return_inverse=True)
        session = session.reshape(-1).astype(np.int64)
        self.n_sessions = len(pairs)
        # A session's rows are averaged in this order, so that shuffled rows give the same bits.
        by_output = np.lexsort((output_index, session))
        arrays = (session_number, output_index, group, session, pairs // width, by_output)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)).to(offsets.device) for array in arrays]
        self.session_number, self.output_index, self.group, self.session, self.group_of_session, self._by_output = (
            tensors
        )

    @cached_property
    def row_of_token(self) -> Tensor:
        """(T,) int64: the row of each token."""
        return self._track("row_of_token", torch.repeat_interleave(self.lengths))

    @cached_property
    def position(self) -> Tensor:
        """(T,) int64: the place of each token in its row."""
        place = torch.arange(self.n_tokens, device=self.offsets.device) - self.offsets[self.row_of_token]
        return self._track("position", place)

    def _track(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def __len__(self) -> int:
        return self.bs

    @cached_property
    def longest(self) -> int:
        """Lmax, the width of padded tensors: the longest response, in tokens."""
        return int(self.lengths.max()) if self.bs else 0

    @cached_property
    def is_final(self) -> Tensor:
        """(bs,) bool: the last output of its session, the one verl takes the reward and the advantage from."""
        last = segment_max(self.output_index, self.session, self.n_sessions)
        return self.output_index == last[self.session]

    def per_session(self, row_scores: Tensor) -> Tensor:
        """Average (bs,) scores over each session's rows: (n_sessions,) float32."""
        order = self._by_output
        return segment_mean(row_scores[order], self.session[order], self.n_sessions).to(torch.float32)

    def per_group(self, session_scores: Tensor) -> Tensor:
        """Average (n_sessions,) scores over each group's sessions: (n_groups,) float32."""
        return segment_mean(session_scores, self.group_of_session, self.n_groups).to(torch.float32)

    def sessions_per_group(self, which: Tensor | None = None) -> Tensor:
        """Count each group's sessions, or those marked in ``which`` (n_sessions,) bool: (n_groups,) int64."""
        group = self.group_of_session if which is None else self.group_of_session[which]
        return torch.bincount(group, minlength=self.n_groups)

    def expand_groups(self, group_scores: Tensor) -> Tensor:
        """Give every row its group's value: (n_groups,) to (bs,)."""
        return group_scores[self.group]

    def expand_sessions(self, session_scores: Tensor) -> Tensor:
        """Give every row its session's value: (n_sessions,) to (bs,)."""
        return session_scores[self.session]

    def expand_rows(self, row_scores: Tensor) -> Tensor:
        """Give every token its row's value: (bs,) to (T,)."""
        return row_scores[self.row_of_token]

    def to_padded(self, values: Tensor) -> Tensor:
        """Lay (T,) values out as (bs, Lmax), 0 on the right of shorter rows."""
        padded = torch.zeros(self.bs, self.longest, dtype=values.dtype, device=values.device)
        padded[self.row_of_token, self.position] = values
        return padded

    def to_values(self, padded: Tensor) -> Tensor:
        """Take the (T,) values out of a padded (bs, Lmax) tensor."""
        return padded[self.row_of_token, self.position]

    def align(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Read a tensor given per row (bs,), per token (T,), or padded (bs, Lmax).

        Returns the 1-D tensor and whether it is per token. With as many tokens as rows, (bs,) is meant.

        Raises:
            ValueError: any other shape.
        """
        if tensor.shape == (self.bs,):
            return tensor, False
        if tensor.shape == (self.n_tokens,):
            return tensor, True
        if tensor.shape == (self.bs, self.longest):
            return self.to_values(tensor), True
        raise ValueError(
            f"shape {tuple(tensor.shape)} is none of: one per response ({self.bs},), one per token ({self.n_tokens},), "
            f"padded ({self.bs}, {self.longest})"
        )
