"""Demo tasks: seeded partition, bounds on constant answers, and the dataset's columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dataflex_verl.demo.reward import compute_score
from dataflex_verl.demo.tasks import DOMAINS, Splits, Task, make_splits, write_parquet

SIZES = {"train_per_domain": 120, "val_per_domain": 24}


@pytest.fixture(scope="module", params=range(5))
def splits(request: pytest.FixtureRequest) -> Splits:
    return make_splits(request.param, **SIZES)


def best_constant_answer(tasks: Sequence[Task]) -> float:
    """Mean reward of always giving the answer that pays best."""
    candidates = Counter(task.answer for task in tasks)
    return max(
        sum(compute_score(task.domain, candidate, task.answer) for task in tasks) / len(tasks)
        for candidate in candidates
    )


def test_splits_of_one_seed_are_equal() -> None:
    assert make_splits(3, **SIZES) == make_splits(3, **SIZES)


def test_splits_of_other_seeds_differ() -> None:
    assert make_splits(0, **SIZES).val != make_splits(1, **SIZES).val


def test_validation_problems_are_held_out(splits: Splits) -> None:
    held_out = {(task.domain, task.key) for task in splits.val}
    assert len(held_out) == len(splits.val)
    assert held_out.isdisjoint((task.domain, task.key) for task in splits.train + splits.warm_start)


def test_training_questions_are_unique(splits: Splits) -> None:
    assert len({task.question for task in splits.train}) == len(splits.train) == 120 * len(DOMAINS)


def test_neighbouring_rows_share_the_domains_equally(splits: Splits) -> None:
    for tasks in (splits.train, splits.val):
        for start in range(0, len(tasks), len(DOMAINS)):
            assert [task.domain for task in tasks[start : start + len(DOMAINS)]] == list(DOMAINS)


@pytest.mark.parametrize("split", ["train", "val"])
def test_constant_answer_scores_below_the_bound(splits: Splits, split: str) -> None:
    tasks: list[Task] = getattr(splits, split)
    for domain in DOMAINS:
        assert best_constant_answer([task for task in tasks if task.domain == domain]) <= 0.35
    assert best_constant_answer(tasks) <= 0.35


def test_answers_are_right() -> None:
    for task in DOMAINS["add"].tasks():
        left, right = task.question.split("+")
        assert int(task.answer) == int(left) + int(right)
    for task in DOMAINS["middle"].tasks():
        assert task.answer == sorted(task.question.removeprefix("mid "))[1]
    for task in DOMAINS["sort"].tasks():
        assert task.answer == "".join(sorted(task.question.removeprefix("sort ")))


def test_slips_are_wrong() -> None:
    for domain in DOMAINS.values():
        for task in domain.tasks():
            assert task.slips
            assert task.answer not in task.slips


def test_sizes_beyond_the_problem_space_are_refused() -> None:
    with pytest.raises(ValueError, match="domain 'middle' has 120 problems"):
        make_splits(0, train_per_domain=160, val_per_domain=119)


def test_parquet_has_the_columns_of_a_verl_dataset(splits: Splits, tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write_parquet(splits.train, path, "train")
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == len(splits.train)
    for index, (row, task) in enumerate(zip(rows, splits.train, strict=True)):
        assert row == {
            "data_source": task.domain,
            "prompt": [{"role": "user", "content": task.question}],
            "ability": DOMAINS[task.domain].ability,
            "reward_model": {"style": "rule", "ground_truth": task.answer},
            "extra_info": {"index": index, "split": "train", "domain": task.domain},
            "domain": task.domain,
        }
