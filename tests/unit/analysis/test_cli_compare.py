"""``dataflex compare`` with a training process that writes verl's file at once."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from dataflex_verl.analysis import extra
from dataflex_verl.commands import compare_run
from dataflex_verl.commands.compare_design import choose_arms, choose_seeds, merged
from dataflex_verl.commands.compare_run import reason_of
from dataflex_verl.commands.demo_plan import BadOption
from dataflex_verl.commands.demo_run import RunFailed, RunResult
from dataflex_verl.commands.hydra_config import CommandLine, compose_config
from dataflex_verl.commands.look import Checked, look_at_line
from dataflex_verl.demo.build import DemoFiles
from tests.processes import ends
from tests.unit.analysis.conftest import metrics_of

Dataflex = Callable[..., Result]
STEPS = 6
GAIN = {"none": 0.0, "difffilter": 0.1, "per": 0.2}


class Training:
    """Stands in the place of the training process: arm and seed decide the metrics."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.overrides: dict[tuple[str, int], list[str]] = {}
        self.given: dict[str, Any] = {}
        self.fails_at: dict[tuple[str, int], int] = {}
        self.killed_at: tuple[str, int] | None = None

    def __call__(self, overrides: list[str], directory: Path, on_record: Callable, **given: Any) -> RunResult:
        arm, seed = directory.parent.name, int(directory.name.removeprefix("seed-"))
        self.started.append((arm, seed))
        self.overrides[arm, seed], self.given = overrides, given
        base = 0.3 + 0.03 * seed
        score = {"add": base + GAIN.get(arm, 0.0) * (1 + 0.1 * seed), "sort": base}
        records = metrics_of(STEPS, score, reward=base)
        last = 2 if self.killed_at == (arm, seed) else self.fails_at.get((arm, seed), STEPS)
        with (directory / "metrics.jsonl").open("w") as file:
            for record in records[: last + 1]:
                on_record(record)
                file.write(json.dumps(record) + "\n")
        if self.killed_at == (arm, seed):
            raise KeyboardInterrupt
        if last < STEPS:
            raise RunFailed(
                1, directory / "verl.log", ["Traceback", "(WorkerDict pid=3) ValueError: it broke [x]", "end"]
            )
        return RunResult(records, [], 5.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    home = tmp_path_factory.mktemp("built")
    (home / "model").mkdir(parents=True)
    (home / "model" / "config.json").write_text("{}")
    for name in ("train.parquet", "val.parquet", "reward.py"):
        (home / name).write_text(name)
    return DemoFiles(home / "model", home / "train.parquet", home / "val.parquet", home / "reward.py")


@pytest.fixture(scope="module")
def looked() -> dict[tuple[str, ...], Checked]:
    return {}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, files: DemoFiles, parsed_once: None, looked: dict) -> Training:
    training = Training()

    def look_once(line: CommandLine, local: bool) -> Checked:
        """Composing verl's configuration takes longer than all else here, and the same few come again and again."""
        key = (str(local), *line.arguments)
        if key not in looked:
            looked[key] = look_at_line(line, local)
        return looked[key]

    monkeypatch.setattr("dataflex_verl.commands.look.look_at_line", look_once)
    monkeypatch.setattr(compare_run, "train_in_child", training)
    monkeypatch.setattr("dataflex_verl.demo.build.build_demo", lambda directory, seed: files)
    return training


@pytest.fixture
def run(dataflex: Dataflex, training: Training, tmp_path: Path) -> Callable[..., Result]:
    def compare(*more: str, arms: tuple[str, ...] = ("none", "difffilter"), seeds: str = "2") -> Result:
        chosen = [word for arm in arms for word in ("--arm", arm)]
        return dataflex(
            "compare", *chosen, "--seeds", seeds, "--steps", str(STEPS), "--out", str(tmp_path / "o"), *more
        )

    return compare


def results(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "o" / "results.json").read_text())


def test_every_arm_runs_under_every_seed_and_results_are_written(run, training: Training, tmp_path: Path) -> None:
    done = run()
    assert done.exit_code == 0, done.output
    # Whole pairs first.
    assert training.started == [("none", 0), ("difffilter", 0), ("none", 1), ("difffilter", 1)]
    assert "4/4 difffilter, seed 1: finished" in done.stderr
    found = results(tmp_path)
    against = found["arms"][1]["against"]["validation, all domains"]
    assert against["differences"] == pytest.approx([0.05, 0.055])
    assert found["rollouts"] == STEPS * 12 * 8 and found["runs"][0]["seconds"] == 5.0
    assert found["arms"][1]["verdict"] in done.stdout
    assert (tmp_path / "o" / "results.md").read_text().count("| difffilter |") >= 2
    assert found["versions"]["verl"] != "not installed"


