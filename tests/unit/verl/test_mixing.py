"""Domains over several steps without a trainer: prompts, statistics, decisions, metrics, warnings."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import dataflex_hooks as dh
from dataflex_hooks.domain_stats import DOMAIN_COLUMN
from dataflex_hooks.proportions import softmax
from tests.unit.hooks.test_domain_stats import with_domains
from tests.unit.hooks.test_mix_plugin import Manager

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")

from dataflex_hooks.plugins.mix import MixPlugin  # noqa: E402
from dataflex_verl import mixing as module  # noqa: E402
from dataflex_verl.domain_metrics import DomainWatch, domain_metrics  # noqa: E402


class Rows:
    """A dataset of two domains, math twice as large."""

    def __len__(self):
        return 30

    def __getitem__(self, row):
        return {"prompt": f"p{row}", "domain": "code" if row % 3 == 0 else "math", "level": row}


def collate(items):
    return {name: np.array([item[name] for item in items], dtype=object) for name in items[0]}


@pytest.fixture
def run():
    def build(plugin, **options):
        hooks = Manager({"mix": plugin}, **options)
        config = OmegaConf.create({"data": {"train_batch_size": 6, "seed": 1, "shuffle": True}})
        state = SimpleNamespace(step=1)
        mixing = module.DomainMixing(hooks, config, Rows(), collate, lambda: dh.StepContext(step=state.step))
        return mixing, state

    return build


def one_step(mixing, state, batches, reward_of, dropped=()):
    """Generate, reward, update; returns the step's domains and metrics."""
    fetched = next(mixing.loader)
    names = fetched[DOMAIN_COLUMN].tolist()
    rows = batches.rows([[reward_of[name], 0.0] for name in names], advantage=1.0)
    view = with_domains(batches.build(rows), [name for name in names for _ in range(2)])
    mixing.rewarded(view)
    kept = torch.tensor([name not in dropped for name in names for _ in range(2)])
    mixing.advantaged(view, kept)
    metrics = mixing.end_of_step(dh.StepContext(step=state.step))
    state.step += 1
    return names, metrics


def test_decisions_reach_the_prompts_of_the_next_step(run, batches):
    params = {"temperature": 0.1, "floor": 0.0}
    mixing, state = run(MixPlugin("reward_difficulty", {"name": "reward_gap", "params": params}))
    names, metrics = one_step(mixing, state, batches, {"math": 1.0, "code": 0.0})
    assert sorted(names) == ["code"] * 3 + ["math"] * 3
    expected = softmax([0.5, 0.0], 0.1)
    assert [metrics[f"dataflex/proposed_{name}"] for name in ("code", "math")] == pytest.approx(expected)
    assert [metrics[f"dataflex/prop_{name}"] for name in ("code", "math")] == [0.5, 0.5]
    names, metrics = one_step(mixing, state, batches, {"math": 1.0, "code": 0.0})
    assert names == ["code"] * 6
    assert metrics["dataflex/generated_code"] == metrics["dataflex/trained_code"] == 1.0
    assert metrics["dataflex/prop_code"] == pytest.approx(expected[0])


def test_static_acts_from_the_first_prompt_on(run, batches):
    plugin = MixPlugin(actuator={"name": "static", "params": {"proportions": {"math": 0.9, "code": 0.1}}})
    mixing, state = run(plugin)
    seen = {"math": 0, "code": 0}
    for step in range(1, 31):
        names, _ = one_step(mixing, state, batches, {"math": 1.0, "code": 0.0})
        for name in names:
            seen[name] += 1
        assert abs(seen["math"] - 0.9 * 6 * step) < 2


def test_before_any_decision_domains_have_their_share_of_the_data(run, batches):
    mixing, state = run(MixPlugin("reward_difficulty", "reward_gap"), warmup_step=3)
    names, metrics = one_step(mixing, state, batches, {"math": 1.0, "code": 0.0})
    assert sorted(names) == ["code"] * 2 + ["math"] * 4
    assert metrics["dataflex/proposed_math"] == pytest.approx(2 / 3)


def test_shadow_mode_decides_and_changes_nothing(run, batches):
    mixing, state = run(MixPlugin("reward_difficulty", {"name": "reward_gap", "params": {"temperature": 0.1}}))
    mixing.hooks.config = dh.DataFlexConfig(apply=False)
    _, metrics = one_step(mixing, state, batches, {"math": 1.0, "code": 0.0})
    assert metrics["dataflex/proposed_code"] > 0.9
    assert mixing.sampler.proportions.tolist() == [0.5, 0.5]


