"""Rule-based reward of the demo tasks, in the format of verl's ``custom_reward_function``.

The file is loaded by its path in verl's reward workers, so it imports nothing of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """1.0 for the exact answer, else 0.0, in every domain: a prompt's mean reward is its pass rate.

    Args:
        data_source: domain name, unused.
        solution_str: decoded response without special tokens. Space around the answer does not count.
        ground_truth: the right answer.
        extra_info: the row's ``extra_info``, unused.
        kwargs: whatever else a reward manager passes, unused.
    """
    return float(solution_str.strip() == str(ground_truth))