def test_arms_differ_in_their_strategy_alone(run, training: Training) -> None:
    assert run().exit_code == 0
    one, other = (training.overrides[arm, 1] for arm in ("none", "difffilter"))
    own = {text for text in (*one, *other) if "default_local_dir" in text or "experiment_name" in text}
    assert set(one) - set(other) - own == {"trainer.v1.trainer_mode=sync"}
    assert set(other) - set(one) - own == {"trainer.v1.trainer_mode=dataflex_sync", "+dataflex=[difffilter]"}
    assert "data.seed=1" in one and "data.seed=0" in training.overrides["none", 0]


def test_what_is_finished_is_not_run_again(run, training: Training, tmp_path: Path) -> None:
    run()
    before = results(tmp_path)
    training.started.clear()
    done = run()
    assert training.started == [] and done.exit_code == 0
    assert results(tmp_path) == before and "finished before" in done.stderr


def test_more_arms_and_seeds_run_only_what_is_new(run, training: Training, tmp_path: Path) -> None:
    run(seeds="1")
    training.started.clear()
    assert run(arms=("none", "difffilter", "per"), seeds="2").exit_code == 0
    assert training.started == [("per", 0), ("none", 1), ("difffilter", 1), ("per", 1)]
    assert [arm["runs"] for arm in results(tmp_path)["arms"]] == [2, 2, 2]


def test_an_arm_that_crashes_is_reported_and_the_rest_finishes(
    run, dataflex: Dataflex, training: Training, tmp_path: Path
) -> None:
    training.fails_at = {("difffilter", 0): 5}
    done = run(arms=("none", "difffilter", "per"))
    assert done.exit_code == 1
    assert len(training.started) == 6
    assert "difffilter, seed 0: failed: ValueError: it broke [x]" in done.stderr
    found = results(tmp_path)
    assert [(r["arm"], r["seed"]) for r in found["runs"] if r["state"] != "finished"] == [("difffilter", 0)]
    crashed = next(r for r in found["runs"] if r["state"] == "failed")
    assert crashed["reason"].startswith("after step 5: ValueError: it broke") and crashed["values"] == {}
    assert found["arms"][1]["against"]["validation, all domains"]["seeds"] == [1]
    assert found["arms"][2]["against"]["validation, all domains"]["seeds"] == [0, 1]
    # Gathered later, it is still a failure.
    assert dataflex("compare", "--collect", str(tmp_path / "o")).exit_code == 0
    assert [r for r in results(tmp_path)["runs"] if r["state"] != "finished"] == [crashed]
    # Again: that run alone, and then everything counts once.
    training.started.clear()
    training.fails_at = {}
    assert run(arms=("none", "difffilter", "per")).exit_code == 0
    assert training.started == [("difffilter", 0)]
    assert [arm["runs"] for arm in results(tmp_path)["arms"]] == [2, 2, 2]


def test_a_comparison_killed_in_the_middle_resumes_and_counts_nothing_twice(
    run, training: Training, tmp_path: Path
) -> None:
    training.killed_at = ("none", 1)
    done = run()
    assert done.exit_code == 130 and "the same command goes on from here" in done.stderr
    folder = tmp_path / "o" / "none" / "seed-1"
    assert (folder / "metrics.jsonl").exists() and not (folder / "finished.json").exists()
    (folder / "left").touch()
    training.killed_at = None
    training.started.clear()
    assert run().exit_code == 0
    assert training.started == [("none", 1), ("difffilter", 1)]
    assert not (folder / "left").exists()
    assert [r["tokens"] for r in results(tmp_path)["runs"]] == [600.0] * 4


def test_metrics_that_changed_after_the_end_are_run_again(run, training: Training, tmp_path: Path) -> None:
    run()
    path = tmp_path / "o" / "none" / "seed-0" / "metrics.jsonl"
    path.write_text(path.read_text()[:-40])
    training.started.clear()
    assert run().exit_code == 0
    assert training.started == [("none", 0)]


def test_other_settings_are_refused_with_what_differs_until_asked_to_run_anew(
    run, training: Training, tmp_path: Path
) -> None:
    run()
    training.started.clear()
    done = run("--lr", "0.001")
    assert done.exit_code == 2 and training.started == []
    assert "4 finished run(s) there were made with other settings" in done.stderr
    assert "was not there, is: actor_rollout_ref.actor.optim.lr=0.001" in done.stderr
    assert run("--lr", "0.001", "--rerun").exit_code == 0
    assert len(training.started) == 4
    training.started.clear()
    assert run("--lr", "0.001").exit_code == 0 and training.started == []


