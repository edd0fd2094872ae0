"""Every preset against plain Python, on batches with ties, single sessions, several outputs and all-equal rewards."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dataflex_hooks as dh
from dataflex_hooks.construct import construct
from dataflex_hooks.plugins.reweight import ReweightPlugin
from dataflex_hooks.plugins.select import SelectPlugin
from dataflex_verl import presets
from tests import oracles
from tests.oracles import OracleRow
from tests.unit.conftest import BatchBuilder, Row

ROLLOUTS, MAX_LENGTH = 6, 5
MECHANISM = {"select": SelectPlugin, "reweight": ReweightPlugin}
PLAIN_REWARDS = {
    "binary": (0.0, 1.0),
    "signed": (-1.0, 1.0),
    "graded": (-0.5, 0.0, 0.1, 0.25, 0.7, 1.3),
    "equal": (0.25,),
}
CASES = [*oracles.SELECT, *oracles.REWEIGHT]


def build(preset: str, **params: object) -> SelectPlugin | ReweightPlugin:
    """The plugin of a preset as a run builds it, parameters of its actuator changed."""
    (settings_,) = presets.block(preset)["plugins"].values()
    keywords = {name: value for name, value in settings_.items() if name != "plugin"}
    keywords["actuator"] = {**keywords["actuator"], "params": {**keywords["actuator"].get("params", {}), **params}}
    facts = {"rollouts": ROLLOUTS, "response_length": MAX_LENGTH}
    return construct(MECHANISM[settings_["plugin"]], keywords, facts)  # type: ignore[return-value]


def make(seed: int, rewards: Sequence[float]) -> tuple[list[Row], torch.Tensor]:
    """Rows of a few groups in random order, and an entropy for each token."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for group in range(rng.randint(1, 6)):
        numbers = rng.sample(range(ROLLOUTS), rng.choice((1, 2, ROLLOUTS - 1, ROLLOUTS)))
        for session in numbers:
            for output in range(rng.choice((1, 1, 1, 2, 3))):
                length = rng.randint(1, MAX_LENGTH)
                mask = tuple(rng.choice((1, 1, 1, 0)) for _ in range(length))
                advantage = tuple(rng.choice((-1.5, -0.25, 0.0, 0.25, 2.0)) for _ in range(length))
                log_prob = tuple(-rng.random() * 3 for _ in range(length))
                rows.append(
                    Row(
                        f"p_{group}",
                        session,
                        output,
                        length=length,
                        reward=rng.choice(rewards),
                        advantage=advantage,
                        log_prob=log_prob,
                        mask=mask,
                    )
                )
    rng.shuffle(rows)
    entropy = [rng.choice((0.0, 0.5, 1.0, 2.5)) for _ in range(sum(row.length for row in rows))]
    return rows, torch.tensor(entropy)


def oracle_rows(batch: dh.RolloutBatch) -> list[OracleRow]:
    """The batch as the oracle takes it. Only the order of equal content is ours."""

    def tokens(name: str, i: int) -> tuple:
        return tuple(batch.values(name)[int(batch.offsets[i]) : int(batch.offsets[i + 1])].tolist())

    return [
        OracleRow(
            uid=str(batch.uid[i]),
            session=int(batch.session_number[i]),
            output=int(batch.output_index[i]),
            reward=sum(tokens("rm_scores", i)),
            mask=tokens("response_mask", i),
            advantages=tokens("advantages", i),
            log_probs=tokens("old_log_probs", i),
            entropy=tokens("entropy", i),
            tie=int(batch.tie_rank[i]),
        )
        for i in range(batch.bs)
    ]


def decide(plugin: SelectPlugin | ReweightPlugin, batch: dh.RolloutBatch, step: int = 1) -> list:
    """The decision as the oracle gives it: bools or numbers by row, or numbers by token within each row."""
    decision = plugin.post_advantage(batch, dh.StepContext(step=step))
    if decision.mask is not None:
        return decision.mask.tolist()
    weights, per_token = batch.align(decision.weights)
    values = weights.tolist()
    offsets = batch.offsets.tolist()
    return [values[offsets[i] : offsets[i + 1]] for i in range(batch.bs)] if per_token else values


def check(preset: str, batch: dh.RolloutBatch, step: int = 1) -> list:
    oracle = oracles.SELECT.get(preset) or oracles.REWEIGHT[preset]
    expected = oracle(oracle_rows(batch), step=step, max_length=MAX_LENGTH, rollouts=ROLLOUTS)
    found = decide(build(preset), batch, step)
    if preset in oracles.SELECT:
        assert found == expected
    elif isinstance(expected[0], list):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-6)
    else:
        assert found == pytest.approx(expected, rel=1e-6)
    return expected


