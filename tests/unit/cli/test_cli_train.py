from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from dataflex_verl.commands.hydra_config import CommandLine
from dataflex_verl.commands.train import add_local_overrides, set_local_environment

SELECT = ("+dataflex.mechanism=select", "+dataflex.scorer.name=group_solve_rate")
FULL = (
    *SELECT,
    "+dataflex.actuator.name=threshold_band",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.n=4",
)
Dataflex = Callable[..., Result]


def test_overrides_reach_verl_unchanged(dataflex: Dataflex, started: Any) -> None:
    overrides = ["trainer.total_epochs=1", "+data.extra='a b'"]
    result = dataflex("train", *overrides)
    assert result.exit_code == 0, result.output
    assert started.command_lines == [overrides]


def test_hydra_options_reach_verl_unchecked(dataflex: Dataflex, started: Any) -> None:
    result = dataflex("train", "--cfg", "job", "+dataflex.mechanism=nonsense")
    assert result.exit_code == 0, result.output
    assert started.command_lines == [["--cfg", "job", "+dataflex.mechanism=nonsense"]]


def test_dataflex_mode_with_a_good_block_starts(dataflex: Dataflex, started: Any) -> None:
    result = dataflex("train", "trainer.v1.trainer_mode=dataflex_sync", *FULL)
    assert result.exit_code == 0, result.output
    assert len(started.command_lines) == 1


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (["a[="], ["a[="]),
        (["trainer.total_epoch=1"], ["trainer.total_epoch: got 1", "did you mean 'total_epochs'?"]),
        (["--config-name", "no_such_file"], ["no_such_file"]),
        (SELECT, ["dataflex: got a dataflex block, with trainer.v1.trainer_mode=sync", "dataflex_sync"]),
        (["trainer.v1.trainer_mode=dataflex_separate_async"], ["'dataflex_separate_async'", "later version"]),
        (["trainer.v1.trainer_mode=dataflex_snyc"], ["'dataflex_snyc'", "did you mean 'dataflex_sync'?"]),
        (["trainer.v1.trainer_mode=dataflex_sync", "trainer.use_v1=False", *FULL], ["trainer.use_v1: got False"]),
    ],
)
def test_bad_configuration_is_refused_before_anything_starts(
    dataflex: Dataflex, started: Any, overrides: list[str], texts: list[str]
) -> None:
    result = dataflex("train", *overrides)
    assert result.exit_code == 2
    assert "nothing was started" in result.output
    assert all(text in result.output for text in texts), result.output
    assert "Traceback" not in result.output
    assert started.command_lines == []


def test_every_problem_of_the_block_is_listed(dataflex: Dataflex, started: Any) -> None:
    overrides = ["+dataflex.mechanism=selct", "+dataflex.scorer.name=group_solve_rat", "+dataflex.warmup_step=-1"]
    result = dataflex("train", "trainer.v1.trainer_mode=dataflex_sync", *overrides)
    assert result.exit_code == 2
    # The last is verl's own: no micro-batch size is set.
    for text in (
        "dataflex.mechanism: got 'selct'",
        "did you mean 'select'?",
        "dataflex.warmup_step: got -1",
        "ppo_micro_batch_size_per_gpu",
    ):
        assert text in result.output, result.output
    assert "Traceback" not in result.output


def test_what_hydra_refuses_and_what_we_refuse_come_at_once_and_as_from_check(dataflex: Dataflex, started: Any) -> None:
    wrong = [
        "trainer.v1.trainer_mode=dataflex_snyc",
        *FULL,
        "trainer.total_epoch=1",
        "+trainer.nnodes=2",
        "+dataflex.scorer.params.treshold=0.5",
        "+dataflex.warmup_step=-1",
    ]
    refused = dataflex("train", *wrong)
    assert refused.exit_code == 2 and started.command_lines == []
    for text in (
        "dataflex: 5 problems in the configuration; nothing was started.",
        "1. trainer.total_epoch: got 1",
        "2. trainer.nnodes: got +trainer.nnodes=2",
        "3. trainer.v1.trainer_mode: got 'dataflex_snyc'",
        "4. dataflex.warmup_step: got -1",
        "5. dataflex.scorer.params.treshold: got 0.5",
    ):
        assert text in refused.output, refused.output
    checked = dataflex("check", *wrong)
    assert (checked.exit_code, checked.stderr) == (2, refused.stderr)

    right = ["trainer.v1.trainer_mode=dataflex_sync", *FULL, "trainer.nnodes=2", "+dataflex.warmup_step=1"]
    assert dataflex("train", *right).exit_code == 0
    assert started.command_lines == [right]


