"""Domains in a run: the sampler in place of verl's data loader, statistics of every step, and their metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import Tensor
from transfer_queue import KVBatchMeta

from dataflex_hooks import ConfigError, DomainStats, Problem, PromptBatch, RolloutBatch, StepContext
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, DomainSums, equal_rewards, group_domains, session_domains
from dataflex_hooks.errors import Described
from dataflex_hooks.keep import groups_of
from dataflex_verl import bridge
from dataflex_verl.dataloader import DomainDataLoader
from dataflex_verl.domain_column import column, column_names, read_domains
from dataflex_verl.domain_metrics import DomainWatch, domain_metrics
from dataflex_verl.sampler import DomainSampler

if TYPE_CHECKING:
    from dataflex_hooks import HookManager

_log = logging.getLogger("dataflex_verl")

_REWARDED = frozenset({"rm_scores", "response_mask", DOMAIN_COLUMN})
_ADVANTAGED = frozenset({"advantages", "response_mask", DOMAIN_COLUMN})


class DomainMixing:
    """What the trainer asks and tells, step by step.

    Args:
        hooks: the run's plugins.
        config: verl's whole configuration, after ``_init_dataloader``.
        dataset: the training dataset.
        collate_fn: verl's.
        context: gives the current step's context.

    Attributes:
        sampler, loader: what chooses prompts, and what takes the place of ``train_dataloader``.

    Raises:
        ConfigError: the domains or columns of the data do not fit the configuration.
    """

    def __init__(
        self,
        hooks: HookManager,
        config: DictConfig,
        dataset: Any,
        collate_fn: Callable[[list[Any]], dict[str, Any]],
        context: Callable[[], StepContext],
    ) -> None:
        self.hooks, self._dataset, self._context = hooks, dataset, context
        self._draws = hooks.draws  # from the start: a plugin that fails may leave, its metrics stay
        key = hooks.config.shared.get("domain_key")
        _refuse_columns(hooks, dataset)
        rows = read_domains(dataset, str(key) if key else None, hooks.configured_domains())
        first = hooks.start_domains(rows.domains)
        data = config.data
        self.sampler = DomainSampler(
            rows,
            seed=data.get("seed") or 0,
            shuffle=bool(data.get("shuffle", True)),
            proportions=first,
            admit=self._admit if self._draws else None,
            with_priority=hooks.ranks,
            on_starved=hooks.config.on_starved,
        )
        batch_size = data.get("gen_batch_size", None) or data.train_batch_size
        workers = int(data.get("dataloader_num_workers", 0) or 0)
        fresh = hooks.config.resume == "fresh"
        self.loader = DomainDataLoader(dataset, self.sampler, batch_size, collate_fn, workers, skip_foreign=fresh)
        self.domains = rows.domains
        self._sums = DomainSums(self.domains)
        self._trained = np.zeros(len(self.domains), dtype=np.int64)
        self._counted = self.sampler.counts
        self._watch = DomainWatch(self.domains)
        self.on_evicted: Callable[[RolloutBatch], None] | None = None
        self._ended: tuple[DomainStats, NDArray[np.float64] | None] | None = None
        print(self._line(rows.key, rows.left_out))

    def _line(self, key: str, left_out: int) -> str:
        sizes = ", ".join(
            f"{name} {len(stream)}" for name, stream in zip(self.domains, self.sampler.streams, strict=True)
        )
        rest = f"; {left_out} rows of domains that are not listed are left out" if left_out else ""
        return f"[dataflex] domains by column {key!r}: {sizes}{rest}"

    # ---------------------------------------------------------------- candidates

    @cached_property
    def _columns(self) -> Mapping[str, NDArray[Any]]:
        return {name: np.array(column(self._dataset, name)) for name in sorted(self.hooks.candidate_columns())}

    def _admit(self, candidates: PromptBatch) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        rows = candidates.dataset_rows
        columns = {name: values[rows] for name, values in self._columns.items()}
        return self.hooks.pre_rollout(PromptBatch(rows, candidates.domains, columns), self._context())

    # ---------------------------------------------------------------- a step

    def fields(self, hook: str) -> frozenset[str]:
        """Return the fields to fetch at ``post_reward`` or ``post_advantage``, beyond what the hook's plugins ask."""
        return (_REWARDED if hook == "post_reward" else _ADVANTAGED) | self.hooks.observed_fields(hook)

    def rewarded(self, view: RolloutBatch) -> None:
        """Count all rows of a step, with the rewards that apply, before any is dropped."""
        self._sums.add_rewarded(view)
        self.hooks.observe("post_reward", view, self._context())

    def advantaged(self, view: RolloutBatch, kept: Tensor) -> None:
        """Count rows that have an advantage.

        Args:
            view: all rows present at ``post_advantage``.
            kept: (bs,) bool, rows that enter the update with a mask of 1 in at least one token.
        """
        self._sums.add_advantages(view, kept)
        self.hooks.observe("post_advantage", view, self._context())
        domain_of_group = group_domains(view, session_domains(view, self.domains))
        in_update = groups_of(kept, view).cpu().numpy()
        self._trained += np.bincount(domain_of_group[in_update], minlength=len(self.domains))

    def evicted(self, partition_id: str, keys: list[str], tags: list[dict[str, Any]]) -> None:
        """Count groups that verl's filter evicts, while their rows are still stored."""
        meta = KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags)
        at_reward = self.hooks.observed_fields("post_reward")
        view = bridge.fetch(meta, _REWARDED | at_reward).view
        self._sums.add_evicted(view)
        if self.on_evicted is not None:
            self.on_evicted(view)
        self.hooks.observe("post_reward", view, self._context())
        wanted = self.hooks.observed_fields("post_advantage")
        flat = equal_rewards(view)[view.group.cpu().numpy()]
        if not wanted or not flat.any():
            return
        places = np.flatnonzero(flat).tolist()
        meta = KVBatchMeta(partition_id=partition_id, keys=[keys[i] for i in places], tags=[tags[i] for i in places])
        rows = bridge.fetch(meta, (wanted - {"advantages"}) | _REWARDED)
        if rows.missing:
            return  # the scorer needs more than advantages, and nothing more was computed for these rows
        zeros = torch.zeros(rows.view.n_tokens, dtype=torch.float32)
        self.hooks.observe("post_advantage", rows.view.with_token_field("advantages", zeros), self._context())

    def end_of_step(self, ctx: StepContext) -> dict[str, float]:
        """Hand out the statistics, put new proportions in force, and return the step's metrics.

        Called at the end of verl's ``step``, before a checkpoint is written.
        """
        in_force, counts = self.sampler.proportions, self.sampler.counts
        stats = self._sums.stats(in_force)
        decided = self.hooks.on_domain_stats(stats, ctx)
        self._ended = (stats, decided)
        if decided is not None and self.hooks.config.apply:
            self.sampler.set_proportions(decided)
        generated, self._counted = counts - self._counted, counts
        metrics = domain_metrics(
            stats,
            generated=generated,
            trained=self._trained,
            passes=self.sampler.passes,
            proposed=in_force if decided is None else decided,
            scores=self.hooks.scorer_means(ctx.step),
        )
        if self._draws:
            metrics.update(self._watch.admission(self.sampler.drawn, self.sampler.admitted, self.sampler.forced))
        self._watch.starved(in_force, self._trained, ctx.step)
        self._sums = DomainSums(self.domains)
        self._trained = np.zeros(len(self.domains), dtype=np.int64)
        return metrics

    def described(self, scorer_means: Mapping[str, float]) -> dict[str, Any]:
        """Return the statistics of the step that ended and what was decided from them, in plain values."""
        assert self._ended is not None
        stats, decided = self._ended
        return {
            "domains": list(stats.domains),
            "proportions": stats.proportions.tolist(),
            "proposed": None if decided is None else decided.tolist(),
            "counts": stats.counts.tolist(),
            "groups": stats.groups.tolist(),
            "unscored": stats.unscored.tolist(),
            "scores": {name: values.tolist() for name, values in stats.scores.items()},
            "scorer": dict(scorer_means),
        }

    def restored(self) -> None:
        """Take counts from a state that was loaded; called after verl's ``_load_checkpoint``."""
        self._counted = self.sampler.counts


def _refuse_columns(hooks: HookManager, dataset: Any) -> None:
    there = column_names(dataset)
    for setting, names in hooks.candidate_columns_by_setting().items():
        missing = [name for name in names if name not in there]
        if missing:
            given = Described(f"{', '.join(missing)}, read at pre_rollout and not in the training data")
            raise ConfigError([Problem(setting, given, f"its columns: {', '.join(there)}")])
