"""Mixers under scripted rewards: every target is what its formula gives on the statistics that the run logged.

The oracles below know nothing of ours: each takes a step's logged means and counts, one array entry a domain.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dataflex_hooks.plugins.mix import MixPlugin
from tests.real.harness import compose_config
from tests.real.prompts import CHEAP, Prompts, mixing, overrides
from tests.real.runs import train

pytestmark = pytest.mark.real

FLOOR, STEPS, WINDOW = 0.05, 5, 3
NAMES = ("add", "middle", "sort")


def softmax(values: Any) -> np.ndarray:
    power = np.exp(np.array(values) - np.max(values))
    return power / power.sum()


def over_floor(shares: np.ndarray) -> np.ndarray:
    return FLOOR + (1 - len(shares) * FLOOR) * shares


def totals(steps: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    counts = sum(count for _, count in steps)
    return sum(mean * count for mean, count in steps) / np.maximum(counts, 1), counts


def reward_gap(steps: list[Any]) -> np.ndarray:
    mean, counts = totals(steps[-WINDOW:])
    mean = np.where(counts > 0, mean, mean[counts > 0].mean())
    return softmax((mean.max() - mean) / 0.2)


def dump_ucb(steps: list[Any]) -> np.ndarray:
    mean, counts = totals(steps[-WINDOW:])
    return softmax((mean + 0.1 * np.sqrt(2 * math.log(counts.sum() + 1) / (counts + 1))) / 0.1)


def tscl(steps: list[Any]) -> np.ndarray:
    slopes = []
    for domain in range(len(NAMES)):
        seen = [
            (step, mean[domain], count[domain]) for step, (mean, count) in enumerate(steps, start=1) if count[domain]
        ]
        x, y, n = np.array([one for one in seen if one[0] > len(steps) - WINDOW]).reshape(-1, 3).T
        slopes.append(abs(np.polyfit(x, y, 1, w=np.sqrt(n))[0]) if len(x) > 1 else 0.0)
    return softmax(np.array(slopes) / 0.05)


def odm(steps: list[Any]) -> np.ndarray:
    k, share, reward = len(NAMES), np.full(len(NAMES), 1 / len(NAMES)), np.zeros(len(NAMES))
    exploration = [1 / k] + [max(0.03, min(1 / k, math.sqrt(math.log(k) / (k * t)))) for t in range(1, STEPS + 1)]
    for t, (mean, count) in enumerate(steps, start=1):
        reward = np.where(count > 0, 0.9 * reward + 0.1 * mean / share, reward)
        mixed = (1 - k * exploration[t]) * softmax(exploration[t - 1] * reward) + exploration[t]
        share = over_floor(mixed)
    return mixed


def sec(steps: list[Any]) -> np.ndarray:
    q = np.zeros(len(NAMES))
    for mean, count in steps:
        q = np.where(count > 0, 0.5 * q + 0.5 * mean, q)
    return softmax(q / 0.1)


def dads(steps: list[Any]) -> np.ndarray:
    last = steps[-WINDOW:]
    weights = [count / (len(last) - place) for place, (_, count) in enumerate(last)]
    mean = sum(weight * mean for weight, (mean, _) in zip(weights, last, strict=True)) / np.maximum(sum(weights), 1e-9)
    mean = np.where(sum(weights) > 0, mean, mean[sum(weights) > 0].mean())
    return softmax(np.maximum(0.0, 1.0 - mean) / 0.3)


def doremi(steps: list[Any]) -> np.ndarray:
    weights = np.full(len(NAMES), 1 / len(NAMES))
    for mean, count in steps:
        excess = np.where(count > 0, mean - mean[count > 0].mean(), 0.0)
        grown = weights * np.exp(excess)
        weights = 0.999 * grown / grown.sum() + 0.001 / len(NAMES)
    return weights


REWARD, ADVANTAGE = "reward_difficulty", "advantage_magnitude"
OWNERS = {
    "reward_gap": (REWARD, {"temperature": 0.2, "window": WINDOW}, reward_gap, ("sort", "middle", "add")),
    "dump_ucb": (ADVANTAGE, {"c": 0.1, "temperature": 0.1, "window": WINDOW}, dump_ucb, ("add", "sort", "middle")),
    "tscl": (REWARD, {"temperature": 0.05, "window": WINDOW}, tscl, ("middle", "sort", "add")),
}
BESIDE = {
    **{name: (scorer, params, oracle) for name, (scorer, params, oracle, _) in OWNERS.items()},
    "odm": (ADVANTAGE, {}, odm),
    "sec": (ADVANTAGE, {"temperature": 0.1}, sec),
    "dads": (REWARD, {"window": WINDOW}, dads),
    "doremi": (REWARD, {}, doremi),
}


class Beside:
    """The other mixers' own plugins, given what the run's is given: every batch it observes, every statistic."""

    def __init__(self, owner: str) -> None:
        self.proposed: dict[str, list[list[float]]] = {name: [] for name in BESIDE if name != owner}
        self.plugins: dict[str, MixPlugin] = {}

    def look(self, trainer: Any) -> None:
        if self.plugins:
            return
        for name in self.proposed:
            scorer, params, _ = BESIDE[name]
            self.plugins[name] = MixPlugin(scorer, {"name": name, "params": {**params, "floor": FLOOR}})
            self.plugins[name].start(trainer.mixing.domains)
        hooks = trainer.hooks
        observe, decide = hooks.observe, hooks.on_domain_stats

        def observed(hook: str, batch: Any, ctx: Any) -> None:
            observe(hook, batch, ctx)
            for plugin in self.plugins.values():
                if plugin.observes == hook:
                    plugin.observe(batch, ctx)

        def decided(stats: Any, ctx: Any) -> Any:
            for name, plugin in self.plugins.items():
                self.proposed[name].append(plugin.on_domain_stats(stats, ctx).proportions.tolist())
            return decide(stats, ctx)

        hooks.observe, hooks.on_domain_stats = observed, decided


def logged(metrics: list[dict[str, float]], scorer: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Means and counts of each step, as logged: of the reward, or of the absolute advantage of rows that have one."""
    steps = []
    for step in metrics:
        responses, unscored = (np.array([step[f"dataflex/{key}_{name}"] for name in NAMES]) for key in COUNTED)
        name = "reward" if scorer == REWARD else "advantage"
        mean = np.array([step.get(f"dataflex/{name}_{domain}", 0.0) for domain in NAMES])
        steps.append((mean, responses if scorer == REWARD else responses - unscored))
    return steps


