"""The replay buffer over verl's own classes, with a TransferQueue of a few dicts in place of the real one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dataflex_hooks import ConfigError
from dataflex_hooks.domain_stats import DOMAIN_COLUMN
from dataflex_verl.credits import Credits

verl_buffers = pytest.importorskip(
    "verl.trainer.ppo.v1.replay_buffer", reason="needs verl: pip install 'dataflex-verl[local]'"
)

from dataflex_verl import replay_buffer as ours  # noqa: E402

NAMES = ("code", "math")


class Queue:
    """Keys with tags and values in one partition each, as far as the buffers use it."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict]] = {"train": {}, "val": {}}
        self.values: dict[str, dict] = {}

    def prompt(self, uid, domain, rewards=(0.0, 1.0), step=1, status="finished", partition="train"):
        self.tags[partition][uid] = {"is_prompt": True, "status": status, "global_steps": step}
        for session, reward in enumerate(rewards):
            key = f"{uid}_{session}_0"
            self.tags[partition][key] = {"session": session}
            self.values[key] = {
                DOMAIN_COLUMN: domain,
                "rm_scores": torch.tensor([0.0, reward]),
                "responses": torch.tensor([session]),
            }

    def kv_list(self):
        return {partition: dict(items) for partition, items in self.tags.items()}

    def kv_clear(self, partition_id, keys):
        for key in keys:
            self.tags[partition_id].pop(key, None)
            self.values.pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields):
        columns = {name: [self.values[key][name] for key in keys] for name in select_fields}
        return {name: torch.stack(column) if name != DOMAIN_COLUMN else column for name, column in columns.items()}


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    stand_in = SimpleNamespace(kv_list=queue.kv_list, kv_clear=queue.kv_clear, kv_batch_get=queue.kv_batch_get)
    monkeypatch.setattr(verl_buffers, "tq", stand_in)
    monkeypatch.setattr(ours, "tq", stand_in)
    return queue


def settings(mode="sync", metric=None, custom=True, threshold=None, strategy="drop"):
    sampler = {
        "max_off_policy_threshold": threshold,
        "max_off_policy_strategy": strategy,
        "sampler_kwargs": {},
        "custom_sampler": {"path": f"pkg://{ours.MODULE}", "name": ours.NAME} if custom else None,
    }
    return OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode, "sampler": sampler}}, "metric": metric})


def build(config, refill=None, watched=True):
    """What the trainer does, around what verl does when no custom sampler is named."""

    def verl_builds():
        v1 = config.trainer.v1
        assert v1.sampler.custom_sampler is None
        cls = verl_buffers.ReplayBuffer if v1.trainer_mode == "sync" else verl_buffers.ReplayBufferAsync
        sync = {"train_batch_size": 2, "gen_batch_size": 1} if v1.trainer_mode == "sync" else {}
        return cls(
            trainer_mode=v1.trainer_mode,
            trainer_config=None,
            max_off_policy_threshold=v1.sampler.max_off_policy_threshold,
            max_off_policy_strategy=v1.sampler.max_off_policy_strategy,
            sampler_kwargs=v1.sampler.sampler_kwargs,
            poll_interval=0.0,
            refill_fn=refill or (lambda count: None),
            filter_groups_metric=config.metric,
            **sync,
        )

    return ours.build_buffer(config, verl_builds, watched)


def domains_of(batch, queue):
    return sorted(queue.values[key][DOMAIN_COLUMN] for key in batch.keys if key.endswith("_0_0"))


@pytest.mark.parametrize(("mode", "base"), [("sync", "ReplayBuffer"), ("colocate_async", "ReplayBufferAsync")])
def test_the_published_configuration_gets_the_base_of_its_mode_with_verls_arguments(mode, base):
    config = settings(mode, metric="reward")
    buffer = build(config, watched=False)
    assert isinstance(buffer, (ours.MixingBuffer, getattr(verl_buffers, base)))
    assert type(buffer).__mro__[2] is getattr(verl_buffers, base)
    assert buffer.filter_groups_metric == "reward"
    assert config.trainer.v1.sampler.custom_sampler.name == ours.NAME


def test_without_use_for_it_verls_own_buffer_stays_as_it_is():
    assert type(build(settings(custom=False), watched=False)) is verl_buffers.ReplayBuffer
    assert isinstance(build(settings(custom=False), watched=True), ours.MixingBuffer)


def test_a_buffer_of_the_users_own_keeps_its_methods(queue):
    class Own(verl_buffers.ReplayBuffer):
        def _select_prompt_uids(self, *args):
            selected = super()._select_prompt_uids(*args)
            return (selected[0][::-1], *selected[1:])

    config = settings(custom=False)
    buffer = ours.build_buffer(config, lambda: Own("sync", None, None, "drop", {}, poll_interval=0.0), watched=True)
    assert isinstance(buffer, (ours.MixingBuffer, Own))
    queue.prompt("a", "math", step=1)
    queue.prompt("b", "code", step=2)
    buffer._sync_metadata_from_transfer_queue()
    assert buffer._select_prompt_uids("train", {"a", "b"}, 2)[0] == ["b", "a"]


