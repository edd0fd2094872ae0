"""Every preset's decision on the real trainer's stored batch, against plain Python on the step's own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tensordict.tensorclass import NonTensorData, NonTensorStack

from dataflex_hooks import PluginError, UpdateDecision
from dataflex_verl import presets
from tests import oracles
from tests.oracles import OracleRow
from tests.real.plugins import Decide

pytestmark = pytest.mark.real

ROLLOUTS, LIMIT = 8, 6
FIELDS = ("rollout_is_weights", "advantages", "response_mask", "rm_scores", "old_log_probs", "entropy")
CASES = [*oracles.SELECT, *oracles.REWEIGHT]


@pytest.fixture(scope="module")
def uneven(live, stored):
    """The stored batch with what real batches have: missing sessions, a second output, tool tokens, a graded reward.

    29 rows, so that verl adds padding to fill mini-batches of 16.
    """
    rows = stored.select(list(range(29)))
    keys = list(rows.keys)
    uid, session, _ = keys[1].rsplit("_", 2)
    # The second row becomes a further output of the first one's session, if it is of the same prompt.
    first = keys[0].rsplit("_", 2)
    if first[0] == uid:
        keys[1] = f"{uid}_{first[1]}_1"
    fields = rows.fields.clone()
    mask = fields["response_mask"]
    values, offsets = mask.values().clone(), mask.offsets()
    values[offsets[3] : offsets[3] + 1] = 0
    lengths = dict(min_seqlen=1, max_seqlen=LIMIT)
    fields["response_mask"] = torch.nested.nested_tensor_from_jagged(values, offsets, **lengths)
    rewards = fields["rm_scores"].values().clone()
    rewards[offsets[5] - 1] = 0.25
    fields["rm_scores"] = torch.nested.nested_tensor_from_jagged(rewards, offsets, **lengths)
    return type(rows)(keys, rows.tags, fields)


def as_oracle(outcome: Any, seen: Decide) -> dict[str, OracleRow]:
    """The rows of a step by key, out of what the trainer stored; only the order of equal content is ours."""
    (batch,) = seen.batches
    rank = {
        f"{batch.uid[i]}_{int(batch.session_number[i])}_{int(batch.output_index[i])}": int(batch.tie_rank[i])
        for i in range(batch.bs)
    }
    read = {name: outcome.of(name) for name in FIELDS if name in outcome.fields}
    rows = {}
    for key, mask in read["response_mask"].items():
        uid, session, output = key.rsplit("_", 2)
        rows[key] = OracleRow(
            uid=uid,
            session=int(session),
            output=int(output),
            reward=float(read["rm_scores"][key].sum()),
            mask=tuple(mask.tolist()),
            advantages=tuple(read["advantages"][key].tolist()),
            log_probs=tuple(read["old_log_probs"][key].tolist()),
            entropy=tuple(read["entropy"][key].tolist()),
            tie=rank[key],
        )
    assert rows.keys() == rank.keys()
    return rows


def expected_weights(
    preset: str, rows: Mapping[str, OracleRow], normalised: bool, max_length: int
) -> dict[str, list[float]]:
    """What has to stand in ``rollout_is_weights``: 0 and 1, or weights that average 1 over valid tokens."""
    keys = list(rows)
    oracle = oracles.SELECT.get(preset) or oracles.REWEIGHT[preset]
    decided = oracle([rows[key] for key in keys], step=1, max_length=max_length, rollouts=ROLLOUTS)
    raw = {
        key: [float(x) for x in value] if isinstance(value, list) else [float(value)] * len(rows[key].mask)
        for key, value in zip(keys, decided, strict=True)
    }
    counted = [(w, m) for key in keys for w, m in zip(raw[key], rows[key].mask, strict=True)]
    tokens, total = sum(m for _, m in counted), sum(w * m for w, m in counted)
    scale = tokens / total if normalised else 1.0
    return {key: [w * scale * m for w, m in zip(raw[key], rows[key].mask, strict=True)] for key in keys}


def check(
    live: Any, batch: Any, preset: str, block: Mapping[str, Any], max_length: int = LIMIT
) -> dict[str, list[float]]:
    seen = Decide(lambda batch: UpdateDecision())
    settings = {"actor_rollout_ref.actor.ppo_mini_batch_size": 2}
    outcome = live.update(batch, block, plugins={"seen": seen}, fields=FIELDS, settings=settings)
    rows = as_oracle(outcome, seen)
    (plugin,) = block["plugins"].values()
    raw = plugin["plugin"] == "select" or plugin.get("normalize") == "none" or preset in ("high_entropy", "curve")
    expected = expected_weights(preset, rows, not raw, max_length)
    weights = outcome.of("rollout_is_weights")
    assert weights.keys() == expected.keys()
    for key, value in weights.items():
        assert value.tolist() == pytest.approx(expected[key], rel=1e-5, abs=1e-9), key
    for position in outcome.padding:
        assert (outcome.fields["rollout_is_weights"][position] == 1).all()
    assert (
        preset not in oracles.SELECT
        or outcome.metrics["dataflex/kept_frac"] < 1
        or all(w == m for key, row in rows.items() for w, m in zip(expected[key], row.mask, strict=True))
    )
    return expected


def test_every_preset_that_selects_or_reweights_has_an_oracle():
    mixers: list[str] = []
    others: list[str] = []
    for name in presets.names():
        (plugin,) = presets.block(name)["plugins"].values()
        (mixers if plugin["plugin"] == "mix" else others).append(name)
    assert sorted(CASES) == others and len(others) >= 20


def test_the_uneven_batch_is_what_it_says(uneven):
    uids = [key.rsplit("_", 2)[0] for key in uneven.keys]
    assert sorted({uids.count(uid) for uid in uids}) != [ROLLOUTS]
    assert any(key.endswith("_1") for key in uneven.keys)
    assert uneven.fields["rm_scores"].values().unique().numel() == 3
    assert not uneven.fields["response_mask"].values().all()


@pytest.mark.parametrize("preset", CASES)
def test_weights_in_the_loss_are_those_of_the_oracle(live, uneven, preset):
    block = presets.block(preset)
    check(live, uneven, preset, block)


@pytest.mark.parametrize("preset", CASES)
def test_each_preset_tells_rows_of_the_stored_batch_apart(live, stored, preset):
    """The same on the whole batch, where each has an effect: without one the comparison would prove nothing."""
    block = presets.block(preset)
    longest = int(stored.fields["response_mask"].offsets().diff().max())
    if preset == "overlong":
        block["plugins"]["overlong"]["scorer"]["params"] = {"max_length": longest}
    expected = check(live, stored, preset, block, max_length=longest if preset == "overlong" else LIMIT)
    values = {round(w, 9) for row in expected.values() for w in row}
    # No rollout of this task fails, and all of its rewards are 0 or 1.
    assert len(values) > 1 or preset in ("failed", "diffband_reward", "pf_ppo_max_min")


def test_a_rollout_that_failed_is_masked(live, stored):
    def judged(value):
        fields = stored.fields.clone()
        infos = [
            {**info, "reward_extra_info": {"timeout": float(i == 2) * value}} for i, info in enumerate(stored_infos)
        ]
        fields["extra_fields"] = NonTensorStack(*(NonTensorData(info) for info in infos))
        return type(stored)(stored.keys, stored.tags, fields)

    stored_infos = [dict(info) for info in stored.fields["extra_fields"]]
    block = presets.block("failed")
    block["plugins"]["failed"]["scorer"]["params"] = {"signal": "timeout"}
    masked = {key: not w.any() for key, w in live.update(judged(1.0), block).of("rollout_is_weights").items()}
    assert masked == {key: i == 2 for i, key in enumerate(stored.keys)}
    assert all(w.all() for w in live.update(judged(0.0), block).of("rollout_is_weights").values())


def test_a_signal_is_read_from_what_the_reward_function_returned(live, stored):
    by_reward = presets.block("difffilter")
    by_signal = presets.block("difffilter")
    by_signal["plugins"]["difffilter"]["scorer"]["params"]["signal"] = "acc"
    one, other = live.update(stored, by_reward), live.update(stored, by_signal)
    for key, weights in one.of("rollout_is_weights").items():
        assert torch.equal(weights, other.of("rollout_is_weights")[key])
    by_signal["plugins"]["difffilter"]["scorer"]["params"]["signal"] = "format"
    with pytest.raises(
        PluginError, match="no signal 'format' in the reward_extra_info of 64 of 64 rollouts; there is: acc"
    ):
        live.update(stored, by_signal)


def test_a_schedule_changes_how_many_are_kept(live, stored):
    block = presets.block("topk")
    block["plugins"]["topk"]["actuator"]["params"]["fraction"] = {0: 1.0, 10: 0.25}
    kept = {}
    for step in (1, 5, 10, 20):
        weights = live.update(stored, block, step=step).of("rollout_is_weights").values()
        kept[step] = sum(bool(w.any()) for w in weights)
    # 0.925, 0.625 and 0.25 of 64.
    assert kept == {1: 59, 5: 40, 10: 16, 20: 16}
