"""A run without a trainer: random rollouts, the real hooks, the log that the trainer writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

import dataflex_hooks as dh
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, ROW_COLUMN, DomainSums
from dataflex_verl.decision_log import RunLog, open_log

DOMAINS = ("code", "logic", "math")


def random_batch(rng: np.random.Generator, groups: int, size: int, longest: int = 12) -> dh.RolloutBatch:
    """Rollouts of ``groups`` prompts, ``size`` each: rewards 0, 0.5 or 1, some responses equal, some tool tokens."""
    n = groups * size
    lengths = rng.integers(1, longest + 1, n)
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    total = int(lengths.sum())
    reward = rng.integers(0, 3, n).astype(np.float32) / 2
    rewards = torch.zeros(total)
    rewards[offsets[1:] - 1] = torch.from_numpy(reward)
    mask = torch.from_numpy((rng.random(total) < 0.9).astype(np.int64))
    mask[offsets[:-1]] = 1
    grouped = reward.reshape(groups, size)
    advantage = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-6)
    advantages = torch.from_numpy(advantage.astype(np.float32).reshape(-1)).repeat_interleave(offsets.diff()) * mask
    prompts = torch.from_numpy(rng.integers(0, 90, (groups, 3))).repeat_interleave(size, dim=0).flatten()
    domains = np.array(DOMAINS, dtype=object)[rng.integers(0, 3, groups)].repeat(size)
    infos = np.empty(n, dtype=object)
    infos[:] = [{"reward_extra_info": {"acc": bool(value > 0.5), "note": "text"}} for value in reward]
    return dh.RolloutBatch(
        [f"{uid}_{session}_0" for uid in _ids(rng, groups) for session in range(size)],
        offsets,
        {DOMAIN_COLUMN: domains, ROW_COLUMN: np.arange(groups, dtype=object).repeat(size), "extra_fields": infos},
        {
            "response_mask": mask,
            "rm_scores": rewards,
            "responses": torch.from_numpy(rng.integers(0, 3, total)),
            "advantages": advantages,
            "old_log_probs": -torch.from_numpy(rng.random(total).astype(np.float32)) * 3,
            "entropy": torch.from_numpy(rng.random(total).astype(np.float32)) * 2,
        },
        (prompts, torch.arange(n + 1) * 3),
    )


def _ids(rng: np.random.Generator, groups: int) -> list[str]:
    # Their order is not that of the rows.
    return [f"{number:08x}_g" for number in rng.choice(1 << 30, groups, replace=False).tolist()]


@dataclass
class SimulatedRun:
    """What a run decided, step by step.

    Attributes:
        decided: by (step, row key): state and weight; the weights of the row's tokens.
        proposed: proportions by step.
    """

    folder: Path
    decided: dict[tuple[int, str], tuple[str, float, Any]] = field(default_factory=dict)
    proposed: dict[int, np.ndarray] = field(default_factory=dict)
    log: RunLog | None = None
    hooks: dh.HookManager | None = None


def config_of(block: Mapping[str, Any], folder: Path, log: Any = True) -> Any:
    return OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(folder), "v1": {"trainer_mode": "sync"}},
            "algorithm": {"adv_estimator": "grpo"},
            "data": {"seed": 5},
            "actor_rollout_ref": {"rollout": {"n": 4, "response_length": 12}},
            "dataflex": {**block, "log_decisions": log},
        }
    )


class Mixing:
    """What the log asks of the trainer's domains."""

    def __init__(self) -> None:
        self.domains, self.on_evicted = DOMAINS, None
        self.sampler = SimpleNamespace(dataset=SimpleNamespace(fingerprint="3 rows, abc"))
        self.ended: Any = None

    def described(self, means: Mapping[str, float]) -> dict[str, Any]:
        stats, decided = self.ended
        return {"proportions": stats.proportions.tolist(), "proposed": None if decided is None else decided.tolist()}


def simulate(
    block: Mapping[str, Any],
    folder: Path,
    steps: int = 4,
    first: int = 1,
    log: Any = True,
    kind: str = "token",
    groups: int = 6,
    seed: int = 0,
    hooks: dh.HookManager | None = None,
) -> SimulatedRun:
    """Run ``block`` for some steps over random rollouts and write the decision log below ``folder``."""
    config = config_of(block, folder, log)
    hooks = hooks or dh.HookManager.from_config(
        config.dataflex, estimator="grpo", has_groups=True, rollout_n=4, response_length=12
    )
    coefficients = dh.LossCoefficients(kind, divides_by_rows=kind == "sequence")
    run = SimulatedRun(folder / "decisions", log=open_log(config, hooks, coefficients, ["a plan"]), hooks=hooks)
    assert run.log is not None
    mixing = Mixing()
    shares = np.full(3, 1 / 3)
    if hooks.mixes:
        run.log.watch(mixing)
        started = hooks.start_domains(DOMAINS)
        shares = shares if started is None else started
    for step in range(first, first + steps):
        shares = _step(run, hooks, coefficients, mixing, step, shares, np.random.default_rng([seed, step]), groups)
    run.log.wait()
    return run