def test_metrics_of_a_step_by_hand(run, batches):
    mixing, state = run(MixPlugin("reward_difficulty", "reward_gap"))
    names, metrics = one_step(mixing, state, batches, {"math": 1.0, "code": 0.5}, dropped=("code",))
    of_math = {name: metrics[f"dataflex/{name}_math"] for name in ("reward", "solved", "kept", "trained", "groups")}
    assert of_math == {"reward": 0.5, "solved": 0.5, "kept": 1.0, "trained": 1.0, "groups": 3.0}
    of_code = {name: metrics[f"dataflex/{name}_code"] for name in ("reward", "solved", "kept", "trained", "score")}
    assert of_code == {"reward": 0.25, "solved": 0.0, "kept": 0.0, "trained": 0.0, "score": 0.25}
    assert metrics["dataflex/generated_code"] == 0.5
    assert metrics["dataflex/epochs_code"] == pytest.approx(0.3)


def test_evicted_groups_count_and_equal_rewards_score_zero(run, batches, monkeypatch):
    rows = batches.rows([[1.0, 1.0], [0.0, 1.0]])
    stored = with_domains(batches.build(rows), ["code", "code", "math", "math"])
    keys = [f"{row.uid}_{row.session}_{row.output}" for row in rows]

    def fetch(meta, fields):
        view = stored
        if len(meta.keys) == 2:
            view = with_domains(batches.build(rows[:2]), ["code"] * 2)
        return SimpleNamespace(view=view, missing=frozenset(fields) - {"rm_scores", "response_mask", DOMAIN_COLUMN})

    monkeypatch.setattr(module.bridge, "fetch", fetch)
    plugin = MixPlugin("advantage_magnitude", {"name": "sec", "params": {"alpha": 1.0}})
    mixing, state = run(plugin)
    mixing.evicted("train", keys, [{}] * 4)
    names, metrics = one_step(mixing, state, batches, {"math": 1.0, "code": 0.5})
    groups = {name: names.count(name) for name in ("code", "math")}
    assert metrics["dataflex/groups_code"] == groups["code"] + 1
    assert (metrics["dataflex/unscored_code"], metrics["dataflex/unscored_math"]) == (0.0, 2.0)
    code = 2 * groups["code"] * 1.0 / (2 * groups["code"] + 2)
    assert metrics["dataflex/advantage_code"] == pytest.approx(code)
    assert metrics["dataflex/advantage_math"] == 1.0
    assert metrics["dataflex/score_code"] == pytest.approx(code)
    assert metrics["dataflex/proposed_code"] == pytest.approx(softmax([code, 1.0], 1.0)[0])


class Levels:
    """A plugin that admits even rows and prefers high levels."""

    provides = frozenset({"admit", "priority", "proportions"})
    requires = {"pre_rollout": ("level",)}

    def on_domain_stats(self, stats, ctx):
        return None

    def pre_rollout(self, candidates, ctx):
        level = candidates.columns["level"].astype(float)
        return dh.RolloutDecision(admit=torch.from_numpy(level % 2 == 0), priority=torch.from_numpy(level))


def test_candidates_are_admitted_by_plugins_with_their_columns(run, batches):
    mixing, state = run(Levels(), hooks=("on_domain_stats", "pre_rollout"))
    fetched = next(mixing.loader)
    assert all(level % 2 == 0 for level in fetched["level"])
    by_domain = {name: [row for row in range(30) if Rows()[row]["domain"] == name and row % 2 == 0] for name in NAMES}
    for name, count in (("code", 2), ("math", 4)):
        chosen = [row for row, domain in zip(fetched["level"], fetched["domain"], strict=True) if domain == name]
        assert sorted(chosen) == by_domain[name][-count:]


class Rollouts(Levels):
    def pre_rollout(self, candidates, ctx):
        return dh.RolloutDecision(rollouts=torch.ones(len(candidates), dtype=torch.int64))


class HalfAdmitted(Levels):
    def pre_rollout(self, candidates, ctx):
        return dh.RolloutDecision(admit=torch.full((len(candidates),), 0.5))


@pytest.mark.parametrize(
    ("plugin", "wrong"),
    [(Rollouts, "rollouts per prompt are not applied"), (HalfAdmitted, "admit is neither true nor false for 6 of 6")],
)
def test_answers_to_candidates_that_cannot_be_used_name_the_plugin(run, plugin, wrong):
    plugin.provides = frozenset({"admit", "rollouts", "proportions"})
    mixing, _ = run(plugin(), hooks=("on_domain_stats", "pre_rollout"))
    with pytest.raises(dh.DecisionError, match=f"plugin 'mix' .* in pre_rollout at step 1: {wrong}"):
        next(mixing.loader)


def select_by_level(low, high, **block):
    @dh.register_scorer("level")
    class Level(dh.Scorer):
        timing = "pre_rollout"
        requires = ("level",)

        def score(self, batch, step_id, **ctx):
            return torch.from_numpy(batch.columns["level"].astype(np.float32))

    band = {"name": "threshold_band", "params": {"low": low, "high": high}}
    block = {"mechanism": "select", "scorer": {"name": "level"}, "actuator": band, **block}
    return dh.HookManager.from_config(block, estimator="grpo", has_groups=True)


