"""Prompt ids and row order that repeat."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from dataflex_verl.local.determinism import count_prompt_ids, sort_rows


class Batch(list):
    """Stands for a TensorDict of prompts."""


def trainer_module(sizes):
    class PPOTrainer:
        global_steps = 1

        def _fetch_one_gen_batch(self):
            return Batch([None] * sizes.pop(0))

    def assign(batch, name, values):
        setattr(batch, name, values)

    module = SimpleNamespace(PPOTrainer=PPOTrainer, tu=SimpleNamespace(assign_non_tensor_stack=assign))
    count_prompt_ids(module)
    return module


def test_prompt_ids_count_within_a_step_and_start_anew_with_the_next():
    trainer = trainer_module([2, 1, 2]).PPOTrainer()
    first, second = trainer._fetch_one_gen_batch().uid, trainer._fetch_one_gen_batch().uid
    trainer.global_steps = 2
    third = trainer._fetch_one_gen_batch().uid
    assert first + second == ["00000001-000000", "00000001-000001", "00000001-000002"]
    assert third == ["00000002-000000", "00000002-000001"]
    assert not any("_" in uid for uid in first + second + third)


def test_a_resumed_run_repeats_the_ids_of_its_step():
    trainer = trainer_module([2]).PPOTrainer()
    trainer.global_steps = 7
    assert trainer._fetch_one_gen_batch().uid == ["00000007-000000", "00000007-000001"]


class Rows:
    def __init__(self, keys):
        self.keys = list(keys)

    def __len__(self):
        return len(self.keys)

    def reorder(self, order):
        self.keys = [self.keys[i] for i in order]


def sorted_keys(rows: dict[str, list[int]], partition: str = "train") -> list[str]:
    class ReplayBuffer:
        def _materialize_batch(self, partition_id):
            return Rows(rows)

    def get(keys, partition_id, select_fields):
        values = [torch.tensor(rows[key]) for key in keys]
        return {"responses": torch.nested.nested_tensor(values, layout=torch.jagged)}

    module = SimpleNamespace(ReplayBuffer=ReplayBuffer, tq=SimpleNamespace(kv_batch_get=get))
    sort_rows(module)
    return module.ReplayBuffer()._materialize_batch(partition).keys


def test_rows_are_ordered_by_prompt_and_response_whatever_order_they_came_in():
    first = {"b_0_0": [9], "a_0_0": [5, 1], "a_1_0": [5], "b_1_0": [2]}
    second = {"a_1_0": [5, 1], "b_0_0": [2], "b_1_0": [9], "a_0_0": [5]}
    assert sorted_keys(first) == ["a_1_0", "a_0_0", "b_1_0", "b_0_0"]
    assert [first[key] for key in sorted_keys(first)] == [second[key] for key in sorted_keys(second)]


def test_validation_and_empty_batches_are_left_alone():
    assert sorted_keys({"b_0_0": [1], "a_0_0": [1]}, "val") == ["b_0_0", "a_0_0"]
    assert sorted_keys({}) == []