def test_presets_that_clash_are_refused(dataflex: Dataflex, started: Any) -> None:
    good = ["trainer.v1.trainer_mode=dataflex_sync", *FULL[-3:]]
    refused = dataflex("train", *good, "+dataflex=[per,per]")
    assert refused.exit_code == 2 and started.command_lines == []
    assert "dataflex: got preset 'per' twice; accepted: each preset once" in refused.output
    assert dataflex("train", *good, "+dataflex=[per]").exit_code == 0
    assert len(started.command_lines) == 1


def test_local_run_asks_for_files_on_this_machine(dataflex: Dataflex, started: Any, tmp_path: Path) -> None:
    (tmp_path / "train.parquet").touch()
    given = [f"data.train_files={tmp_path}/train.parquet", "data.val_files=./nowhere.parquet"]
    result = dataflex("train", "--local", *given, "actor_rollout_ref.model.path=owner/name")
    assert result.exit_code == 2
    assert "1 problem in the configuration" in result.output
    assert "data.val_files: got './nowhere.parquet'" in result.output


def test_local_run_needs_model_data_and_reward_only(dataflex: Dataflex, started: Any, tmp_path: Path) -> None:
    for name in ("train.parquet", "val.parquet", "reward.py"):
        (tmp_path / name).touch()
    given = [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"actor_rollout_ref.model.path={tmp_path}",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
    ]
    result = dataflex("train", *given, "--local")
    assert result.exit_code == 0, result.output
    (command_line,) = started.command_lines
    assert command_line[-len(given) :] == given
    assert {"trainer.device=cpu", "algorithm.adv_estimator=grpo"} <= set(command_line)


def test_overrides_of_the_user_win() -> None:
    given = ["trainer.n_gpus_per_node=2", "algorithm.adv_estimator=rloo", "++trainer.logger=[console,file]"]
    merged = add_local_overrides(given)
    assert merged[-3:] == given
    for key in ("trainer.n_gpus_per_node", "algorithm.adv_estimator", "trainer.logger"):
        assert sum(text.lstrip("+").startswith(f"{key}=") for text in merged) == 1


def test_hydra_options_come_before_the_overrides() -> None:
    line = CommandLine.parse(["a=1", "--config-name", "mine", "b=2"][1:])
    assert line.with_overrides(["a=1", "b=2"]).arguments == ["--config-name", "mine", "a=1", "b=2"]


def test_platform_is_the_option_s_and_other_variables_are_the_user_s(
    monkeypatch: pytest.MonkeyPatch, started: Any
) -> None:
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    set_local_environment()
    assert os.environ["VERL_PLATFORM"] == "cpu"
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_run_goes_on_without_a_fork_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def fail() -> None:
        raise PermissionError("others could enter")

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr("dataflex_verl.local.forkserver.start_server", fail)
    set_local_environment()
    assert "others could enter" in capsys.readouterr().err


def test_fewer_rows_than_a_batch_are_refused_on_this_machine(dataflex: Dataflex, started: Any, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for name in ("train.parquet", "val.parquet"):
        parquet.write_table(pyarrow.table({"prompt": ["a"] * 20}), tmp_path / name)
    (tmp_path / "reward.py").touch()
    given = [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        f"actor_rollout_ref.model.path={tmp_path}",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
    ]
    refused = dataflex("train", "--local", *given, "data.train_batch_size=21")
    assert refused.exit_code == 2 and started.command_lines == []
    assert "data.train_batch_size: got 21; accepted: at most the 20 rows of data.train_files" in refused.output
    sampled = dataflex("train", "--local", *given, "data.train_batch_size=11", "data.train_max_samples=10")
    assert "at most the 10 rows" in sampled.output
    assert dataflex("train", "--local", *given, "data.train_batch_size=20").exit_code == 0
