"""Advantages of rows that join a group, after other rows of it have been dropped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from dataflex_hooks import HookManager, RewardDecision, StepContext, hookimpl
from dataflex_hooks.testing import make_groups

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")

from dataflex_verl import apply as apply_module  # noqa: E402
from dataflex_verl.added_checks import TokenRow  # noqa: E402
from dataflex_verl.bridge import FetchedRows  # noqa: E402

CONFIG = {
    "algorithm": {"adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True},
    "actor_rollout_ref": {"rollout": {"n": 4}},
}


class Drops:
    def __init__(self, left, advantages):
        self.left, self.advantages = left, advantages

    @hookimpl
    def post_reward(self, batch):
        left = torch.tensor([self.left[uid] for uid in batch.uid])
        return RewardDecision(keep=batch.session_number < left, advantages=self.advantages)


@pytest.fixture
def written(monkeypatch):
    """Advantages that are written over verl's own, by key, after a drop that leaves so many rows of each group."""
    monkeypatch.setattr(apply_module.drop, "drop", lambda batch, keep: batch)

    def run(left, advantages):
        view = make_groups([0, 0, 0, 0], [0, 0, 0, 0], lengths=1)
        merged = HookManager({"drops": Drops(left, advantages)}).post_reward(view, StepContext(step=1))
        rows = FetchedRows(view, list(view.keys), frozenset(), None)
        batch = SimpleNamespace(keys=list(view.keys), tags=[{}] * view.bs)
        joined = {f"{uid}_1000000_0": TokenRow([1], [2], None, 1.0, None, None, uid) for uid in dict.fromkeys(view.uid)}
        state = apply_module.StepState()
        apply_module.apply_reward(batch, rows, merged, state, OmegaConf.create(CONFIG), joined)
        return {} if state.advantages is None else {key: float(a) for key, a in state.advantages.by_key.items()}

    return run


def test_a_row_that_joined_a_group_with_others_left_keeps_its_advantage_over_these(written):
    # Of the first group one rollout is left, and its baseline is the group; of the second two, and verl's is right.
    found = written({"uid_0": 1, "uid_1": 2}, "kept")
    assert found == pytest.approx({"uid_0_0_0": -0.4472, "uid_0_1000000_0": 1.7889}, abs=1e-3)
    assert written({"uid_0": 2, "uid_1": 2}, "kept") == {}


def test_over_the_whole_group_every_row_that_joined_has_its_advantage_there(written):
    found = written({"uid_0": 1, "uid_1": 2}, "group")
    joined = {key: value for key, value in found.items() if "_1000000_" in key}
    assert joined == pytest.approx({"uid_0_1000000_0": 1.7889, "uid_1_1000000_0": 1.7889}, abs=1e-3)
    assert len(found) == 5
