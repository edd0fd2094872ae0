"""What the trainer asks for prompts in place of verl's own data loader."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from dataflex_hooks.domain_stats import DOMAIN_COLUMN, ROW_COLUMN
from dataflex_verl.sampler import FORMAT, DomainSampler

_log = logging.getLogger("dataflex_verl")

SLOW_ITEM_S = 0.002
_MEASURED = 16
_AHEAD = 2


class DomainDataLoader:
    """Fetches what the sampler chose; endless, since every domain wraps on its own.

    Rows are chosen when a batch is asked for, so new proportions govern the very next prompt. Items are fetched in
    process. With ``num_workers`` and items that take more than 2 ms each, threads fetch those that come next if the
    proportions stay; one fetched in vain is kept for when its turn comes.

    Args:
        dataset: verl's training dataset.
        sampler: chooses its rows.
        batch_size: prompts a fetch.
        collate_fn: verl's, a list of items to a dict of columns.
        num_workers: threads for slow items; 0 fetches in process.
        skip_foreign: begin anew, with a warning, when the saved state is another loader's, instead of refusing it.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: DomainSampler,
        batch_size: int,
        collate_fn: Callable[[list[Any]], dict[str, Any]],
        num_workers: int = 0,
        skip_foreign: bool = False,
    ) -> None:
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self._collate, self._skip_foreign = collate_fn, skip_foreign
        self._workers = num_workers
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Any]] = {}
        self._seconds, self._items = 0.0, 0
        self._names = np.array([*sampler.domains, None], dtype=object)[:-1]

    def __len__(self) -> int:
        """Number of batches in the dataset."""
        return sum(len(rows) for rows in self.sampler.dataset.rows) // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next batch: verl's columns, and the name of the domain and the dataset row of every prompt."""
        draw = self.sampler.draw(self.batch_size)
        batch = self._collate(self._fetch(draw.rows))
        batch[DOMAIN_COLUMN] = self._names[draw.domains]
        rows = np.empty(len(draw.rows), dtype=object)
        rows[:] = draw.rows
        batch[ROW_COLUMN] = rows
        return batch

    def _fetch(self, rows: list[int]) -> list[Any]:
        if self._pool is None:
            started = time.perf_counter()
            items = [self.dataset[row] for row in rows]
            if self._workers and self._items < _MEASURED:
                self._seconds += time.perf_counter() - started
                self._items += len(rows)
                if self._items >= _MEASURED and self._seconds / self._items > SLOW_ITEM_S:
                    self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="dataflex-fetch")
            return items
        futures = [self._ahead.pop(row, None) or self._pool.submit(self.dataset.__getitem__, row) for row in rows]
        self._fetch_ahead(self._pool)
        return [future.result() for future in futures]

    def _fetch_ahead(self, pool: ThreadPoolExecutor) -> None:
        wanted = max(_AHEAD * self.batch_size, 4 * self._workers)
        for row in self.sampler.upcoming(wanted - len(self._ahead)) if len(self._ahead) < wanted else ():
            if row not in self._ahead:
                self._ahead[row] = pool.submit(self.dataset.__getitem__, row)

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler; verl writes it to ``data.pt``."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; raises ConfigError on one of another dataset."""
        if self._skip_foreign and state.get("format") != FORMAT:
            _log.warning("dataflex.resume=fresh: data.pt is another data loader's; every domain begins anew")
            return
        self.sampler.load_state_dict(state)
        self._ahead.clear()
