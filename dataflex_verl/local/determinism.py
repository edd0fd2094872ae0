"""Same seed and settings, same run, bit for bit: reproducible prompt ids and row order on the local backend.

verl names prompts by random uuids and takes rows in the order in which rollouts happen to finish. Both decide the order
in which numbers are added, so the last bits of a gradient differ from run to run. Only the local backend installs this;
elsewhere ids and row order are verl's.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any


def count_prompt_ids(module: ModuleType) -> None:
    """Give prompts ids of (training step, count within the step), which a resumed run repeats."""
    original = module.PPOTrainer._fetch_one_gen_batch

    @functools.wraps(original)
    def fetch(self: Any) -> Any:
        batch = original(self)
        step, count = getattr(self, "_local_prompt_count", (None, 0))
        count = count if step == self.global_steps else 0
        # verl splits row keys at "_", so an id must not hold one.
        ids = [f"{self.global_steps:08d}-{count + i:06d}" for i in range(len(batch))]
        self._local_prompt_count = (self.global_steps, count + len(batch))
        module.tu.assign_non_tensor_stack(batch, "uid", ids)
        return batch

    module.PPOTrainer._fetch_one_gen_batch = fetch


def sort_rows(module: ModuleType) -> None:
    """Order the rows of a training batch by prompt id and response, before anything is computed from them.

    A group's sessions draw their noise in the order in which requests arrive, so which session holds which response
    varies; the set of responses does not.
    """
    original = module.ReplayBuffer._materialize_batch

    @functools.wraps(original)
    def materialize(self: Any, partition_id: str, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, partition_id, *args, **kwargs)
        if partition_id == "val" or len(batch) == 0:
            return batch
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["responses"])
        responses = [row.tolist() for row in data["responses"].unbind()]
        order = sorted(range(len(batch)), key=lambda i: (batch.keys[i].rsplit("_", 2)[0], responses[i], batch.keys[i]))
        batch.reorder(order)
        return batch

    module.ReplayBuffer._materialize_batch = materialize
