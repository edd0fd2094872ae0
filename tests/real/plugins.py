"""Small plugins that the real-trainer cases are made of."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataflex_hooks import DomainDecision, RewardDecision, UpdateDecision, hookimpl


class Decide:
    """Returns an UpdateDecision made by ``make(batch)``; remembers the contexts and batches it saw."""

    requires = {"post_advantage": ("advantages", "rm_scores", "responses", "prompts")}

    def __init__(self, make: Any) -> None:
        self.make = make
        self.contexts: list[Any] = []
        self.batches: list[Any] = []

    @hookimpl
    def post_advantage(self, batch: Any, ctx: Any) -> UpdateDecision | None:
        self.contexts.append(ctx)
        self.batches.append(batch)
        return self.make(batch)


def mask_all(keep: bool) -> Decide:
    return Decide(lambda batch: UpdateDecision(mask=torch.full((batch.bs,), keep)))


def weigh_all(value: float, normalize: str) -> Decide:
    return Decide(lambda batch: UpdateDecision(weights=torch.full((batch.bs,), value), normalize=normalize))


def by_position(batch: Any) -> UpdateDecision:
    """Another raw weight for every token: 1 + its position in the response, 0 at every third."""
    weights = 1.0 + batch.position.double()
    return UpdateDecision(weights=torch.where(batch.position % 3 == 2, 0.0, weights), normalize="none")


class ReplaceRewards:
    """Owns the rewards: every response gets the number of its tokens."""

    provides = {"rewards"}

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> RewardDecision:
        return RewardDecision(rewards=batch.lengths.float())


class Remember:
    """Scripts the rewards and weighs rows out of all it has seen so far; writes down what it decided and from what.

    Args:
        record: file that gets a JSON line a step.
        wait_at: the step at whose end it waits for ever, to be killed.
    """

    provides = {"rewards", "weights"}
    requires = {"post_reward": ("responses",), "post_advantage": ("advantages", "responses", "rm_scores")}

    def __init__(self, record: str, wait_at: int = 0) -> None:
        self.record, self.wait_at = Path(record), wait_at
        self.random = np.random.default_rng(5)
        self.means: list[float] = []
        self.counts: dict[int, int] = {}
        self.baseline = torch.zeros(3, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "random": self.random.bit_generator.state,
            "means": self.means,
            "counts": self.counts,
            "baseline": self.baseline,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]
        self.means, self.counts, self.baseline = state["means"], state["counts"], state["baseline"]

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> RewardDecision:
        rewards = torch.from_numpy(self.random.integers(0, 2, batch.bs))
        for token in batch.values("responses").tolist():
            self.counts[token] = self.counts.get(token, 0) + 1
        self.means.append(float(rewards.double().mean()) / 3)
        self.baseline = 0.9 * self.baseline + torch.tensor([self.means[-1], ctx.step, len(self.counts)]) / 7
        return RewardDecision(rewards=rewards.float())

    @hookimpl
    def post_advantage(self, batch: Any, ctx: Any) -> UpdateDecision:
        last = {name: value for name, value in ctx.last_metrics.items() if name.startswith(("actor/", "critic/"))}
        seen = torch.tensor([self.counts[token] for token in batch.values("responses").tolist()], dtype=torch.float64)
        weights = 1 / seen + self.baseline.sum() + last.get("critic/score/mean", 0.0) + self.random.random()
        decided = {
            "step": ctx.step,
            "rewards": batch.rewards.tolist(),
            "advantages": batch.values("advantages").tolist(),
            "responses": batch.values("responses").tolist(),
            "weights": weights.tolist(),
            "last_metrics": {name: last[name] for name in sorted(last) if "mfu" not in name and "memory" not in name},
            "state": repr(self.state_dict()),
        }
        with self.record.open("a") as file:
            file.write(json.dumps(decided) + "\n")
        while ctx.step == self.wait_at:
            time.sleep(1.0)
        return UpdateDecision(weights=weights, normalize="none")


class Switch:
    """All prompts from the first domain, and from the end of step ``at`` on all from the last one."""

    provides = {"proportions"}

    def __init__(self, at: int) -> None:
        self.at = at

    def start(self, domains: Any) -> list[float]:
        return [1.0, *[0.0] * (len(domains) - 1)]

    @hookimpl
    def on_domain_stats(self, stats: Any, ctx: Any) -> DomainDecision | None:
        last = torch.tensor([*[0.0] * (len(stats.domains) - 1), 1.0])
        return DomainDecision(proportions=last) if ctx.step == self.at else None


class ScriptRewards:
    """Rewards by domain and step: ``level + slope * step``, half of a group's rollouts ``spread`` above, half below.

    The three rank domains differently: by level sort, middle, add from the lowest up; by slope middle, sort, add and by
    spread add, sort, middle from the steepest and the widest down.
    """

    SCRIPT = {"add": (0.9, 0.0, 0.3), "middle": (0.45, 0.08, 0.05), "sort": (0.3, -0.03, 0.15)}
    provides = {"rewards"}
    requires = {"post_reward": ("dataflex_domain",)}

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> RewardDecision:
        script = np.array([self.SCRIPT[str(name)] for name in batch.column("dataflex_domain")])
        sign = np.where(batch.session_number.cpu().numpy() % 2 == 0, 1.0, -1.0)
        rewards = script[:, 0] + script[:, 1] * ctx.step + script[:, 2] * sign
        return RewardDecision(rewards=torch.from_numpy(rewards.astype(np.float32)))
