"""All packages of contrib/ as installed wheels, with select, reweight and mix, in one run on the real trainer."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dataflex_hooks import HookManager
from dataflex_verl.added_rows import ADDED
from dataflex_verl.startup import run_facts
from tests.real.harness import compose_config
from tests.real.prompts import mixing, overrides
from tests.real.runs import Run, train

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("contrib")]

ME = "tests.real.test_contrib_together"
FROM_WHEELS = ("example", "kl_guard", "replay", "reward_router", "sft_mix", "two_stage_reward")
DOMAINS = ("add", "middle", "sort")
STEPS, FAIL_FROM, LONGEST, LIMIT, K = 5, 4, 3, 0.1, 3
SCALE, PENALTY, DAMPED = 2.0, 0.125, 0.5


def judge(solution_str: str, ground_truth: str, data_source: str, switch: str) -> float:
    """1 for the right answer, else eighths below 0.5 by the text; with the file ``switch``, 0 for a whole domain."""
    if data_source == "middle" and Path(switch).exists():
        return 0.0
    return 1.0 if solution_str.strip() == ground_truth else sum(map(ord, solution_str)) % 4 / 8


def routed(row: dict[str, Any], switch: str) -> float:
    """The reward of a row: the judge's verdict, adjusted in the domain that has a route."""
    verdict = judge(row["text"], row["reward_model"]["ground_truth"], row["data_source"], switch)
    return verdict if row["data_source"] != "add" else verdict * SCALE - PENALTY * len(row["responses"])


class Updates:
    """What the actor is trained on in each step, a dict a row; the domain fails from step ``FAIL_FROM`` on."""

    fields = ("rm_scores", "advantages", "rollout_is_weights", "response_mask", "responses", "data_source")

    def __init__(self, switch: Path) -> None:
        self.switch = switch
        self.steps: list[list[dict[str, Any]]] = []

    def look(self, trainer: Any) -> None:
        """Given to ``train``."""
        if self.steps:
            return
        update = trainer._update_actor

        def seen(batch: Any, metrics: dict[str, Any]) -> Any:
            import transfer_queue as tq

            data = tq.kv_batch_get(
                keys=batch.keys, partition_id=batch.partition_id, select_fields=[*self.fields, "reward_model"]
            )
            columns = {name: list(data[name]) for name in (*self.fields, "reward_model")}
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            for key, tag, row in zip(batch.keys, batch.tags, rows, strict=True):
                text = trainer.tokenizer.decode(row["responses"], skip_special_tokens=True)
                row |= {"key": key, "uid": key.rsplit("_", 2)[0], "tag": tag, "text": text}
            self.steps.append([row for row in rows if not row["tag"].get("is_padding") or ADDED in row["tag"]])
            if len(self.steps) == FAIL_FROM - 1:
                self.switch.touch()
            return update(batch, metrics)

        trainer._update_actor = seen

    def rows(self, step: int, added: bool) -> list[dict[str, Any]]:
        """Rows of a step that were generated in it, or those added to it."""
        return [row for row in self.steps[step - 1] if (ADDED in row["tag"]) == added]


