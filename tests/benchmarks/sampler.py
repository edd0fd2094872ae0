"""The domain sampler against verl's own data loader: time a prompt, time a draw, state and memory of a large dataset.

    python -m tests.benchmarks.sampler

Prints one JSON object. Limits: ``fetch_ratio`` 1.1, ``draw_512_of_64_ms`` 2, ``state_10m_s`` 3, ``bytes_a_row`` 16.
"""

from __future__ import annotations

import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS, DOMAINS, BATCH, FETCHES = 100_000, 8, 64, 20


def text_dataset(folder: Path) -> Any:
    """verl's dataset class over generated prompts of some 200 characters, without tokenising them."""
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    path = str(folder / "train.parquet")
    words = " ".join(["lorem ipsum dolor sit amet"] * 7)
    datasets.Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": f"{words} {row}"}] for row in range(ROWS)],
            "data_source": [f"source/{row % DOMAINS}" for row in range(ROWS)],
            "domain": [f"domain {row % DOMAINS}" for row in range(ROWS)],
            "reward_model": [{"style": "rule", "ground_truth": str(row)} for row in range(ROWS)],
            "extra_info": [{"index": row} for row in range(ROWS)],
        }
    ).to_parquet(path)
    config = OmegaConf.create({"cache_dir": str(folder), "filter_overlong_prompts": False, "shuffle": True, "seed": 1})
    return RLHFDataset([path], tokenizer=None, config=config)


class SlowItems(torch.utils.data.Dataset):
    """A dataset whose items cost ``seconds`` more to read, outside Python's lock, as decoding an image does."""

    def __init__(self, data: Any, seconds: float) -> None:
        self.data, self.seconds = data, seconds
        self.dataframe, self.data_files = data.dataframe, data.data_files

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        time.sleep(self.seconds)
        return self.data[row]


def stock_loader(data: Any, batch: int, workers: int) -> Any:
    """verl's own train data loader with random sampling."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import RandomSampler
    from verl.utils.dataset.rl_dataset import collate_fn

    generator = torch.Generator()
    generator.manual_seed(1)
    return StatefulDataLoader(
        dataset=data,
        batch_size=batch,
        num_workers=workers,
        drop_last=True,
        collate_fn=collate_fn,
        sampler=RandomSampler(data_source=data, generator=generator),
    )


def our_loader(data: Any, batch: int, workers: int) -> Any:
    """The loader that takes its place."""
    from verl.utils.dataset.rl_dataset import collate_fn

    from dataflex_verl.dataloader import DomainDataLoader
    from dataflex_verl.domain_column import read_domains
    from dataflex_verl.sampler import DomainSampler

    sampler = DomainSampler(read_domains(data, None, None), seed=1)
    return DomainDataLoader(data, sampler, batch, collate_fn, workers)


def seconds_a_fetch(make: Callable[[], Any], fetches: int, warm: int) -> float:
    batches = iter(make())
    for _ in range(warm):
        next(batches)
    started = time.perf_counter()
    for _ in range(fetches):
        next(batches)
    return (time.perf_counter() - started) / fetches


def compare(data: Any, batch: int, workers: tuple[int, int], fetches: int, warm: int = 3, rounds: int = 5) -> Any:
    """Alternate both loaders; medians in ms a fetch and the median of the ratios."""
    pairs = [
        (
            seconds_a_fetch(lambda: our_loader(data, batch, workers[0]), fetches, warm),
            seconds_a_fetch(lambda: stock_loader(data, batch, workers[1]), fetches, warm),
        )
        for _ in range(rounds)
    ]
    ours, stock = zip(*pairs, strict=True)
    return {
        "ours_ms": round(1e3 * statistics.median(ours), 3),
        "stock_ms": round(1e3 * statistics.median(stock), 3),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
    }


def draw_time() -> dict[str, float]:
    """Time one draw of 512 prompts from 64 domains of 10,000 rows, proportions at random: wall time and CPU time."""
    from dataflex_verl.domain_column import DomainRows
    from dataflex_verl.sampler import DomainSampler

    k = 64
    rows = tuple(np.arange(10_000, dtype=np.int32) + 10_000 * index for index in range(k))
    sampler = DomainSampler(DomainRows("domain", tuple(f"d{index}" for index in range(k)), rows, 0, "-"))
    rng = np.random.default_rng(0)
    sampler.draw(8 * k)
    wall, cpu = [], []
    for _ in range(50):
        sampler.set_proportions(rng.dirichlet(np.ones(k)))
        started = time.perf_counter(), time.process_time()
        sampler.draw(512)
        wall.append(time.perf_counter() - started[0])
        cpu.append(time.process_time() - started[1])
    medians = (1e3 * statistics.median(wall), 1e3 * statistics.median(cpu))
    return {"draw_512_of_64_ms": round(medians[0], 3), "draw_512_of_64_cpu_ms": round(medians[1], 3)}


def large_state() -> dict[str, float]:
    """Save and load the sampler of 10 million rows in 8 domains, up to the first prompts after the load."""
    from dataflex_verl.domain_column import DomainRows
    from dataflex_verl.sampler import DomainSampler

    n, k = 10_000_000, 8
    rows = tuple(np.arange(index, n, k, dtype=np.int32) for index in range(k))
    data = DomainRows("domain", tuple(f"d{index}" for index in range(k)), rows, 0, "-")
    sampler = DomainSampler(data)
    sampler.draw(1000)
    started = time.perf_counter()
    buffer = io.BytesIO()
    torch.save(sampler.state_dict(), buffer)
    saved = time.perf_counter() - started
    size = buffer.tell()
    other = DomainSampler(data)
    buffer.seek(0)
    started = time.perf_counter()
    other.load_state_dict(torch.load(buffer, weights_only=False))
    draw = other.draw(1000)
    loaded = time.perf_counter() - started
    assert draw == sampler.draw(1000)
    arrays = [*rows, *(stream._order for stream in other.streams)]
    return {
        "state_10m_s": round(saved + loaded, 3),
        "state_10m_bytes": size,
        "bytes_a_row": sum(array.nbytes for array in arrays) / n,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = text_dataset(Path(folder))
        started = time.perf_counter()
        our_loader(data, BATCH, 0)
        reading = time.perf_counter() - started
        batch = compare(data, BATCH, (0, 0), FETCHES)
        single = compare(data, 1, (0, 0), 200, rounds=3)
        # Workers inherit this process; a few threads of Arrow are all there is.
        slow = compare(SlowItems(data, 0.005), 8, (2, 2), 20, rounds=3)
    report = {
        "fetch_ratio": batch["ratio"],
        "fetch_batch_of_64": batch,
        "fetch_single_prompts": single,
        "fetch_items_of_5_ms_2_workers": slow,
        "read_domains_100k_s": round(reading, 3),
        **draw_time(),
        **large_state(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
