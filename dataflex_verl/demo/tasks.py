"""Three domains of generated arithmetic and logic tasks, of unequal difficulty for the warm-started model.

Every domain lists its whole problem space, so a split is a seeded partition of that space: a validation problem
(whatever the order of its operands) appears neither in the training split nor in the warm start.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class Task:
    """One question with its only right answer.

    Attributes:
        domain: name of the domain.
        question: the user message.
        answer: the right answer.
        slips: answers that mistake the question for a neighbouring one, all wrong. The warm start teaches them too.
        key: the problem up to the order of its operands. Tasks with one key stay in one split.
    """

    domain: str
    question: str
    answer: str
    slips: tuple[str, ...]
    key: str


def _add() -> Iterator[Task]:
    """Sum of two different numbers from 1 to 24. Slips: the larger number, the difference."""
    for a, b in itertools.permutations(range(1, 25), 2):
        yield Task("add", f"{a}+{b}", str(a + b), (str(max(a, b)), str(abs(a - b))), f"{min(a, b)}+{max(a, b)}")


def _middle() -> Iterator[Task]:
    """Middle one of three different digits. Slips: the smallest, the largest."""
    for digits in itertools.permutations("0123456789", 3):
        low, middle, high = sorted(digits)
        yield Task("middle", "mid " + "".join(digits), middle, (low, high), low + middle + high)


def _sort() -> Iterator[Task]:
    """Three different digits in ascending order. Slips: descending, as given. Leaves out triples already in order."""
    for digits in itertools.permutations("0123456789", 3):
        given, ascending = "".join(digits), "".join(sorted(digits))
        descending = ascending[::-1]
        if given not in (ascending, descending):
            yield Task("sort", f"sort {given}", ascending, (descending, given), ascending)


@dataclass(frozen=True)
class Domain:
    """A problem space and how well the warm start teaches it.

    Attributes:
        ability: value of the dataset's ``ability`` column.
        tasks: lists the problem space, always in the same order.
        right_share: share of right answers in the second half of the warm start; the rest are slips.
    """

    ability: str
    tasks: Callable[[], Iterator[Task]]
    right_share: float


DOMAINS: dict[str, Domain] = {
    "add": Domain("arithmetic", _add, right_share=0.7),
    "middle": Domain("logic", _middle, right_share=0.4),
    "sort": Domain("logic", _sort, right_share=0.35),
}


@dataclass(frozen=True)
class Splits:
    """Tasks of all domains.

    ``train`` and ``val`` take the domains in turn, so ``3 k`` neighbouring rows hold ``k`` tasks of each domain.
    ``warm_start`` is everything outside ``val``, domain after domain.
    """

    train: list[Task]
    val: list[Task]
    warm_start: list[Task]


def make_splits(seed: int, train_per_domain: int, val_per_domain: int) -> Splits:
    """Partition every domain's problem space.

    Raises:
        ValueError: a domain has too few problems for the sizes asked for.
    """
    train: list[list[Task]] = []
    val: list[list[Task]] = []
    warm_start: list[Task] = []
    for name, domain in DOMAINS.items():
        by_key: dict[str, list[Task]] = {}
        for task in domain.tasks():
            by_key.setdefault(task.key, []).append(task)
        keys = sorted(by_key)
        rng = random.Random(f"{name}/{seed}")
        rng.shuffle(keys)
        held_out = [rng.choice(by_key[key]) for key in keys[:val_per_domain]]
        rest = [task for key in keys[val_per_domain:] for task in by_key[key]]
        rng.shuffle(rest)
        if len(held_out) < val_per_domain or len(rest) < train_per_domain:
            raise ValueError(
                f"domain {name!r} has {len(keys)} problems: too few for {val_per_domain} validation tasks "
                f"and {train_per_domain} training tasks"
            )
        val.append(held_out)
        train.append(rest[:train_per_domain])
        warm_start.extend(rest)
    return Splits(train=_take_turns(train), val=_take_turns(val), warm_start=warm_start)


def _take_turns(columns: Sequence[Sequence[Task]]) -> list[Task]:
    return [task for row in zip(*columns, strict=True) for task in row]


def write_parquet(tasks: Sequence[Task], path: Path, split: str) -> None:
    """Write tasks as a verl dataset, one row each, ``extra_info.index`` = row number.

    Columns: ``data_source`` and ``domain`` (the domain's name), ``prompt`` (chat messages), ``ability``,
    ``reward_model`` (``style``, ``ground_truth``), ``extra_info`` (``index``, ``split``, ``domain``).
    """
    rows = [
        {
            "data_source": task.domain,
            "prompt": [{"role": "user", "content": task.question}],
            "ability": DOMAINS[task.domain].ability,
            "reward_model": {"style": "rule", "ground_truth": task.answer},
            "extra_info": {"index": index, "split": split, "domain": task.domain},
            "domain": task.domain,
        }
        for index, task in enumerate(tasks)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
