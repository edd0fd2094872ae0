"""The wheel of dataflex-two-stage-reward on the real trainer: its rewards become advantages, the others leave."""

from __future__ import annotations

import json
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from dataflex_hooks import hookimpl

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("contrib")]

ME = "tests.real.test_contrib_two_stage_reward"
LABEL = "dataflex/two_stage_reward"
FIELDS = ("rm_scores", "advantages", "responses", "response_mask")


def judge(solution_str: str, ground_truth: str, prompt_str: str, data_source: str, record: str) -> float:
    """A reward on another scale than verl's; writes down what it was asked."""
    with open(record, "a") as file:
        file.write(json.dumps([solution_str, ground_truth, prompt_str, data_source]) + "\n")
    return verdict(solution_str)


async def judge_async(solution_str: str, record: str) -> float:
    return judge(solution_str, "", "", "", record)


def verdict(solution: str) -> float:
    # Eighths: verl's mean of equal rewards is then exact, and its deviation 0.
    return 10 + sum(map(ord, solution)) % 13 / 8


def group_of(key: str) -> str:
    return key.rsplit("_", 2)[0]


def grouped(values: dict[str, float]) -> dict[str, dict[str, float]]:
    groups: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        groups.setdefault(group_of(key), {})[key] = value
    return groups


def totals(values: dict[str, torch.Tensor]) -> dict[str, float]:
    return {key: float(of.sum()) for key, of in values.items()}


def keys_of(batch: Any) -> list[str]:
    parts = zip(batch.uid, batch.session_number.tolist(), batch.output_index.tolist(), strict=True)
    return [f"{uid}_{session}_{output}" for uid, session, output in parts]


class Seen:
    """Remembers what it sees when rewards stand."""

    provides: frozenset[str] = frozenset()
    requires = {"post_reward": ("rm_scores",)}

    def __init__(self) -> None:
        self.batches: list[Any] = []

    @hookimpl
    def post_reward(self, batch: Any, ctx: Any) -> None:
        self.batches.append(batch)


@pytest.fixture(scope="module")
def texts(stored, demo) -> dict[str, str]:
    """Decoded responses of the stored batch by key."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.model_dir)
    decoded = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in stored.fields["responses"].unbind()]
    return dict(zip(stored.keys, decoded, strict=True))


def check_scored(outcome: Any, plain: Any, texts: dict[str, str], k: int) -> None:
    """Rewards, rows and advantages are those of the k best of each group of the plain update."""
    cheap, expensive = totals(plain.of("rm_scores")), totals(outcome.of("rm_scores"))
    assert len(expensive) == k * len(grouped(cheap))
    advantages = outcome.of("advantages")
    for uid, group in grouped(cheap).items():
        kept = {key: verdict(texts[key]) for key in group if key in expensive}
        assert len(kept) == k
        assert min(group[key] for key in kept) >= max(value for key, value in group.items() if key not in kept), uid
        assert {key: expensive[key] for key in kept} == pytest.approx(kept)
        mean, spread = fmean(kept.values()), stdev(kept.values())
        for key, reward in kept.items():
            expected = torch.full_like(advantages[key], (reward - mean) / (spread + 1e-6))
            torch.testing.assert_close(advantages[key], expected, rtol=1e-4, atol=1e-5)
    assert len({round(value, 4) for value in expensive.values()}) > 3


def test_one_override_has_the_best_of_each_group_judged_and_the_others_leave(live, stored, texts, tmp_path):
    plain = live.update(stored, fields=FIELDS)
    record = tmp_path / "asked.jsonl"
    block = {"plugins": {"two_stage_reward": {"function": f"{ME}:judge", "params": {"record": str(record)}}}}
    outcome = live.update(stored, block, fields=FIELDS)
    check_scored(outcome, plain, texts, k=4)
    assert outcome.grad_norm > 0
    assert outcome.grad_norm != pytest.approx(plain.grad_norm, rel=1e-3)
    assert outcome.metrics["dataflex/two_stage_reward/kept_frac"] == 0.5

    asked = [json.loads(line) for line in record.read_text().splitlines()]
    kept = set(outcome.of("rm_scores"))
    tokens = {key: tuple(values.tolist()) for key, values in outcome.of("responses").items()}
    distinct = {(group_of(key), tokens[key]): texts[key] for key in kept}
    assert sorted(line[0] for line in asked) == sorted(distinct.values())
    assert outcome.metrics[f"{LABEL}/calls_total"] == len(asked)
    assert outcome.metrics[f"{LABEL}/saved_calls_total"] == len(stored.keys) - len(asked)
    assert outcome.metrics[f"{LABEL}/expensive_mean"] == pytest.approx(fmean(verdict(texts[key]) for key in kept))
    truths = dict(zip(stored.keys, (of["ground_truth"] for of in stored.fields["reward_model"]), strict=True))
    assert {line[1] for line in asked} == {str(truths[key]) for key in kept}
    assert all(line[2] and line[3] in ("add", "middle", "sort") for line in asked)


def test_a_second_update_on_the_same_responses_calls_nothing(live, stored, texts, demo, tmp_path):
    from dataflex_two_stage_reward import TwoStageReward

    record = tmp_path / "asked.jsonl"
    plugin = TwoStageReward(judge_async, k=3, params={"record": str(record)}, tokenizer=str(demo.model_dir))
    plugins = {"two_stage_reward": plugin}
    first = live.update(stored, plugins=plugins, fields=FIELDS)
    calls = len(record.read_text().splitlines())
    second = live.update(stored, plugins=plugins, fields=FIELDS)
    assert len(record.read_text().splitlines()) == calls == first.metrics[f"{LABEL}/calls_total"]
    assert second.metrics[f"{LABEL}/calls_total"] == 0
    assert second.metrics[f"{LABEL}/cache_hits_total"] == len(second.of("rm_scores")) == 24
    assert second.grad_norm == first.grad_norm
    check_scored(second, live.update(stored, fields=FIELDS), texts, k=3)


def test_other_plugins_never_see_the_cheap_reward_of_a_response_that_was_not_scored(live, stored, texts, tmp_path):
    seen = Seen()
    block = {"plugins": {"two_stage_reward": {"function": f"{ME}:judge", "params": {"record": str(tmp_path / "a")}}}}
    outcome = live.update(stored, block, plugins={"seen": seen}, fields=FIELDS)
    scored = totals(outcome.of("rm_scores"))
    (batch,) = seen.batches
    assert batch.bs == len(stored.keys) == 2 * len(scored)
    rewards = dict(zip(keys_of(batch), batch.rewards.tolist(), strict=True))
    means = {uid: fmean(group.values()) for uid, group in grouped(scored).items()}
    assert rewards == pytest.approx({key: scored.get(key, means[group_of(key)]) for key in stored.keys}, rel=1e-5)


def test_installed_and_not_named_it_changes_nothing(live, stored):
    ours, verls = live.update(stored, fields=FIELDS), live.update(stored, plain=True, fields=FIELDS)
    assert ours.grad_norm == verls.grad_norm > 0
    assert set(ours.keys) == set(verls.keys) >= set(stored.keys)
    for key, value in verls.of("rm_scores").items():
        assert torch.equal(ours.of("rm_scores")[key], value)
    assert not [name for name in ours.metrics if name.startswith("dataflex/")]