def next_step(run: SimulatedRun, step: int) -> None:
    """One step more, of a run that mixes nothing; its file is written in the background."""
    _step(run, run.hooks, dh.LossCoefficients("token"), None, step, None, np.random.default_rng([0, step]), 6)


def _step(run, hooks, coefficients, mixing, step, shares, rng, groups) -> np.ndarray:
    batch = random_batch(rng, groups, 4)
    ctx = dh.StepContext(step, seed=5, explain=True)
    sums = DomainSums(DOMAINS)
    if hooks.mixes:
        gone = random_batch(rng, 2, 4)
        run.log._evicted.append(gone)
        sums.add_evicted(gone)
        hooks.observe("post_reward", gone, ctx)
    bare = {name: batch.values(name) for name in ("response_mask", "rm_scores", "responses")}
    columns = {name: batch.column(name) for name in (DOMAIN_COLUMN, ROW_COLUMN, "extra_fields")}
    before = dh.RolloutBatch(batch.keys, batch.offsets, columns, bare, batch._prompts)
    reward = hooks.post_reward(before, ctx)
    run.log.rewarded(before, reward, ctx)
    view = before if reward.rewards is None else before.with_token_field("rm_scores", reward.rewards)
    sums.add_rewarded(view)
    hooks.observe("post_reward", view, ctx)
    applied = hooks.config.apply
    keep = torch.ones(batch.bs, dtype=torch.bool) if reward.row_keep is None or not applied else reward.row_keep
    # verl deals rows out anew: their order changes.
    order = torch.from_numpy(rng.permutation(np.flatnonzero(keep.numpy())))
    after = _reordered(batch, order)
    generated = reward.generated if reward.row_keep is not None and applied else None
    merged = hooks.post_advantage(after, ctx, coefficients, generated)
    run.log.advantaged(after, merged, merged.skip_update, None)
    _note(run, step, batch, reward, after, merged)
    if hooks.mixes:
        sums.add_advantages(after, merged.row_keep)
        hooks.observe("post_advantage", after, ctx)
        stats = sums.stats(shares)
        decided = hooks.on_domain_stats(stats, ctx)
        mixing.ended = (stats, decided)
        if decided is not None:
            run.proposed[step] = decided
            shares = decided
    run.log.end_of_step()
    return shares


def _reordered(batch: dh.RolloutBatch, order: torch.Tensor) -> dh.RolloutBatch:
    lengths = batch.lengths[order]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    place = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    index = batch.offsets[order].repeat_interleave(lengths) + place
    names = ("response_mask", "rm_scores", "responses", "advantages", "old_log_probs", "entropy")
    fields = {name: batch.values(name)[index] for name in names}
    columns = {name: batch.column(name)[order.numpy()] for name in (DOMAIN_COLUMN, ROW_COLUMN, "extra_fields")}
    prompts = batch._prompts[0].view(batch.bs, 3)[order].flatten()
    keys = [batch.keys[i] for i in order.tolist()]
    return dh.RolloutBatch(keys, offsets, columns, fields, (prompts, torch.arange(len(keys) + 1) * 3))


def _note(run, step, batch, reward, after, merged) -> None:
    early = dict.fromkeys(batch.keys, False)
    if reward.row_keep is not None:
        early = dict(zip(batch.keys, (~reward.row_keep).tolist(), strict=True))
    for key in batch.keys:
        run.decided[step, key] = ("dropped", 0.0, None)
    for row, key in enumerate(after.keys):
        if early[key] or (merged.in_batch is not None and not bool(merged.in_batch[row])):
            continue
        tokens = merged.weights[after.offsets[row] : after.offsets[row + 1]]
        valid = after.values("response_mask")[after.offsets[row] : after.offsets[row + 1]].bool()
        weight = float(tokens[valid].double().mean().float()) if merged.per_token else float(tokens[valid][0])
        run.decided[step, key] = ("trained" if bool(merged.row_keep[row]) else "masked", weight, tokens)