@pytest.fixture(scope="module")
def files(demo, tmp_path_factory) -> dict[str, Path]:
    """Six prompts, so that a run sees each again and again, and demonstrations for them."""
    folder = tmp_path_factory.mktemp("together")
    table = pq.read_table(demo.train_parquet).slice(0, 6)
    pq.write_table(table, folder / "train.parquet")
    lines = [
        {"prompt": row["prompt"], "response": row["reward_model"]["ground_truth"], "domain": row["domain"]}
        for row in table.to_pylist()
    ]
    (folder / "demos.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"train": folder / "train.parquet", "demos": folder / "demos.jsonl", "switch": folder / "switch"}


def blocks(files: dict[str, Path]) -> list[str]:
    """An override for each plugin, in no order that means anything."""
    function = f"function:'{ME}:judge',params:{{switch:'{files['switch']}'}},cache:0"
    band = f"{{name:threshold_band,params:{{low:{LIMIT},high:9.0}}}}"
    return [
        "+dataflex.plugins.per={plugin:reweight,scorer:advantage_magnitude,actuator:per_advantage}",
        f"+dataflex.plugins.example.longest={LONGEST}",
        "+dataflex.plugins.replay.max_age=50",
        f"+dataflex.plugins.reward_router.routes.add={{scale:{SCALE},length_penalty:{PENALTY}}}",
        f"+dataflex.plugins.kl_guard={{metric:actor/kl_loss,high:1e-7,low:0.0,scale:{DAMPED}}}",
        f"+dataflex.plugins.band={{plugin:select,scorer:reward_difficulty,actuator:{band}}}",
        f"+dataflex.plugins.two_stage_reward={{{function},k:{K}}}",
        f"+dataflex.plugins.sft_mix={{data:'{files['demos']}',share:0.125}}",
        *mixing("{name:reward_gap,params:{temperature:0.2,floor:0.1}}", "reward_difficulty"),
    ]


once = pytest.mark.xdist_group("contrib_together")  # one run serves all tests of it


@pytest.fixture(scope="module")
def together(ray_session, demo, files, contrib) -> tuple[Run, Updates]:
    updates = Updates(files["switch"])
    more = [
        *blocks(files),
        f"data.train_files={files['train']}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=50",
    ]
    return train(compose_config(overrides(demo, *more)), updates.look), updates


@once
def test_the_plan_lists_each_with_its_distribution_and_version(together, contrib):
    run, _ = together
    plan = {row["label"]: row for row in run.trainer.hooks.plan()}
    assert set(plan) == {*FROM_WHEELS, "per", "band", "mix"}
    for name in FROM_WHEELS:
        package = f"dataflex-{name.replace('_', '-')}"
        assert (plan[name]["distribution"], plan[name]["version"]) == (package, version(package))
    text = str(run.trainer.config.dataflex_plan)
    assert all(f"dataflex-{name.replace('_', '-')} {version('dataflex-example')}" in text for name in FROM_WHEELS)


@once
def test_only_the_best_of_each_group_are_left_with_the_expensive_reward_of_their_route(together, files):
    run, updates = together
    for step, metrics in enumerate(run.metrics, start=1):
        rows = updates.rows(step, added=False)
        share = len({row["uid"] for row in rows if row["data_source"] == "add"}) / 4
        assert metrics["dataflex/reward_router/share:add"] == share
        assert len(rows) == 4 * K and metrics["dataflex/two_stage_reward/kept_frac"] == K / 4
        for row in rows:
            switch = str(files["switch"]) if step >= FAIL_FROM else "nowhere"
            assert float(row["rm_scores"].sum()) == routed(row, switch)
        groups = {row["uid"] for row in rows}
        assert all(sum(row["uid"] == uid for row in rows) == K for uid in groups)


@once
def test_masks_weights_and_the_guards_factor_reach_each_row(together):
    run, updates = together
    for step, metrics in enumerate(run.metrics, start=1):
        rows = updates.rows(step, added=False)
        low = [row for row in rows if float(row["rm_scores"].sum()) <= LIMIT]
        long = [row for row in rows if len(row["responses"]) > LONGEST]
        masked = [row for row in rows if not row["rollout_is_weights"].any()]
        assert {row["key"] for row in masked} == {row["key"] for row in (*low, *long)}
        # The guard looks at the step before; its factor is on everything that is trained on.
        damped = step > 1 and run.metrics[step - 2]["actor/kl_loss"] > 1e-7
        assert metrics["dataflex/kl_guard/engaged"] == damped
        factor = DAMPED if damped else 1.0
        for row in updates.rows(step, added=True):
            assert set(row["rollout_is_weights"].tolist()) == {factor}
        kept = [row for row in rows if row["rollout_is_weights"].any()]
        tokens = sum(len(row["responses"]) for row in kept)
        assert sum(float(row["rollout_is_weights"].sum()) for row in kept) / tokens == pytest.approx(factor, abs=1e-5)
        # The larger the advantage the larger the weight; equal ones weigh the same.
        order = sorted((abs(float(row["advantages"][0])), float(row["rollout_is_weights"][0])) for row in kept)
        assert [weight for _, weight in order] == sorted(weight for _, weight in order)
        assert metrics["dataflex/band/kept_frac"] == pytest.approx(1 - len(low) / len(rows))
        assert metrics["dataflex/example/kept_frac"] == pytest.approx(1 - len(long) / len(rows))
    assert sum(metrics["dataflex/per/weight_std"] > 0 for metrics in run.metrics) >= 2
    assert [metrics["dataflex/kl_guard/engaged"] for metrics in run.metrics] == [0, 0, 1, 1, 1]
    assert any(metrics["dataflex/example/kept_frac"] < 1 for metrics in run.metrics)
    assert any(metrics["dataflex/band/kept_frac"] < 1 for metrics in run.metrics)


@once
def test_demonstrations_are_trained_on_in_every_step_and_past_successes_in_failed_groups(together):
    run, updates = together
    replayed_at = []
    for step, metrics in enumerate(run.metrics, start=1):
        groups = {row["uid"] for row in updates.rows(step, added=False)}
        demos = [row for row in updates.rows(step, added=True) if row["uid"] not in groups]
        replayed = [row for row in updates.rows(step, added=True) if row["uid"] in groups]
        assert len(demos) == 2 and metrics["dataflex/added_rows"] == 2 + len(replayed)
        assert all(set(row["advantages"].tolist()) == {1.0} for row in demos)
        for row in replayed:
            replayed_at.append(step)
            assert float(row["advantages"][0]) > 0
            failed = [other for other in updates.rows(step, added=False) if other["uid"] == row["uid"]]
            assert all(float(other["advantages"].sum()) < 0 for other in failed)
    assert replayed_at and min(replayed_at) >= 2


@once
def test_mixing_follows_the_rewards_that_apply(together):
    run, updates = together
    for metrics in run.metrics:
        assert sum(metrics[f"dataflex/proposed_{name}"] for name in DOMAINS) == pytest.approx(1)
    assert run.metrics[-1]["dataflex/proposed_middle"] > run.metrics[0]["dataflex/proposed_middle"]
    for step, metrics in enumerate(run.metrics, start=1):
        rows = updates.rows(step, added=False)
        for name in ("middle", "sort"):
            own = [float(row["rm_scores"].sum()) for row in rows if row["data_source"] == name]
            if own:
                # Unscored rollouts count as the mean of their group: the statistic is that of the scored ones.
                assert metrics[f"dataflex/reward_{name}"] == pytest.approx(fmean(own), abs=1e-6)


def objects(live: Any, files: dict[str, Path], labels: list[str]) -> dict[str, object]:
    """The plugins of these labels, new, in this order."""
    config = compose_config(blocks(files)).dataflex.plugins
    hooks = HookManager.from_config(
        {"plugins": {label: config[label] for label in labels}},
        estimator="grpo",
        has_groups=True,
        rollout_n=8,
        response_length=6,
        facts=run_facts(live.config),
    )
    return {label: hooks._entries[label].plugin for label in labels}


def two_updates(live: Any, stored: Any, files: dict[str, Path], labels: list[str]) -> Any:
    """The second of two updates with the same plugins, in which a domain fails that did not before."""
    files["switch"].unlink(missing_ok=True)
    plugins = objects(live, files, labels)
    live.update(stored, plugins=plugins, step=1)
    files["switch"].touch()
    return live.update(stored, plugins=plugins, step=2)


def test_nobodys_order_matters(live, stored, files, monkeypatch):
    monkeypatch.setattr(live.trainer, "_last_metrics", {"actor/kl_loss": 0.5})
    labels = [*FROM_WHEELS, "per", "band"]
    one, other = (two_updates(live, stored, files, order) for order in (labels, labels[::-1]))
    assert one.grad_norm == other.grad_norm > 0
    own = set(stored.keys)
    # What is added has a new name in every batch.
    assert [key in own and key for key in one.keys] == [key in own and key for key in other.keys]
    assert one.padding == other.padding
    for name in ("rm_scores", "advantages", "rollout_is_weights", "response_mask"):
        assert all(map(torch.equal, one.fields[name], other.fields[name])), name
    logged = {name: value for name, value in one.metrics.items() if "timing" not in name and "perf" not in name}
    assert {name: other.metrics[name] for name in logged} == logged
    for label in FROM_WHEELS:
        assert one.metrics[f"dataflex/{label}/decided_total"] > 0
    assert one.metrics["dataflex/kl_guard/engaged"] == 1 and one.metrics["dataflex/added_rows"] > 8
    assert one.grad_norm != pytest.approx(two_updates(live, stored, files, labels[1:]).grad_norm, rel=1e-4)