def test_other_versions_and_other_data_are_other_settings(
    run, training: Training, files: DemoFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    files.train_parquet.write_text("other tasks")
    assert "data.train_files:train.parquet: was" in run().stderr
    files.train_parquet.write_text("train.parquet")
    assert run().exit_code == 0
    versions = {**compare_run_versions(), "verl": "0.9.0"}
    monkeypatch.setattr("dataflex_verl.commands.compare_jobs.run_versions", lambda: versions)
    done = run()
    assert done.exit_code == 2 and "verl: was " in done.stderr and "is 0.9.0" in done.stderr


def test_a_file_that_a_plugin_reads_is_part_of_the_settings(run, training: Training, tmp_path: Path) -> None:
    data = tmp_path / "table.json"
    data.write_text("{}")
    (tmp_path / "mine.txt").write_text(f"+trainer.extra_table={data}\n")
    arms = ("none", str(tmp_path / "mine.txt"))
    assert run(arms=arms, seeds="1").exit_code == 0
    data.write_text("{1}")
    done = run(arms=arms, seeds="1")
    assert done.exit_code == 2 and "1 finished run(s)" in done.stderr
    assert "trainer.extra_table:table.json: was" in done.stderr


def compare_run_versions() -> dict[str, str]:
    from dataflex_verl.commands.compare_jobs import run_versions

    return run_versions()


def test_files_of_others_are_not_touched(run, training: Training, tmp_path: Path) -> None:
    mine = tmp_path / "o" / "none" / "seed-0" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    done = run("--rerun")
    assert done.exit_code == 2 and "has files that no comparison wrote" in done.stderr
    assert mine.read_text() == "mine" and training.started == []


def test_a_second_comparison_in_the_same_directory_is_refused(run, tmp_path: Path) -> None:
    with compare_run.comparison_locked(tmp_path / "o"):
        done = run()
    assert done.exit_code == 2 and "another comparison runs now" in done.stderr
    assert run().exit_code == 0


def test_a_training_that_outlived_a_killed_comparison_keeps_its_folder(tmp_path: Path, run, training) -> None:
    run(seeds="1")
    folder = tmp_path / "o" / "none" / "seed-0"
    (folder / "finished.json").unlink()
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from dataflex_verl.commands import demo_run\n"
        "from dataflex_verl.commands.compare_run import _lock\n"
        "popen = demo_run.subprocess.Popen\n"
        "def start(command, **given):\n"
        "    process = popen([sys.executable, '-c', 'import time; time.sleep(120)'], **given)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "demo_run.subprocess.Popen = start\n"
        "folder = Path(sys.argv[1])\n"
        "demo_run.train_in_child([], folder, print, keep_open=[_lock(folder / '.running')])\n"
    )
    training.started.clear()
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(30)
    try:
        done = run(seeds="1")
        assert done.exit_code == 2 and "training process of an earlier comparison still runs" in done.stderr
        assert training.started == []
    finally:
        subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(child)], check=True)
    assert ends(child)
    assert run(seeds="1").exit_code == 0 and training.started == [("none", 0)]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("actor_rollout_ref.rollout.n=4", "got actor_rollout_ref.rollout.n=4; accepted: 8, as none has"),
        ("data.train_batch_size=24", "generate the same number of rollouts"),
        ("trainer.total_training_steps=9", "got trainer.total_training_steps=9"),
        ("actor_rollout_ref.rollout.val_kwargs.n=16", "be measured alike"),
        ("data.val_max_samples=3", "got data.val_max_samples=3; accepted: -1, as none has: arms have to be measured"),
        ("actor_rollout_ref.rollout.val_kwargs.top_p=0.9", "got actor_rollout_ref.rollout.val_kwargs.top_p=0.9; acc"),
        ("actor_rollout_ref.rollout.val_kwargs.top_k=5", "accepted: -1, as none has: arms have to be measured alike"),
        ("+actor_rollout_ref.rollout.val_kwargs.seed=5", "accepted: nothing of it, as none has: arms have to be meas"),
        ("data.max_response_length=4", "got data.max_response_length=4; accepted: 6, as none has: arms have to be me"),
        ("data.filter_overlong_prompts=True", "be measured alike"),
        (
            "+data.apply_chat_template_kwargs.enable_thinking=False",
            "kwargs.enable_thinking=False; accepted: nothing of",
        ),
        ("reward.custom_reward_function.name=other", "accepted: compute_score, as none has: arms have to be measured"),
        ("+reward.custom_reward_function.reward_kwargs.strict=True", "reward_kwargs.strict=True; accepted: nothing of"),
        ("reward.reward_manager.name=dapo", "be measured alike"),
    ],
)
def test_an_arm_with_another_budget_or_measure_is_refused(
    run, training: Training, tmp_path: Path, line: str, text: str
) -> None:
    (tmp_path / "mine.txt").write_text(f"# more of it\n\n{line}\n")
    done = run(arms=("none", str(tmp_path / "mine.txt")))
    assert done.exit_code == 2 and text in done.stderr and "--arm mine" in done.stderr
    assert training.started == []