def test_every_preset_that_selects_or_reweights_has_an_oracle():
    mixers: list[str] = []
    others: list[str] = []
    for name in presets.names():
        (plugin,) = presets.block(name)["plugins"].values()
        (mixers if plugin["plugin"] == "mix" else others).append(name)
    assert sorted(CASES) == others and len(others) >= 20


@pytest.mark.parametrize("preset", CASES)
@pytest.mark.parametrize("rewards", PLAIN_REWARDS)
def test_decision_equals_the_oracle(preset, rewards):
    for seed in range(12):
        rows, entropy = make(seed, PLAIN_REWARDS[rewards])
        check(preset, BatchBuilder().build(rows, entropy=entropy))


@pytest.mark.parametrize("preset", CASES)
def test_the_batches_make_each_preset_tell_rows_apart(preset):
    """Otherwise the comparison above would hold for a method that decides nothing."""
    different = 0
    for seed in range(12):
        graded = preset in ("diffband_reward", "pf_ppo_max_min")
        rows, entropy = make(seed, PLAIN_REWARDS["graded" if graded else "binary"])
        if preset == "failed":
            rows[0] = Row("alone", length=2, mask=0)
            entropy = torch.zeros(sum(row.length for row in rows))
        expected = check(preset, BatchBuilder().build(rows, entropy=entropy))
        flat = [x for row in expected for x in row] if isinstance(expected[0], list) else expected
        different += len(set(flat)) > 1
    assert different >= 3


@settings(max_examples=60, deadline=None)
@example(seed=0, rewards=[0.0, 1.0, 9.889903809253775e-25], preset="maxvar")
@given(
    seed=st.integers(0, 10_000),
    rewards=st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=8),
    preset=st.sampled_from(["maxvar", "gfpo", "dapo", "diffband_reward", "pf_ppo_max_min", "topk"]),
)
def test_decision_equals_the_oracle_for_any_rewards(seed, rewards, preset):
    rows, entropy = make(seed, rewards)
    check(preset, BatchBuilder().build(rows, entropy=entropy))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), shuffle=st.randoms(use_true_random=False), preset=st.sampled_from(CASES))
def test_shuffled_rows_give_the_same_decisions(seed, shuffle, preset):
    rows, _ = make(seed, (0.0, 1.0))
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    one = BatchBuilder().build(rows, entropy=torch.cat([torch.arange(float(r.length)) for r in rows]))
    again = [rows[i] for i in order]
    other = BatchBuilder().build(again, entropy=torch.cat([torch.arange(float(r.length)) for r in again]))
    first, second = decide(build(preset), one), decide(build(preset), other)
    assert [first[i] for i in order] == second


def test_gfpo_by_efficiency_equals_the_oracle():
    differs = 0
    for seed in range(12):
        rows, entropy = make(seed, PLAIN_REWARDS["graded"])
        batch = BatchBuilder().build(rows, entropy=entropy)
        found = decide(build("gfpo", metric="efficiency"), batch)
        assert found == oracles.gfpo_efficiency(oracle_rows(batch))
        differs += found != decide(build("gfpo"), batch)
    assert differs >= 3


def test_vcrl_is_stricter_after_twenty_steps():
    rows, entropy = make(3, (0.0, 1.0))
    rows += [Row("five", s, reward=float(s == 0)) for s in range(5)]
    batch = BatchBuilder().build(rows, entropy=torch.zeros(sum(r.length for r in rows)))
    early, late = check("vcrl", batch, step=19), check("vcrl", batch, step=20)
    assert sum(late) < sum(early)


def test_curve_compares_with_the_steps_before():
    plugin = build("curve")
    before: list[list] = []
    seen = set()
    for step in range(1, 14):
        rows, entropy = make(step, (0.0, 1.0))
        batch = BatchBuilder().build(rows, entropy=entropy)
        ours = oracle_rows(batch)
        expected = oracles.curve(ours, rollouts=ROLLOUTS, before=before)
        assert decide(plugin, batch, step) == pytest.approx(expected)
        before.append([oracles.pass_rate(ours, group) for group in oracles.groups_of(oracles.sessions_of(ours))])
        seen |= set(expected)
    assert len(seen) > 5
