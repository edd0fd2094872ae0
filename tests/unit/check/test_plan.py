"""The plan: one function for the run's log and for ``dataflex check``."""

from __future__ import annotations

import json
from importlib import metadata
from itertools import takewhile
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from dataflex_hooks import (
    HookManager,
    LossCoefficients,
    RewardDecision,
    Scorer,
    UpdateDecision,
    hookimpl,
    register_scorer,
)
from dataflex_verl.commands.check import NOTHING
from dataflex_verl.commands.hydra_config import CommandLine, compose_config
from dataflex_verl.plan import PLAN_KEY, PREFIX, metrics_file, plan_lines, store_plan

GOOD = ["trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
RUNNABLE = [
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.rollout.name=transformers",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
]
TOKEN = LossCoefficients("token", source="loss_mode=vanilla, loss_agg_mode=token-mean")
BLOCK = {
    "plugins": {
        "band": {"plugin": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"},
        "per": {"plugin": "reweight", "scorer": "advantage_magnitude", "actuator": "per_advantage"},
        "ar": {
            "plugin": "reweight",
            "warmup_step": 5,
            "normalize": "none",
            "scorer": "token_prob",
            "actuator": "advantage_reweight",
        },
    }
}


class Owner:
    provides = frozenset({"rewards", "update_scale", "skip_update"})

    @hookimpl
    def post_reward(self, batch, ctx):
        return RewardDecision(rewards=batch.rewards)

    @hookimpl
    def post_advantage(self, batch, ctx):
        return UpdateDecision(update_scale=1.0)


def plan(block=None, config=None, **extra) -> list[str]:
    hooks = HookManager.from_config({**BLOCK, **(block or {})}, estimator="grpo", has_groups=True, **extra)
    return [line.removeprefix(PREFIX) for line in plan_lines(hooks, TOKEN, config)]


def test_the_plan_says_who_runs_in_order_how_decisions_merge_and_where_they_land():
    lines = plan({"mask_scale": "kept"}, extra_plugins={"own": Owner()})
    version = HookManager.from_config(BLOCK, estimator="grpo", has_groups=True).plan()[0]["version"]
    ours = f"(dataflex-verl {version})"
    assert lines == [
        "4 plugin(s), applied to weights, mask_scale=kept",
        f"band = select group_solve_rate -> threshold_band at post_advantage from step 0 {ours}, provides mask per "
        "response",
        "  scorer group_solve_rate: success_threshold=0.5, signal=reward",
        "  actuator threshold_band: low=0.0, high=1.0",
        f"per = reweight advantage_magnitude -> per_advantage at post_advantage from step 0 {ours}, provides weights "
        "per response, normalised",
        "  scorer advantage_magnitude: agg=mean",
        "  actuator per_advantage: alpha=0.5, epsilon=1e-06",
        f"ar = reweight token_prob -> advantage_reweight at post_advantage from step 5 {ours}, provides weights per "
        "token, as they are",
        "  parameters: normalize=none",
        "  actuator advantage_reweight: alpha=0.5",
        f"own = {__name__}:Owner at post_advantage, post_reward from step 0 ({__name__}:Owner), provides rewards, "
        "skip_update, update_scale",
        "merge: keep what band keeps, made up for by 1/(kept share); multiply the weights of per, normalised over what "
        "is kept; then multiply the weights of ar as they are; multiply by update_scale of own; no update when own "
        "says so",
        "normalised weights average 1 per token (loss_mode=vanilla, loss_agg_mode=token-mean)",
        "lands in: rm_scores, from own; advantages are computed from them",
        "lands in: rollout_is_weights, a factor on each token's policy-gradient term; KL, entropy and the critic are "
        "left alone",
        "logs: dataflex/kept_frac, dataflex/weight_mean, dataflex/weight_largest, dataflex/ess_frac, "
        "dataflex/reward_all, dataflex/reward_kept, dataflex/band/kept_frac, dataflex/per/weight_mean, "
        "dataflex/ar/weight_mean",
    ]


class Weighs:
    provides = frozenset({"weights"})

    @hookimpl
    def post_advantage(self, batch, ctx):
        return UpdateDecision(weights=batch.rewards, normalize="none")


class Drops:
    provides = frozenset({"keep"})

    @hookimpl
    def post_reward(self, batch, ctx):
        return RewardDecision(keep=batch.n_valid > 0)


class Undeclared:
    @hookimpl
    def post_advantage(self, batch, ctx):
        return UpdateDecision(mask=batch.rewards > 0)


def of_plugin(plugin: object) -> list[str]:
    hooks = HookManager.from_config({}, estimator="grpo", has_groups=True, extra_plugins={"p": plugin})
    return [line.removeprefix(PREFIX) for line in plan_lines(hooks, TOKEN)]


def test_weights_whose_decision_may_leave_them_as_they_are_are_not_said_to_be_normalised():
    unless = "normalised over what is kept unless a decision says otherwise"
    assert f"merge: multiply the weights of p, {unless}" in of_plugin(Weighs())
    assert not any("average 1" in line for line in of_plugin(Drops()))


def test_a_plugin_that_declares_keep_drops():
    lines = of_plugin(Drops())
    place = "leave the batch before the log-prob passes, and with it KL, entropy and the critic"
    assert f"drop: rows that p does not keep {place}" in lines
    assert any(line.startswith("fewer than 1 rollout(s) left: ") for line in lines)
    # What it may give without saying so is no announced drop.
    assert not any(line.startswith("drop: ") for line in of_plugin(Undeclared()))


def test_a_plugin_without_provides_is_said_to_have_none():
    line = next(line for line in of_plugin(Undeclared()) if line.startswith("p = "))
    assert line.endswith("has no `provides`, so may give keep, mask, skip_update, update_scale, weights")
    assert "has no `provides`" not in "".join(of_plugin(Drops()))


def test_shadow_mode_says_what_would_land():
    assert [line.replace("lands in", "would land in") for line in plan()[1:]] == plan({"apply": False})[1:]
    assert plan({"apply": False})[0].startswith("3 plugin(s), shadow mode: decided and logged, nothing changed")


def test_domains_and_what_decides_about_prompts(registry):
    @register_scorer("level")
    class Level(Scorer):
        timing = "pre_rollout"
        requires = ("level",)

        def score(self, batch, step_id, **ctx):
            raise AssertionError("never called")

    mix = {"mix": {"actuator": {"name": "static"}}}
    easy = {"easy": {"plugin": "select", "scorer": "level", "actuator": "threshold_band"}}
    given = {"domains": ["math", "code"], "domain_key": "topic", "update_step": 4, "on_starved": "error"}
    parts = plan({"plugins": {**mix, **easy}, **given})
    lines = [line for line in parts if not line.startswith("  ")]
    assert [line.partition(" (dataflex-verl")[0] for line in lines[1:3]] == [
        "mix = mix static at on_domain_stats from step 0",
        "easy = select level -> threshold_band at pre_rollout from step 0",
    ]
    assert lines[1].endswith("provides proportions") and lines[2].endswith("provides admit")
    assert lines[3:] == [
        "domains: math, code, by column topic",
        "lands in: the domain sampler, from mix; in force from the next prompt on, decided anew every 4 steps",
        "prompts that easy refuses are passed over until their domain's next epoch; with too few left the run stops",
        "logs: dataflex/prop_<domain>, dataflex/proposed_<domain>, dataflex/generated_<domain>, "
        "dataflex/trained_<domain>, dataflex/reward_<domain>",
    ]
    shadow = [line for line in plan({"plugins": mix, "apply": False}) if not line.startswith("  ")]
    assert shadow[2:4] == [
        "domains: all that the training data has, by column domain, else data_source",
        "would land in: the domain sampler, from mix; logged only",
    ]
    assert not any("domain" in line for line in plan())


def below(label: str, **settings) -> list[str]:
    """The lines below that of one plugin."""
    lines = plan({"plugins": {label: settings}})
    place = next(number for number, line in enumerate(lines) if line.startswith(f"{label} = "))
    return list(takewhile(lambda line: line.startswith("  "), lines[place + 1 :]))


def test_parameters_are_shown_as_configured_and_the_others_with_their_defaults():
    scorer = {"name": "group_solve_rate", "params": {"success_threshold": 1}}
    actuator = {"name": "threshold_band", "params": {"high": 0.8, "low": 0.2}}
    assert below("band", plugin="select", scorer=scorer, actuator=actuator) == [
        "  scorer group_solve_rate: success_threshold=1, signal=reward",
        "  actuator threshold_band: low=0.2, high=0.8",
    ]
    assert below("band", plugin="select", effect="drop", scorer="token_entropy", actuator="threshold_band") == [
        "  parameters: effect=drop",
        "  actuator threshold_band: low=0.0, high=1.0",
    ]


def test_a_schedule_is_shown_with_its_shape_and_a_window_that_the_host_gives_with_its_value():
    def topk(fraction) -> str:
        params = {"name": "topk_fraction", "params": {"fraction": fraction}}
        return below("top", plugin="select", scorer="reward_difficulty", actuator=params)[-1]

    knots = {0: 1.0, 100: 0.5}
    assert topk(knots) == "  actuator topk_fraction: fraction=linear{0: 1.0, 100: 0.5}, largest=true"
    shaped = {"shape": "cosine", "at": knots}
    assert topk(shaped) == "  actuator topk_fraction: fraction=cosine{0: 1.0, 100: 0.5}, largest=true"
    mix = {"mix": {"scorer": "reward_difficulty", "actuator": "dump_ucb"}}
    bounds = "  actuator dump_ucb: c=1.0, temperature=1.0, floor=0.0, cap=1.0"
    assert bounds in plan({"plugins": mix})
    assert f"{bounds}, window=20" in plan({"plugins": mix, "window": 20, "domains": ["math", "code"]})


def test_a_value_that_a_constructor_works_out_is_shown():
    def curve(**given) -> list[str]:
        block = {"plugin": "reweight", "scorer": "group_solve_rate", "actuator": {"name": "curve", "params": given}}
        return [line for line in plan({"plugins": {"curve": block}}, rollout_n=16) if "actuator" in line]

    assert curve() == ["  actuator curve: history=10, bins=17"]
    assert curve(bins=4) == ["  actuator curve: history=10, bins=4"]


def test_parameters_of_a_plugin_without_components_are_its_own_and_long_lines_are_wrapped(distribution):
    source = """
        from dataflex_hooks import UpdateDecision, hookimpl

        class Route:
            def __init__(self, routes, words="", note="", cut=None, high=float("inf"), how=print):
                pass

            @hookimpl
            def post_advantage(self, batch, ctx):
                return None
    """
    distribution("acme-route", {"route": "acme_plan_route:Route"}, {"acme_plan_route": source})
    routes = {"math": {"scale": 0.5, "why": "too easy: half"}, "code": None}
    assert below("route", routes=routes, words=["a"] * 40, note="hard cases") == [
        '  parameters: routes={math: {scale: 0.5, why: "too easy: half"}, code: null},',
        f'    words=[{"a, " * 25}a..., note="hard cases",',
        "    high=.inf, how=builtins.print",
    ]


def test_values_of_other_libraries_are_shown_as_the_values_they_are(distribution):
    source = """
        import enum, pathlib
        import numpy as np, torch
        from dataflex_hooks import UpdateDecision, hookimpl

        class Mode(enum.Enum):
            FAST = "fast"

        class Named:
            def __getattr__(self, name):
                return 5

        class Parts:
            def __init__(self, low=np.float32(0.5), top=np.int64(3), on=np.bool_(True), worst=np.float64("-inf"),
                         mode=Mode.FAST, file=pathlib.Path("a/b"), dtype=torch.float32, put=[].append,
                         odd=Named(), bins=None):
                self.bins = np.int64(7)

            @hookimpl
            def post_advantage(self, batch, ctx):
                return None
    """
    distribution("acme-parts", {"parts": "acme_plan_parts:Parts"}, {"acme_plan_parts": source})
    assert below("parts") == [
        "  parameters: low=0.5, top=3, on=true, worst=-.inf, mode=fast, file=a/b, dtype=torch.float32,",
        "    put=builtins.list.append, odd=acme_plan_parts.Named, bins=7",
    ]


def test_secrets_are_hidden_in_the_plan_whoever_gave_them(distribution, monkeypatch):
    source = """
        import os
        from dataflex_hooks import UpdateDecision, hookimpl

        class Judge:
            def __init__(self, client, api_key=None, domain_key="domain", token="</think>", **more):
                self.api_key = api_key or os.environ["ACME_JUDGE"]

            @hookimpl
            def post_advantage(self, batch, ctx):
                return None
    """
    monkeypatch.setenv("ACME_JUDGE", "sk-1")
    distribution("acme-judge", {"judge": "acme_plan_judge:Judge"}, {"acme_plan_judge": source})
    client = {"url": "http://judge", "HF_TOKEN": "sk-2", "password": "sk-3", "client_secret": None}
    for given in ({}, {"api_key": "sk-4"}):
        block = {"plugins": {"judge": {"client": client, **given}}}
        manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
        assert "sk-" not in json.dumps(manager.plan()) and "sk-" not in "".join(plan_lines(manager, TOKEN))
    assert below("judge", client=client) == [
        '  parameters: client={url: http://judge, HF_TOKEN: "***", password: "***", client_secret: null},',
        '    api_key="***", domain_key=domain, token="</think>"',
    ]


def test_a_component_of_another_package_than_its_plugin_is_credited_to_it(registry, distribution):
    source = """
        from dataflex_hooks import Scorer, register_scorer, register_selector
        from dataflex_hooks.selectors.threshold_band import ThresholdBand

        @register_scorer("acme_length")
        class Length(Scorer):
            def score(self, batch, step_id, **ctx):
                return batch.lengths.float()

        @register_selector("acme_band")
        class Band(ThresholdBand):
            pass
    """
    names = {"acme_length": "acme_plan_scorers", "acme_band": "acme_plan_scorers"}
    distribution("acme-scorers", names, {"acme_plan_scorers": source}, version="2.5")
    acme = {"plugin": "select", "scorer": "acme_length"}
    assert below("own", **acme, actuator="threshold_band") == [
        "  scorer acme_length (acme-scorers 2.5)",
        "  actuator threshold_band: low=0.0, high=1.0",
    ]
    assert (
        below("own", **acme, actuator="acme_band")[-1] == "  actuator acme_band (acme-scorers 2.5): low=0.0, high=1.0"
    )
    distribution("acme-loose", {}, {"acme_plan_loose": source.replace("acme_", "loose_")})
    by_class = {"plugin": "select", "scorer": "acme_plan_loose:Length", "actuator": "loose_band"}
    assert below("own", **by_class) == ["  actuator loose_band (acme_plan_loose:Band): low=0.0, high=1.0"]


def test_check_as_json_has_parameters_and_packages_of_every_part(check_json):
    infinite = "++dataflex.plugins.difffilter.actuator.params.high=inf"
    (row,) = check_json(*GOOD, "+dataflex=difffilter", infinite)["plan"]["plugins"]
    version = row["version"]
    assert row["params"] == {"effect": "mask"} and row["keywords"]["actuator"]["params"]["high"] == ".inf"
    assert row["components"]["actuator"] == {
        "name": "threshold_band",
        "class": "dataflex_hooks.selectors.threshold_band:ThresholdBand",
        "distribution": "dataflex-verl",
        "version": version,
        "params": {"low": 0.2, "high": ".inf"},
        "schedules": {},
    }
    schedule = "++dataflex.plugins.topk.actuator.params.fraction={0:1.0,100:0.5}"
    (row,) = check_json(*GOOD, "+dataflex=topk", schedule)["plan"]["plugins"]
    assert row["components"]["actuator"]["params"] == {"fraction": {"0": 1.0, "100": 0.5}, "largest": True}
    assert row["components"]["actuator"]["schedules"] == {"fraction": "linear"}


def test_advantages_as_the_way_in_are_named():
    assert any(
        "lands in: advantages, multiplied; returns stay as they are" in row for row in plan({"apply_to": "advantages"})
    )


def test_settings_of_verl_that_matter_show_their_values_and_what_they_do():
    on = ["actor_rollout_ref.actor.use_kl_loss=true", "algorithm.rollout_correction.rollout_is=token"]
    config = compose_config(CommandLine.parse([*GOOD, *on]))
    (line,) = [line for line in plan(config=config) if line.startswith("verl settings")]
    assert "algorithm.adv_estimator=grpo, actor_rollout_ref.rollout.n=8, " in line
    assert "use_kl_loss=True (the KL term sees masked responses)" in line
    assert "rollout_is=token (verl's importance weights: ours are multiplied in)" in line
    assert "critic" not in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["+dataflex=[difffilter,per]"],
        ["+dataflex=ar", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"],
        ["+dataflex=topk", "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"],
        ["trainer.v1.trainer_mode=dataflex_mix_sync", "+dataflex.apply_to=advantages", "+dataflex=softmax"],
        [],
    ],
)
def test_the_plan_of_a_run_is_that_of_check(overrides, check_json, dataflex):
    pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")
    from dataflex_verl.trainer import prepare

    arguments = [*GOOD, *RUNNABLE, *overrides]
    config = compose_config(CommandLine.parse(arguments))
    lines = plan_lines(*prepare(config), config)
    assert check_json(*arguments)["plan"]["lines"] == lines
    assert dataflex("check", *arguments).stdout.splitlines() == lines


def test_the_plan_is_stored_with_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    config = compose_config(CommandLine.parse([*GOOD, "trainer.logger=[console,file]"]))
    store_plan(config, ["DataFlex plan: a", "DataFlex plan: b"])
    assert list(config[PLAN_KEY]) == ["DataFlex plan: a", "DataFlex plan: b"]
    assert metrics_file(config) == tmp_path / config.trainer.project_name / f"{config.trainer.experiment_name}.jsonl"
    assert json.loads(metrics_file(config).with_suffix(".plan.json").read_text()) == list(config[PLAN_KEY])


def test_the_plan_file_lies_beside_a_metrics_file_of_the_users_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "m.jsonl"))
    config = OmegaConf.create({"trainer": {"logger": "file"}})
    store_plan(config, ["x"])
    assert (tmp_path / "m.plan.json").exists()
    versions = json.loads((tmp_path / "m.versions.json").read_text())
    assert versions["dataflex-verl"] == metadata.version("dataflex-verl") and versions["torch"]
    with open_dict(config):
        config.trainer.logger = ["console"]
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "other.jsonl"))
    store_plan(config, ["x"])
    assert not (tmp_path / "other.plan.json").exists()