def test_seeds_are_compare_s_own(run, training: Training, files: DemoFiles, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("++data.seed=7\n")
    done = run(arms=("none", str(tmp_path / "mine.txt")))
    assert done.exit_code == 2 and "--arm mine: got ++data.seed=7" in done.stderr and "--seeds" in done.stderr
    done = run("--", "actor_rollout_ref.rollout.seed=7")
    assert done.exit_code == 2 and "after --: got actor_rollout_ref.rollout.seed=7" in done.stderr
    assert training.started == []
    assert run("--local", "--", *own_task(files), "data.seed=7", seeds="1").exit_code == 0
    assert "data.seed=0" in training.overrides["none", 0] and "data.seed=7" not in training.overrides["none", 0]


def test_where_groups_are_filtered_no_number_of_rollouts_is_claimed(run, training: Training, tmp_path: Path) -> None:
    assert run(seeds="1").exit_code == 0
    assert results(tmp_path)["rollouts"] == STEPS * 12 * 8
    filtered = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_reward")
    assert run("--rerun", "--", *filtered, seeds="1").exit_code == 0
    assert results(tmp_path)["rollouts"] is None
    assert "generated rollouts" not in (tmp_path / "o" / "results.md").read_text()


def test_an_arm_that_cannot_run_is_refused_with_its_problems(run, training: Training, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("'+dataflex=difffilter'\n++dataflex.plugins.difffilter.actuator.params.hihg=1\n")
    done = run(arms=("none", f"mine={tmp_path / 'mine.txt'}"))
    assert (
        done.exit_code == 2 and "arm mine: dataflex: 1 problem" in done.stderr and "did you mean 'high'" in done.stderr
    )
    assert training.started == []


def test_a_file_of_overrides_gets_our_trainer_mode_only_where_it_needs_it(tmp_path: Path) -> None:
    (tmp_path / "ours.txt").write_text("+dataflex=difffilter\n")
    (tmp_path / "verls.txt").write_text("algorithm.use_kl_in_reward=True\n")
    arms = choose_arms([str(tmp_path / "ours.txt"), str(tmp_path / "verls.txt")], "verls")
    assert [arm.name for arm in arms] == ["verls", "ours"]
    assert arms[0].overrides == ("algorithm.use_kl_in_reward=True",)
    assert arms[1].overrides == ("trainer.v1.trainer_mode=dataflex_sync", "+dataflex=difffilter")
    common = ["trainer.v1.trainer_mode=colocate_async"]
    assert choose_arms(["none", "per"], None, common)[1].overrides[0].endswith("=dataflex_colocate_async")


@pytest.mark.parametrize(
    ("arms", "baseline", "text"),
    [
        (["none"], None, "got 1; accepted: two or more"),
        (["none", "none"], None, "'none' twice; accepted: names of their own"),
        (["none", "diffilter"], None, "did you mean 'difffilter'"),
        (["none", "per+per"], None, "each preset once"),
        (["none", "a/b=per"], None, "NAME=WHAT"),
        (["none", "per"], "pre", "--baseline: got 'pre'"),
    ],
)
def test_bad_arms_are_refused(arms: list[str], baseline: str | None, text: str) -> None:
    with pytest.raises(BadOption, match=text):
        choose_arms(arms, baseline)


def test_seeds_are_a_number_or_a_list() -> None:
    assert choose_seeds("3") == (0, 1, 2)
    assert choose_seeds("7, 2") == (7, 2)
    for wrong in ("0", "", "1,1", "a", "-1", "1,"):
        with pytest.raises(BadOption, match="--seeds"):
            choose_seeds(wrong)


def test_overrides_of_the_user_replace_those_of_the_demo(run, training: Training) -> None:
    assert run("--", "actor_rollout_ref.rollout.val_kwargs.n=4", seeds="1").exit_code == 0
    for overrides in training.overrides.values():
        assert [text for text in overrides if "val_kwargs.n=" in text] == ["actor_rollout_ref.rollout.val_kwargs.n=4"]
    assert merged(["a=1", "+b=2"], ["++b=3"]) == ["a=1", "++b=3"]


def own_task(files: DemoFiles) -> list[str]:
    return [
        f"data.train_files={files.train_parquet}",
        f"data.val_files={files.val_parquet}",
        f"actor_rollout_ref.model.path={files.model_dir}",
        f"reward.custom_reward_function.path={files.reward_path}",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "trainer.logger=[console,wandb,file]",
        "trainer.resume_mode=auto",
    ]


def test_a_task_of_the_user_s_own_is_run_as_given_and_never_resumes_another_s_checkpoint(
    run, training: Training, files: DemoFiles, tmp_path: Path
) -> None:
    assert run("--local", "--", *own_task(files), seeds="1").exit_code == 0
    overrides = training.overrides["difffilter", 0]
    assert not any("max_response_length" in text for text in overrides)
    assert "trainer.logger=[console,wandb,file]" in overrides and "trainer.resume_mode=disable" in overrides
    assert "trainer.resume_mode=auto" not in overrides
    assert f"trainer.default_local_dir={tmp_path}/o/difffilter/seed-0/checkpoints" in overrides
    assert f"trainer.test_freq={STEPS}" in overrides and "actor_rollout_ref.rollout.seed=0" in overrides
    assert training.given["local"] is True and training.given["cwd"] == Path.cwd()


def test_printed_commands_are_verl_s_own_and_start_nothing(run, training: Training, tmp_path: Path, files) -> None:
    done = run("--print", "--", *own_task(files), seeds="2")
    assert done.exit_code == 0 and training.started == []
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    for line, (arm, seed) in zip(lines, [("none", 0), ("difffilter", 0), ("none", 1), ("difffilter", 1)], strict=True):
        words = shlex.split(line)
        start = words.index("python")
        assert words[start : start + 3] == ["python", "-m", "verl.trainer.main_ppo"]
        metrics = tmp_path / "o" / arm / f"seed-{seed}" / "metrics.jsonl"
        assert words[:start] == [f"VERL_FILE_LOGGER_PATH={metrics}"] and metrics.parent.is_dir()
        config = compose_config(CommandLine.parse(words[start + 3 :]))
        assert config.data.seed == seed and config.trainer.total_training_steps == STEPS
        assert ("dataflex" in config) == (arm != "none")
        assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH == str(metrics)


def write_fakes(tmp_path: Path, seeds: int = 2) -> None:
    for seed in range(seeds):
        for arm in ("none", "difffilter"):
            folder = tmp_path / "o" / arm / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            gain = GAIN[arm] * (1 + 0.1 * seed)
            text = "".join(json.dumps(record) + "\n" for record in metrics_of(STEPS, {"add": 0.3 + gain, "b": 0.3}))
            (folder / "metrics.jsonl").write_text(text)


def test_collect_evaluates_what_printed_commands_left(run, dataflex: Dataflex, tmp_path: Path) -> None:
    run("--print")
    write_fakes(tmp_path)
    (tmp_path / "o" / "difffilter" / "seed-1" / "metrics.jsonl").unlink()
    done = dataflex("compare", "--collect", str(tmp_path / "o"), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["arms"][1]["against"]["validation, all domains"]["differences"] == pytest.approx([0.05])
    assert found["arms"][1]["gaps"] == ["seed 1: missing: no run yet"] and found["arms"][0]["gaps"] == []
    assert found["rollouts"] == STEPS * 96


def test_collect_leaves_out_runs_of_other_settings_than_the_plan_s(
    run, dataflex: Dataflex, training: Training, tmp_path: Path
) -> None:
    assert run(seeds="2").exit_code == 0
    assert dataflex("compare", "--collect", str(tmp_path / "o")).exit_code == 0
    assert {row["state"] for row in results(tmp_path)["runs"]} == {"finished"}
    plan = json.loads((tmp_path / "o" / "compare.json").read_text())
    # As if a rerun with another setting had been killed after the first seed.
    for arm in ("none", "difffilter"):
        path = tmp_path / "o" / arm / "seed-0" / "run.json"
        started = json.loads(path.read_text())
        path.write_text(json.dumps({**started, "overrides": [*started["overrides"], "data.truncation=left"]}))
    (tmp_path / "o" / "compare.json").write_text(json.dumps({**plan, "common": ["data.truncation=left"]}))
    assert dataflex("compare", "--collect", str(tmp_path / "o")).exit_code == 0
    found = results(tmp_path)
    assert [(row["seed"], row["state"]) for row in found["runs"]] == [
        (0, "finished"),
        (0, "finished"),
        (1, "left out"),
        (1, "left out"),
    ]
    assert "without data.truncation=left" in found["runs"][2]["reason"]
    assert found["arms"][1]["against"][found["main_outcome"]]["seeds"] == [0]


def test_collect_without_a_plan_reads_the_folders_and_asks_for_the_baseline(dataflex: Dataflex, tmp_path: Path) -> None:
    write_fakes(tmp_path)
    found = json.loads(dataflex("compare", "--collect", str(tmp_path / "o"), "--json").stdout)
    assert (found["baseline"], found["steps"], found["rollouts"]) == ("none", STEPS, None)
    (tmp_path / "o" / "none").rename(tmp_path / "o" / "plain")
    refused = dataflex("compare", "--collect", str(tmp_path / "o"))
    assert refused.exit_code == 2 and "accepted: one of difffilter, plain" in refused.stderr
    assert dataflex("compare", "--collect", str(tmp_path / "o"), "--baseline", "plain").exit_code == 0


def test_collect_of_nothing_is_refused(dataflex: Dataflex, tmp_path: Path) -> None:
    done = dataflex("compare", "--collect", str(tmp_path))
    assert done.exit_code == 2 and "has runs of 0 arm(s)" in done.stderr


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"arms": [{"name": "none"}], "seeds": [0], "steps": 6}'])
def test_a_plan_that_cannot_be_read_is_refused_and_not_passed_over(
    dataflex: Dataflex, tmp_path: Path, text: str
) -> None:
    write_fakes(tmp_path, seeds=1)
    path = tmp_path / "o" / "compare.json"
    path.write_text(text)
    done = dataflex("compare", "--collect", str(tmp_path / "o"))
    assert (
        done.exit_code == 2 and f"--collect: {path} is no plan that can be read; accepted: the file as" in done.stderr
    )
    path.unlink()
    assert dataflex("compare", "--collect", str(tmp_path / "o")).exit_code == 0


def test_a_library_that_is_not_installed_is_named_with_its_extra(
    run, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(extra, "import_module", missing)
    done = run()
    assert done.exit_code == 2 and "pip install 'dataflex-verl[analysis]'" in done.stderr
    assert training.started == []


def test_the_reason_of_a_failure_is_the_last_error_in_the_log() -> None:
    tail = ["x", "KeyError: 'a'", "(TaskRunner pid=7) ValueError: b", "  at exit"]
    assert reason_of(tail) == "ValueError: b"
    assert reason_of(["nothing of the kind"]) == "nothing of the kind"
    assert reason_of([]) == ""


MINE = """\
'+dataflex=[difffilter]'
actor_rollout_ref.actor.optim.lr=0.002
trainer.v1.trainer_mode=dataflex_colocate_async
+trainer.note=mine
"""
DIFFERS = [
    {"setting": "actor_rollout_ref.actor.optim.lr", "value": "0.002", "baseline": "0.0005"},
    {"setting": "trainer.note", "value": "mine", "baseline": "nothing"},
    {"setting": "trainer.v1.trainer_mode", "value": "dataflex_colocate_async", "baseline": "sync"},
]
SAID = (
    "mine differs from none outside dataflex too: actor_rollout_ref.actor.optim.lr=0.002 (none: 0.0005), "
    "trainer.note=mine (none: nothing), trainer.v1.trainer_mode=dataflex_colocate_async (none: sync); "
    "the difference is that of all of it together"
)


def test_an_arm_that_differs_in_more_than_its_strategy_says_so_everywhere(
    run, dataflex: Dataflex, training: Training, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text(MINE)
    done = run(arms=("none", "per", str(tmp_path / "mine.txt")), seeds="1")
    assert done.exit_code == 0, done.output
    # Before anything runs, and with the results.
    assert done.stderr.count(f"warning: {SAID}") == 2
    assert done.stderr.index(SAID) < done.stderr.index("1/3 none, seed 0: finished")
    found = results(tmp_path)
    assert [arm["differs"] for arm in found["arms"]] == [[], [], DIFFERS]
    assert f"- Warning: {SAID}." in (tmp_path / "o" / "results.md").read_text()
    assert f"{SAID}.</p>" in (tmp_path / "o" / "report.html").read_text()
    # Gathered later too.
    assert SAID in dataflex("compare", "--collect", str(tmp_path / "o")).stderr
    assert results(tmp_path)["arms"] == found["arms"]


def test_arms_of_strategies_alone_say_nothing_of_the_kind(run, dataflex: Dataflex, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("+dataflex=difffilter\n++dataflex.mask_scale=kept\n")
    done = run("--", "trainer.v1.trainer_mode=colocate_async", arms=("none", "per", str(tmp_path / "mine.txt")))
    assert done.exit_code == 0 and "warning" not in done.stderr
    for path in ("results.md", "report.html"):
        assert "outside dataflex" not in (tmp_path / "o" / path).read_text()
    assert [arm["differs"] for arm in results(tmp_path)["arms"]] == [[], [], []]
    done = dataflex("compare", "--collect", str(tmp_path / "o"))
    assert done.exit_code == 0 and "warning" not in done.stderr
    assert [arm["differs"] for arm in results(tmp_path)["arms"]] == [[], [], []]


def test_a_plan_of_before_these_were_noted_has_them_in_its_overrides(
    run, dataflex: Dataflex, training: Training, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text(MINE)
    run(arms=("none", str(tmp_path / "mine.txt")), seeds="1")
    path = tmp_path / "o" / "compare.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "differs"}))
    assert dataflex("compare", "--collect", str(tmp_path / "o")).exit_code == 0
    assert results(tmp_path)["arms"][1]["differs"] == DIFFERS


@pytest.fixture
def unplanned(run, dataflex: Dataflex, training: Training, tmp_path: Path) -> Callable[..., Result]:
    """Runs of a comparison gathered without its plan, after ``change`` has changed a run's own record."""

    def collect(change: Callable[[str, int, dict[str, Any]], None] = lambda arm, seed, record: None) -> Result:
        assert run().exit_code == 0
        (tmp_path / "o" / "compare.json").unlink()
        for path in (tmp_path / "o").glob("*/seed-*/run.json"):
            record = json.loads(path.read_text())
            change(path.parts[-3], int(path.parts[-2][-1]), record)
            path.write_text(json.dumps(record))
        return dataflex("compare", "--collect", str(tmp_path / "o"))

    return collect


def test_runs_without_a_plan_are_comparable_by_their_own_records(unplanned, tmp_path: Path) -> None:
    done = unplanned()
    assert done.exit_code == 0 and "warning" not in done.stderr, done.output
    found = results(tmp_path)
    assert (found["warnings"], found["unchecked"], found["arms"][1]["differs"]) == ([], [], [])
    assert found["rollouts"] == STEPS * 12 * 8 and found["versions"] == compare_run_versions()


def replaced(record: dict[str, Any], setting: str, value: str) -> None:
    record["overrides"] = merged(record["overrides"], [f"{setting}={value}"])


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        (
            "actor_rollout_ref.rollout.n",
            "4",
            "rollout.n is 8 in none (seed 0, 1) and 4 in difffilter (seed 0, 1); accepted: runs that generate the same",
        ),
        ("data.train_batch_size", "24", "data.train_batch_size is 12 in none (seed 0, 1) and 24 in difffilter"),
        ("trainer.total_training_steps", "9", "trainer.total_training_steps is 6 in none"),
        (
            "actor_rollout_ref.rollout.val_kwargs.temperature",
            "0.5",
            "val_kwargs.temperature is 1.0 in none (seed 0) and 0.5 in difffilter (seed 0); accepted: runs that are",
        ),
        ("data.val_files", "other.parquet", "data.val_files is "),
    ],
)
def test_runs_without_a_plan_of_unequal_budget_or_measure_are_refused(
    unplanned, tmp_path: Path, setting: str, value: str, text: str
) -> None:
    def change(arm: str, seed: int, record: dict[str, Any]) -> None:
        if arm == "difffilter":
            replaced(record, setting, value)

    done = unplanned(change)
    assert done.exit_code == 2 and text in done.stderr


def test_a_budget_or_measure_that_may_be_another_is_marked(unplanned, tmp_path: Path) -> None:
    def change(arm: str, seed: int, record: dict[str, Any]) -> None:
        if arm == "none":
            record["overrides"] = [text for text in record["overrides"] if "rollout.n=" not in text]
        if (arm, seed) == ("difffilter", 1):
            replaced(record, "data.val_max_samples", "3")

    done = unplanned(change)
    text = (
        "perhaps unequal budgets: actor_rollout_ref.rollout.n is verl's default in none (seed 0, 1) and 8 in difffilter"
    )
    assert done.exit_code == 0 and f"warning: {text}" in done.stderr
    found = results(tmp_path)
    assert found["rollouts"] is None and len(found["warnings"]) == 2 and text in found["warnings"][0]
    text = "data.val_max_samples is verl's default in none (seed 1) and 3 in difffilter (seed 1)"
    assert found["warnings"][1] == f"perhaps not measured alike: {text}"


def test_other_versions_and_data_of_single_runs_are_marked_with_and_without_a_plan(
    run, unplanned, dataflex: Dataflex, tmp_path: Path
) -> None:
    def change(arm: str, seed: int, record: dict[str, Any]) -> None:
        if (arm, seed) == ("difffilter", 1):
            record["versions"] |= {"verl": "0.9.0", "code": "abc"}
            record["inputs"]["data.train_files:train.parquet"] = "def"

    done = unplanned(change)
    assert done.exit_code == 0
    versions = compare_run_versions()
    before = "none (seed 0, 1), difffilter (seed 0)"
    said = [
        f"other versions: this code is {versions['code']} in {before} and abc in difffilter (seed 1)",
        f"other versions: verl is {versions['verl']} in {before} and 0.9.0 in difffilter (seed 1)",
    ]
    found = results(tmp_path)
    assert found["warnings"][:2] == said and found["versions"] == {} and found["unchecked"] == []
    assert found["warnings"][2].startswith("other data: contents of data.train_files:train.parquet is ")
    assert found["warnings"][2].endswith(" in none (seed 1) and def in difffilter (seed 1)")
    for text in found["warnings"]:
        assert f"warning: {text}" in done.stderr
        assert f"- Warning: {text}." in (tmp_path / "o" / "results.md").read_text()
        assert text in (tmp_path / "o" / "report.html").read_text()
    plan = {"arms": [{"name": arm, "overrides": [arm]} for arm in ("none", "difffilter")], "seeds": [0, 1]}
    for path in (tmp_path / "o").glob("*/seed-*/run.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "overrides": [*record["overrides"], path.parts[-3]]}))
    (tmp_path / "o" / "compare.json").write_text(json.dumps({**plan, "steps": STEPS}))
    assert dataflex("compare", "--collect", str(tmp_path / "o")).exit_code == 0
    assert results(tmp_path)["warnings"] == found["warnings"]


def test_other_validation_data_under_the_same_name_is_refused(unplanned) -> None:
    def change(arm: str, seed: int, record: dict[str, Any]) -> None:
        if (arm, seed) == ("difffilter", 1):
            record["inputs"]["data.val_files:val.parquet"] = "abc"

    done = unplanned(change)
    assert done.exit_code == 2 and "contents of data.val_files:val.parquet is " in done.stderr
    assert "and abc in difffilter (seed 1); accepted: runs that are measured alike" in done.stderr


def test_what_hand_made_runs_do_not_record_is_said(dataflex: Dataflex, tmp_path: Path) -> None:
    write_fakes(tmp_path)
    done = dataflex("compare", "--collect", str(tmp_path / "o"))
    found = results(tmp_path)
    text = (
        "not recorded by any run, and so not checked to be equal: batch size, rollouts a prompt and validation, "
        "versions of verl and of this package, the contents of training and validation data"
    )
    assert done.exit_code == 0 and found["unchecked"] == [text] and f"warning: {text}" in done.stderr
    assert f"- Warning: {text}." in (tmp_path / "o" / "results.md").read_text()
    assert f"{text}.</p>" in (tmp_path / "o" / "report.html").read_text()


def test_hydra_s_own_record_and_our_plan_are_read_too(dataflex: Dataflex, tmp_path: Path) -> None:
    write_fakes(tmp_path, seeds=1)
    common = ["data.train_batch_size=12", "actor_rollout_ref.rollout.n=8"]
    for arm, own in (("none", []), ("difffilter", ["+dataflex=difffilter", "actor_rollout_ref.actor.optim.lr=1"])):
        folder = tmp_path / "o" / arm / "seed-0" / "outputs" / "2026-01-01" / "00-00-00" / ".hydra"
        folder.mkdir(parents=True)
        (folder / "overrides.yaml").write_text("".join(f"- {text}\n" for text in (*common, *own)))
    assert dataflex("compare", "--collect", str(tmp_path / "o")).exit_code == 0
    found = results(tmp_path)
    assert found["rollouts"] == STEPS * 96
    (differs,) = found["arms"][1]["differs"]
    assert differs == {"setting": "actor_rollout_ref.actor.optim.lr", "value": "1", "baseline": "verl's default"}
    assert len(found["unchecked"]) == 1 and "batch size" not in found["unchecked"][0]
    # The other run's plan alone says enough to refuse it.
    (folder / "overrides.yaml").write_text("{")
    line = "DataFlex plan: verl settings that matter: algorithm.adv_estimator=grpo, actor_rollout_ref.rollout.n=4"
    (tmp_path / "o" / "difffilter" / "seed-0" / "metrics.plan.json").write_text(json.dumps([line]))
    done = dataflex("compare", "--collect", str(tmp_path / "o"))
    assert done.exit_code == 2 and "rollout.n is 8 in none (seed 0) and 4 in difffilter (seed 0)" in done.stderr


def test_printed_commands_record_nothing_of_themselves_and_that_is_said(
    run, dataflex: Dataflex, tmp_path: Path
) -> None:
    run("--print")
    write_fakes(tmp_path)
    assert dataflex("compare", "--collect", str(tmp_path / "o")).exit_code == 0
    (text,) = results(tmp_path)["unchecked"]
    assert text.startswith(
        "not recorded by any run, and so not checked to be equal: that they have the plan's settings"
    )
