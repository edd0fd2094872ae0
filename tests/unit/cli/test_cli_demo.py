from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from dataflex_hooks import HookManager
from dataflex_verl.commands import demo as demo_module
from dataflex_verl.commands.checks import find_problems
from dataflex_verl.commands.demo_plan import BadOption, DemoPlan, choose_strategies
from dataflex_verl.commands.demo_run import RunFailed, RunResult, run_environment, train_in_child
from dataflex_verl.commands.hydra_config import CommandLine, compose_config
from dataflex_verl.demo.build import DemoFiles
from tests.processes import ends

Dataflex = Callable[..., Result]
Distribution = Callable[..., None]


@pytest.fixture
def files(tmp_path: Path) -> DemoFiles:
    home = tmp_path / "built"
    (home / "model").mkdir(parents=True)
    (home / "model" / "config.json").write_text("{}")
    for name in ("train.parquet", "val.parquet", "reward.py"):
        (home / name).touch()
    return DemoFiles(home / "model", home / "train.parquet", home / "val.parquet", home / "reward.py")


class Training:
    """Stands in the place of the training process."""

    def __init__(self) -> None:
        self.overrides: list[str] = []
        self.directory = Path()
        self.fails = False

    def __call__(self, overrides: list[str], directory: Path, on_record: Callable) -> RunResult:
        self.overrides, self.directory = overrides, directory
        (directory / "verl.log").write_text("Traceback\nValueError: it broke\n")
        if self.fails:
            raise RunFailed(3, directory / "verl.log", ["ValueError: it broke"])
        records = [{"step": n, "data": {"dataflex/reward_all": 0.1 * n, "timing_s/step": 1.0}} for n in (1, 2)]
        for record in records:
            on_record(record)
        return RunResult(records, [3.0, 4.0], 5.0)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, files: DemoFiles) -> Training:
    training = Training()
    for name in run_environment(Path()):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(demo_module, "train_in_child", training)
    monkeypatch.setattr(demo_module, "set_local_environment", lambda: None)
    monkeypatch.setattr("dataflex_verl.demo.build.build_demo", lambda directory, seed: files)
    return training


def test_default_plan_has_a_strategy_and_passes_the_start_up_checks(files: DemoFiles) -> None:
    plan = DemoPlan(files, steps=40, seed=0, strategies=choose_strategies(()))
    config = compose_config(CommandLine.parse(plan.all_overrides()))
    assert config.trainer.v1.trainer_mode == "dataflex_sync"
    assert find_problems(config, local=True) == []
    hooks = HookManager.from_config(config.dataflex, estimator=config.algorithm.adv_estimator, has_groups=True)
    assert hooks.labels == ("difffilter",)


def test_plan_without_strategy_is_verl_s_own_trainer(files: DemoFiles) -> None:
    plan = DemoPlan(files, steps=40, seed=0, strategies=choose_strategies(["none"]))
    assert "trainer.v1.trainer_mode=sync" in plan.overrides()
    assert not any("dataflex." in text for text in plan.overrides())


def test_steps_seed_and_learning_rate_reach_verl(files: DemoFiles) -> None:
    plan = DemoPlan(files, steps=7, seed=3, strategies=("per", "topk"), learning_rate=0.0)
    config = compose_config(CommandLine.parse(plan.all_overrides()))
    assert (config.trainer.total_training_steps, config.trainer.test_freq) == (7, 7)
    assert (config.data.seed, config.actor_rollout_ref.rollout.seed) == (3, 3)
    assert config.actor_rollout_ref.actor.optim.lr == 0.0
    assert list(config.dataflex.plugins) == ["per", "topk"]


