"""verl's replay buffer with two additions: evicted groups are seen before they vanish, and trained shares are steered.

The published configurations name it as custom sampler; a run with domains has it in any case::

    trainer.v1.sampler.custom_sampler={path: pkg://dataflex_verl.replay_buffer, name: DataFlexMixReplayBuffer}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from dataflex_hooks import ConfigError, Problem
from dataflex_hooks.domain_stats import DOMAIN_COLUMN
from dataflex_verl.credits import Credits

NAME, MODULE = "DataFlexMixReplayBuffer", "dataflex_verl.replay_buffer"

Evicted = Callable[[str, list[str], list[dict[str, Any]]], None]
"""Called with partition, row keys and tags of groups that verl's filter is about to evict."""


class MixingBuffer:
    """Laid over verl's buffer class of the mode, or over the user's own.

    In synchronous modes and for validation everything is as in the class below. In asynchronous modes, when more
    prompts are finished than a step needs, it takes those that keep trained shares at the proportions in force, oldest
    first within a domain; the others stay for the next step. Under ``max_off_policy_strategy: drop``, prompts that verl
    would drop before the next step are taken first.
    """

    _domains: tuple[str, ...] = ()
    _credits: Credits | None = None
    _on_evicted: Evicted | None = None
    _domain_of: dict[str, int]

    def watch(self, on_evicted: Evicted | None, domains: Sequence[str] = (), credits: Credits | None = None) -> None:
        """Set what is told of evicted groups, and the credits that trained prompts are charged to."""
        self._on_evicted, self._domains, self._credits = on_evicted, tuple(domains), credits
        self._domain_of = {}

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        filtered = eviction_reasons[1]
        if filtered and self._on_evicted is not None:
            rows = self.partitions[partition_id]  # type: ignore[attr-defined]
            keys = [key for key in rows if key.split("_")[0] in filtered]
            self._on_evicted(partition_id, keys, [rows[key] for key in keys])
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)  # type: ignore[misc]

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
        selected = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)  # type: ignore[misc]
        mode = self.trainer_mode  # type: ignore[attr-defined]
        if mode == "sync" or partition_id == "val" or self._credits is None:
            return selected
        steps, rows = selected[2], selected[1]
        oldest = sorted(sampleable_keys, key=lambda uid: (steps.get(uid, 0), uid))
        domain = self._domains_of(partition_id, oldest, rows)
        chosen = choose(oldest, domain, batch_size, self._credits, self._urgent(oldest, steps))
        for uid in chosen:
            self._domain_of.pop(uid, None)
        return (chosen, *selected[1:])

    def _urgent(self, uids: Sequence[str], steps: Mapping[str, int]) -> set[str]:
        threshold, strategy = self.max_off_policy_threshold, self.max_off_policy_strategy  # type: ignore[attr-defined]
        if threshold is None or strategy != "drop":
            return set()
        # At the next step verl drops what spans more versions than the threshold.
        return {uid for uid in uids if self._step - steps.get(uid, self._step) + 2 > threshold}

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        """As verl's; remembers the step."""
        self._step = global_steps
        return super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)  # type: ignore[misc]

    def _domains_of(self, partition_id: str, uids: Sequence[str], rows: Mapping[str, Any]) -> dict[str, int]:
        new = set(uids) - self._domain_of.keys()
        if new:
            # Any row of the group will do; they all carry the prompt's columns.
            key_of = {uid: key for key in rows if (uid := key.split("_")[0]) in new}
            if key_of:
                data = tq.kv_batch_get(
                    keys=list(key_of.values()), partition_id=partition_id, select_fields=[DOMAIN_COLUMN]
                )
                names = [getattr(name, "data", name) for name in data[DOMAIN_COLUMN]]
                index = {name: place for place, name in enumerate(self._domains)}
                self._domain_of.update((uid, index[name]) for uid, name in zip(key_of, names, strict=True))
        return {uid: self._domain_of[uid] for uid in uids if uid in self._domain_of}


def choose(
    oldest: Sequence[str], domain: Mapping[str, int], count: int, credits: Credits, urgent: set[str]
) -> list[str]:
    """Choose ``count`` prompts so that trained shares follow the proportions.

    Args:
        oldest: finished prompts, oldest first; at least ``count``.
        domain: their domains; one without a domain counts for none and comes in its turn of age.
        count: prompts that the step needs.
        credits: charged for every chosen prompt.
        urgent: prompts to take first.

    Returns:
        The chosen prompts, oldest first.
    """
    waiting: dict[int, list[str]] = {}
    first = [uid for uid in oldest if uid in urgent or uid not in domain][:count]
    taken = set(first)
    for uid in first:
        if uid in domain:
            credits.charge(domain[uid])
    for uid in oldest:
        if uid not in taken:
            waiting.setdefault(domain[uid], []).append(uid)
    while len(taken) < count:
        after = credits.deficit + credits.proportions
        best = max(waiting, key=lambda index: (after[index], -index))
        credits.charge(best)
        taken.add(waiting[best].pop(0))
        if not waiting[best]:
            del waiting[best]
    return [uid for uid in oldest if uid in taken]


class DataFlexMixReplayBuffer(MixingBuffer, ReplayBuffer):
    """The name that published configurations give. A DataFlex trainer builds its own buffer in this one's place.

    Raises:
        ConfigError: verl built it itself in a mode that needs another class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._domain_of = {}
        if self.trainer_mode != "sync":
            hint = "with trainer.v1.trainer_mode=dataflex_colocate_async the right class is built in its place"
            problem = Problem("trainer.v1.sampler.custom_sampler.name", NAME, "a trainer mode of dataflex", hint)
            raise ConfigError([problem])


def names_ours(sampler_config: DictConfig) -> bool:
    """Whether ``trainer.v1.sampler`` names our buffer, as published configurations do."""
    custom = sampler_config.get("custom_sampler", None)
    if custom is None or custom.get("name") != NAME:
        return False
    return str(custom.get("path", "")).removeprefix("pkg://") == MODULE


def build_buffer(config: DictConfig, build: Callable[[], ReplayBuffer], watched: bool) -> ReplayBuffer:
    """Build the buffer of a run.

    verl leaves out the arguments of its filter for a custom class and would take the wrong base in asynchronous modes.
    So verl builds its own buffer, with everything it passes there, and the additions are laid over its class.

    Args:
        config: verl's whole configuration.
        build: verl's ``_build_replay_buffer``.
        watched: whether the run needs the additions. A named buffer of ours without any use for them is verl's own.
    """
    sampler_config = config.trainer.v1.sampler
    named = names_ours(sampler_config)
    if named:
        with open_dict(sampler_config):
            custom, sampler_config.custom_sampler = sampler_config.custom_sampler, None
        try:
            buffer = build()
        finally:
            with open_dict(sampler_config):
                sampler_config.custom_sampler = custom
    else:
        buffer = build()
    if watched or named:
        lay_over(buffer)
    return buffer


def lay_over(buffer: ReplayBuffer) -> None:
    """Give a built buffer the additions of :class:`MixingBuffer`, whatever its class."""
    base = type(buffer)
    if not issubclass(base, MixingBuffer):
        buffer.__class__ = type(f"DataFlex{base.__name__}", (MixingBuffer, base), {"__module__": __name__})
    buffer.watch(None)  # type: ignore[attr-defined]