COUNTED = ("responses", "unscored")


@pytest.mark.parametrize(
    "owner", ["reward_gap", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("dump_ucb", "tscl"))]
)
def test_every_target_is_the_formula_on_the_logged_statistics(ray_session, demo, owner):
    """The run is steered by reward_gap, dump_ucb or tscl, one training each.

    The others do not steer it, since proportions have one owner: their plugins stand beside it, are given the same
    batches and statistics in the same process, and what they decide is compared in the same way.
    """
    scorer, params, oracle, ranking = OWNERS[owner]
    prompts, beside = Prompts(), Beside(owner)

    def look(trainer: Any) -> None:
        prompts.look(trainer)
        beside.look(trainer)

    written = ",".join(f"{name}:{value}" for name, value in {**params, "floor": FLOOR}.items())
    more = [
        *mixing(f"{{name:{owner},params:{{{written}}}}}", scorer),
        "+dataflex.plugins.script.plugin=tests.real.plugins:ScriptRewards",
        *CHEAP,
        "data.train_batch_size=9",
        "actor_rollout_ref.actor.ppo_mini_batch_size=9",
        "algorithm.norm_adv_by_std_in_grpo=False",
        f"trainer.total_training_steps={STEPS}",
    ]
    run = train(compose_config(overrides(demo, *more)), look)
    assert run.trainer.mixing.domains == NAMES and len(run.metrics) == STEPS
    steps = logged(run.metrics, scorer)
    for step, metrics in enumerate(run.metrics, start=1):
        proposed = [metrics[f"dataflex/proposed_{name}"] for name in NAMES]
        assert proposed == pytest.approx(over_floor(oracle(steps[:step])), abs=1e-6)
        assert min(proposed) >= FLOOR
        if step < STEPS:
            # In force for every prompt of the next step, and logged as its target.
            assert [shares.tolist() for shares in prompts.in_force[9 * step : 9 * (step + 1)]] == [
                pytest.approx(proposed, abs=1e-6)
            ] * 9
            after = run.metrics[step]
            assert [after[f"dataflex/prop_{name}"] for name in NAMES] == pytest.approx(proposed, abs=1e-6)
    # Levels, slopes and advantages rank the domains differently, and each mixer follows its own.
    assert tuple(sorted(NAMES, key=lambda name: -run.metrics[-1][f"dataflex/proposed_{name}"])) == ranking
    assert prompts.worst(NAMES) < len(NAMES)

    for name in beside.proposed:
        scorer, _, oracle = BESIDE[name]
        steps = logged(run.metrics, scorer)
        assert len(beside.proposed[name]) == STEPS
        for step, proposed in enumerate(beside.proposed[name], start=1):
            assert proposed == pytest.approx(over_floor(oracle(steps[:step])), abs=1e-6), (name, step)
            assert min(proposed) >= FLOOR
    # Not one of them decides what the owner decides.
    own = [run.metrics[-1][f"dataflex/proposed_{name}"] for name in NAMES]
    assert all(max(np.abs(np.array(given[-1]) - own)) > 1e-3 for given in beside.proposed.values())