def test_verl_building_it_itself_in_an_asynchronous_mode_is_an_error():
    with pytest.raises(ConfigError, match="dataflex_colocate_async the right class is built"):
        ours.DataFlexMixReplayBuffer("colocate_async", None, None, "drop", {})
    assert ours.DataFlexMixReplayBuffer("sync", None, None, "drop", {}).trainer_mode == "sync"


@pytest.mark.parametrize("partition", ["train", "val"])
def test_sync_and_validation_pass_through(queue, partition):
    for number in range(4):
        queue.prompt(f"u{number}", NAMES[number // 2], step=number, partition=partition)
    buffer = build(settings("sync" if partition == "train" else "colocate_async"))
    buffer.watch(None, NAMES, Credits(np.array([0.0, 1.0])))
    batch, _ = buffer.sample(5, partition, 2)
    # Oldest first, as verl does, although the proportions ask for math only.
    assert domains_of(batch, queue) == ["code", "code"]


def test_async_takes_finished_prompts_by_the_proportions_and_keeps_the_others(queue):
    for number in range(8):
        queue.prompt(f"u{number}", "code" if number < 6 else "math", step=1)
    buffer = build(settings("colocate_async"))
    credits = Credits(np.array([0.5, 0.5]))
    buffer.watch(None, NAMES, credits)
    batch, _ = buffer.sample(1, "train", 4)
    assert domains_of(batch, queue) == ["code", "code", "math", "math"]
    left = [key for key, tag in queue.tags["train"].items() if tag.get("is_prompt")]
    assert sorted(left) == ["u2", "u3", "u4", "u5"]
    batch, _ = buffer.sample(2, "train", 4)
    assert domains_of(batch, queue) == ["code"] * 4
    # Domains that had nothing to offer are owed, and paid as soon as they have.
    assert credits.deficit.tolist() == [-2.0, 2.0]
    for number in range(8, 14):
        queue.prompt(f"u{number}", NAMES[number % 2], step=2)
    batch, _ = buffer.sample(3, "train", 4)
    assert domains_of(batch, queue) == ["code", "math", "math", "math"]


def test_trained_shares_stay_within_k_prompts_while_there_is_a_choice(queue):
    buffer = build(settings("colocate_async"))
    credits = Credits(np.array([0.8, 0.2]))
    buffer.watch(None, NAMES, credits)
    rng = np.random.default_rng(0)
    for step in range(1, 25):
        for number in range(12):
            domain = NAMES[int(rng.random() < 0.5)]
            queue.prompt(f"s{step}n{number}", domain, step=step)
        buffer.sample(step, "train", 4)
        assert np.abs(credits.deficit).max() < 2


def test_prompts_that_verl_would_drop_next_are_taken_first(queue):
    queue.prompt("old", "code", step=1)
    for number in range(4):
        queue.prompt(f"new{number}", "math", step=3)
    buffer = build(settings("colocate_async", threshold=3))
    buffer.watch(None, NAMES, Credits(np.array([0.0, 1.0])))
    batch, _ = buffer.sample(3, "train", 2)
    assert domains_of(batch, queue) == ["code", "math"]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_filtered_groups_are_seen_before_they_vanish_and_refilled(queue, mode):
    seen, refilled = [], []

    def refill(count):
        refilled.append(count)
        for number in range(count):
            queue.prompt(f"fresh{len(refilled)}x{number}", "math")

    def on_evicted(partition, keys, tags):
        # The rows are still there to be read.
        assert all(key in queue.values for key in keys)
        seen.extend(keys)

    queue.prompt("flat", "code", rewards=(1.0, 1.0))
    queue.prompt("good", "math", rewards=(0.0, 1.0))
    buffer = build(settings(mode, metric="reward"), refill=refill)
    buffer.watch(on_evicted, NAMES, Credits(np.array([0.5, 0.5])))
    batch, metrics = buffer.sample(1, "train", 2)
    assert seen == ["flat_0_0", "flat_1_0"]
    assert metrics["training/filter_groups/evicted_samples"] == 1
    assert refilled and "flat_0_0" not in queue.values
    assert domains_of(batch, queue) == ["math", "math"]


def test_nothing_is_reported_without_a_filter(queue):
    seen = []
    queue.prompt("flat", "code", rewards=(1.0, 1.0))
    buffer = build(settings())
    buffer.watch(lambda *args: seen.append(args), NAMES, None)
    batch, _ = buffer.sample(1, "train", 1)
    assert (seen, len(batch.keys)) == ([], 2)