def test_the_file_logger_of_verl_writes_where_we_think(tmp_path, monkeypatch):
    pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")
    from verl.utils.tracking import FileLogger

    config = OmegaConf.create({"trainer": {"project_name": "p", "experiment_name": "e"}})
    for name, value in (("VERL_FILE_LOGGER_ROOT", str(tmp_path)), ("VERL_FILE_LOGGER_PATH", str(tmp_path / "q.jsonl"))):
        monkeypatch.setenv(name, value)
        logger = FileLogger("p", "e")
        logger.finish()
        assert Path(logger.filepath) == metrics_file(config)


# -------------------------------------------------------------------- the command


def test_check_without_anything_of_ours_says_so(dataflex, check_json):
    result = dataflex("check", "trainer.total_epochs=2")
    assert (result.exit_code, result.stdout.strip()) == (0, NOTHING)
    assert check_json("trainer.total_epochs=2") == {"ok": True, "problems": [], "plan": None}


def test_check_prints_problems_to_stderr_and_leaves_with_2(dataflex):
    result = dataflex("check", *GOOD, "+dataflex=per", "+dataflex.aply=1")
    assert (result.exit_code, result.stdout) == (2, "")
    first, second = result.stderr.splitlines()
    assert first == "dataflex: 1 problem in the configuration; nothing was started."
    assert second.startswith("1. dataflex.aply: got 1; accepted: one of ")


def test_check_with_local_looks_for_the_files(check_json, tmp_path):
    files = [f"data.train_files={tmp_path}/train.parquet", f"data.val_files={tmp_path}/val.parquet"]
    found = check_json("--local", *GOOD, "+dataflex=per", *files)
    assert [problem["setting"] for problem in found["problems"]][:2] == ["data.train_files", "data.val_files"]
    assert check_json(*GOOD, "+dataflex=per", *files)["ok"]


def test_without_verl_check_says_what_to_install(dataflex, mocker):
    mocker.patch("dataflex_verl.commands.hydra_config.find_spec", return_value=None)
    result = dataflex("check", "+dataflex=per")
    assert result.exit_code == 2 and "verl is not installed here" in result.stderr