def domain_mixing(hooks):
    config = OmegaConf.create({"data": {"train_batch_size": 6, "seed": 1, "shuffle": True}})
    return module.DomainMixing(hooks, config, Rows(), collate, lambda: dh.StepContext(step=1))


def test_select_steers_the_sampler_by_scores_of_candidates(registry):
    mixing = domain_mixing(select_by_level(9.5, 20.5))
    fetched = next(mixing.loader)
    # Rows 10 to 20: 3 of code, the others of math; quotas 2 and 4 by the share of the data.
    assert all(9 < level < 21 for level in fetched["level"])
    assert sorted(fetched["domain"]) == ["code"] * 2 + ["math"] * 4
    open_to_all = domain_mixing(select_by_level(-1.0, 100.0))
    assert not all(9 < level < 21 for level in next(open_to_all.loader)["level"])


def test_on_starved_reaches_the_sampler(registry, caplog):
    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        assert len(next(domain_mixing(select_by_level(100.0, 200.0)).loader)["level"]) == 6
    assert "domain 'code': 0 of 2 prompts admitted in 16 draws; the best refused ones are taken" in caplog.text
    mixing = domain_mixing(select_by_level(100.0, 200.0, on_starved="error"))
    with pytest.raises(dh.DataFlexError, match="0 of 2 prompts admitted in 16 draws; on_starved: error"):
        next(mixing.loader)


def test_a_column_that_the_data_lacks_is_refused_at_the_start(registry):
    @dh.register_scorer("hardness")
    class Hardness(dh.Scorer):
        timing = "pre_rollout"
        requires = ("hardness",)

        def score(self, batch, step_id, **ctx):
            raise AssertionError("never called")

    block = {"mechanism": "select", "scorer": {"name": "hardness"}, "actuator": {"name": "threshold_band"}}
    with pytest.raises(
        dh.ConfigError,
        match="dataflex: got hardness, read at pre_rollout and not in the training data; accepted: its "
        "columns: prompt, domain, level",
    ):
        domain_mixing(dh.HookManager.from_config(block, estimator="grpo", has_groups=True))


NAMES = ("code", "math")


def test_a_saved_run_fetches_the_same_prompts(run, batches):
    def build():
        return run(MixPlugin("reward_difficulty", {"name": "tscl", "params": {"temperature": 0.01}}))

    def steps(mixing, state, count):
        rewards = [{"math": state.step % 3 / 3, "code": state.step % 5 / 5} for _ in range(count)]
        return [one_step(mixing, state, batches, reward) for reward in rewards]

    mixing, state = build()
    steps(mixing, state, 4)
    saved = mixing.loader.state_dict(), mixing.hooks._entries["mix"].plugin.state_dict()
    expected = steps(mixing, state, 6)
    other, later = build()
    later.step = 5
    other.loader.load_state_dict(saved[0])
    other.hooks._entries["mix"].plugin.load_state_dict(saved[1])
    other.restored()
    assert steps(other, later, 6) == expected


def test_a_domain_that_trains_nothing_is_warned_of_once_a_stretch(caplog):
    watch = DomainWatch(("a", "b"))
    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        for step in range(1, 60):
            watch.starved(np.array([0.9, 0.1]), np.array([4, 0]), step)
        assert caplog.text.count("domain 'b' has trained no prompt for 20 steps up to step 20") == 1
        assert len(caplog.records) == 1
        watch.starved(np.array([0.9, 0.1]), np.array([3, 1]), 60)
        for step in range(61, 90):
            watch.starved(np.array([1.0, 0.0]), np.array([4, 0]), step)
    assert len(caplog.records) == 1


def test_low_admission_is_warned_of_once_a_stretch(caplog):
    watch = DomainWatch(("a",))
    with caplog.at_level(logging.WARNING, logger="dataflex_verl"):
        shares = [
            watch.admission(np.array([drawn]), np.array([admitted]), np.array([0]))["dataflex/admitted_a"]
            for drawn, admitted in ((100, 5), (200, 10), (300, 60), (400, 65))
        ]
    assert shares == [0.05, 0.05, 0.5, 0.05]
    assert [record.getMessage() for record in caplog.records] == [
        "only 5.0% of 100 candidate prompts were admitted in this step"
    ] * 2


def test_keys_of_domains_do_not_collide_with_other_metrics():
    stats = dh.DomainStats(
        ("frac",), np.array([2]), {"kept": np.array([1.0])}, np.array([1]), np.array([0]), np.ones(1)
    )
    stats.scores["abs_advantage"] = np.array([0.5])
    metrics = domain_metrics(
        stats, generated=np.array([1]), trained=np.array([1]), passes=np.ones(1), proposed=np.ones(1), scores={}
    )
    assert "dataflex/kept_fra-c" in metrics and "dataflex/kept_frac" not in metrics
