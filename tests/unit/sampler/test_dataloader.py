"""Fetching: what is chosen is what is fetched, with and without workers."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from dataflex_hooks.domain_stats import DOMAIN_COLUMN, ROW_COLUMN
from dataflex_verl.dataloader import DomainDataLoader
from dataflex_verl.domain_column import read_domains
from dataflex_verl.sampler import DomainSampler


def collate(items):
    return {key: np.array([item[key] for item in items], dtype=object) for key in items[0]}


def loader(data, workers=0, size=4, shares=(0.5, 0.5)):
    sampler = DomainSampler(read_domains(data, None, None), proportions=np.array(shares))
    return DomainDataLoader(data, sampler, size, collate, workers)


class Slow:
    """Items that take longer than the limit for fetching in process."""

    def __init__(self, data):
        self.data, self.dataframe, self.data_files = data, data.dataframe, data.data_files

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        time.sleep(0.004)
        return self.data[row]


def test_a_batch_has_verls_columns_the_domain_and_the_row(prompts):
    data = prompts({"math": 6, "code": 6})
    batch = next(iter(loader(data)))
    assert set(batch) == {"prompt", "domain", DOMAIN_COLUMN, ROW_COLUMN}
    assert batch[DOMAIN_COLUMN].tolist() == batch["domain"].tolist()
    assert [f"prompt {row}" for row in batch[ROW_COLUMN]] == batch["prompt"].tolist()
    assert all(type(row) is int for row in batch[ROW_COLUMN])


def test_only_what_was_chosen_is_fetched(prompts):
    data = prompts({"math": 6, "code": 6})
    ours = loader(data)
    data.fetched.clear()
    rows = [row for _ in range(3) for row in next(ours)[ROW_COLUMN]]
    assert data.fetched == rows


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("slow", [False, True])
def test_new_proportions_govern_the_very_next_fetch(prompts, workers, slow):
    data = prompts({"math": 40, "code": 40})
    ours = loader(Slow(data) if slow else data, workers, shares=(1.0, 0.0))
    for _ in range(8):
        assert set(next(ours)[DOMAIN_COLUMN]) == {"code"}
    assert (ours._pool is not None) == (slow and workers > 0)
    ours.sampler.set_proportions(np.array([0.0, 1.0]))
    assert set(next(ours)[DOMAIN_COLUMN]) == {"math"}


def test_workers_fetch_the_same_prompts(prompts):
    data = prompts({"math": 40, "code": 40})
    plain, threaded = loader(data), loader(Slow(data), workers=2)
    for step in range(12):
        if step == 6:
            for each in (plain, threaded):
                each.sampler.set_proportions(np.array([0.2, 0.8]))
        one, two = next(plain), next(threaded)
        assert one[ROW_COLUMN].tolist() == two[ROW_COLUMN].tolist()
        assert one["prompt"].tolist() == two["prompt"].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_saved_loader_goes_on_exactly(prompts, workers):
    data = prompts({"math": 7, "code": 5})
    ours = loader(Slow(data), workers)
    for _ in range(9):
        next(ours)
    state = pickle.loads(pickle.dumps(ours.state_dict()))
    other = loader(data)
    other.load_state_dict(state)
    for _ in range(10):
        assert next(other)[ROW_COLUMN].tolist() == next(ours)[ROW_COLUMN].tolist()


def test_it_never_ends_and_its_length_is_an_epoch(prompts):
    ours = loader(prompts({"math": 3, "code": 3}))
    assert len(ours) == 1
    assert len([next(ours) for _ in range(10)]) == 10