def test_stock_command_is_shell_that_gives_verl_the_same_overrides(files: DemoFiles) -> None:
    plan = DemoPlan(files, steps=40, seed=0, strategies=("difffilter",))
    words = shlex.split(plan.stock_command().replace("\\\n", " "))
    start = words.index("python")
    assert words[start : start + 3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert words[start + 3 :] == plan.all_overrides()
    environment = dict(word.split("=", 1) for word in words[:start])
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["VERL_FILE_LOGGER_PATH"] == "metrics.jsonl"


@pytest.mark.parametrize(
    ("given", "text"),
    [(["difffiltr"], "'difffiltr'.*did you mean 'difffilter'"), (["per", "per"], "twice"), (["none", "per"], "alone")],
)
def test_bad_strategies_are_refused(given: list[str], text: str) -> None:
    with pytest.raises(BadOption, match=text):
        choose_strategies(given)


def test_a_preset_of_another_package_is_a_strategy_like_ours(files: DemoFiles, distribution: Distribution) -> None:
    block = "plugins:\n  boost:\n    plugin: reweight\n    scorer: reward_difficulty\n    actuator: softmax\n"
    modules = {"acme_pkg/__init__.py": "", "acme_pkg/dataflex/boost.yaml": block, "acme_pkg/dataflex/bad.yaml": "- a"}
    distribution("acme-presets", {}, modules, presets={"acme": "acme_pkg"})
    plan = DemoPlan(files, steps=40, seed=0, strategies=choose_strategies(["boost", "per"]))
    assert "+dataflex.plugins.boost.actuator=softmax" in plan.overrides()
    config = compose_config(CommandLine.parse(plan.all_overrides()))
    assert find_problems(config, local=True) == [] and list(config.dataflex.plugins) == ["boost", "per"]
    with pytest.raises(BadOption, match="--strategy: preset 'bad' of acme-presets 1.2.3 is no mapping of settings"):
        choose_strategies(["bad"])


def test_demo_prints_tables_and_command(dataflex: Dataflex, training: Training) -> None:
    result = dataflex("demo", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert "Strategy: difffilter" in result.output
    assert "+0.100" in result.output
    assert "python -m verl.trainer.main_ppo" in result.output
    assert not training.directory.exists()


def test_demo_prints_json_only(dataflex: Dataflex, training: Training) -> None:
    result = dataflex("demo", "--json", "--steps", "2", "--strategy", "per", "--strategy", "difffilter")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["strategies"] == ["per", "difffilter"]
    assert figures["train_reward"] == {"before": 0.1, "after": 0.2}
    assert figures["step_seconds"] == 1.0


def test_demo_keeps_everything_in_out(dataflex: Dataflex, training: Training, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = dataflex("demo", "--steps", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    expected = {"model", "train.parquet", "val.parquet", "reward.py", "verl.log", "command.sh", "summary.json"}
    assert expected <= set(os.listdir(out))
    assert f"actor_rollout_ref.model.path={out / 'model'}" in training.overrides
    assert json.loads((out / "summary.json").read_text())["steps"] == 2


def test_demo_refuses_a_directory_in_use(dataflex: Dataflex, training: Training, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    result = dataflex("demo", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "--out" in result.output and "empty" in result.output


def test_failed_demo_shows_the_end_of_the_log_and_keeps_it(dataflex: Dataflex, training: Training) -> None:
    training.fails = True
    result = dataflex("demo", "--steps", "2")
    assert result.exit_code == 1
    assert "ValueError: it broke" in result.output
    assert str(training.directory / "verl.log") in result.output
    assert (training.directory / "verl.log").exists()


def test_training_process_that_fails_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        train_in_child(["no_such.setting=1"], tmp_path, lambda record: None)
    assert caught.value.status == 2
    assert any("no_such" in line for line in caught.value.tail)


def test_termination_ends_the_training_process_too(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "from pathlib import Path\n"
        "from dataflex_verl.commands import demo_run\n"
        "popen = subprocess.Popen\n"
        "def start(command, **given):\n"
        "    process = popen([sys.executable, '-c', 'import time; time.sleep(60)'], **given)\n"
        "    print(process.pid, flush=True)\n"
        "    return process\n"
        "demo_run.subprocess.Popen = start\n"
        "demo_run.train_in_child([], Path('.'), print)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.terminate()
        assert parent.wait(30) == 143
    assert ends(child)
