"""The files of a decision log: readable by others, bounded, whole after a kill, never a step twice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dataflex_hooks as dh
from dataflex_hooks.decision_log import files
from dataflex_hooks.decision_log.reader import DecisionLog
from dataflex_hooks.decision_log.schema import FACTS_KEY, VERSION, Facts
from dataflex_hooks.decision_log.writer import ROWS_PER_FILE, LogWriter
from dataflex_hooks.whatif.steps import coded
from dataflex_verl import presets
from dataflex_verl.decision_log import written_to_the_end
from tests.unit.log.simulated import next_step, simulate

BLOCK = {"plugins": {**presets.block("difffilter")["plugins"], **presets.block("per")["plugins"]}}
ROOT = Path(__file__).parents[3]


def table(step: int, rows: int = 4, value: float = 0.0):
    return pa.table(
        {
            "step": np.full(rows, step, dtype=np.int32),
            "uid": pa.array([f"u{row}" for row in range(rows)]),
            "weight": np.full(rows, value + step, dtype=np.float32),
        }
    )


def written(folder: Path, steps, value: float = 0.0, **limits) -> LogWriter:
    writer = LogWriter(folder, Facts(), **limits)
    for step in steps:
        writer.write(step, [table(step, value=value)], {})
    return writer


def read(folder: Path) -> dict[int, list[float]]:
    steps = DecisionLog.open(folder).steps(["weight"])
    return {step.step: step.table["weight"].to_pylist() for step in steps}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_pandas_polars_and_duckdb_read_the_folder(tmp_path: Path) -> None:
    import duckdb
    import pandas
    import polars

    run = simulate(BLOCK, tmp_path)
    frame = pandas.read_parquet(run.folder)
    lazy = polars.read_parquet(run.folder / "*.parquet")
    query = "select step, count(*), sum(weight) from read_parquet(?) where state = 'trained' group by step order by 1"
    rows = duckdb.execute(query, [str(run.folder / "*.parquet")]).fetchall()
    assert len(frame) == len(lazy) == len(run.decided) == 4 * 24
    by_step: dict[int, list[float]] = {}
    for (step, _), (state, weight, _) in run.decided.items():
        if state == "trained":
            by_step.setdefault(step, []).append(weight)
    assert [(step, n) for step, n, _ in rows] == [(step, len(weights)) for step, weights in sorted(by_step.items())]
    for step, _, total in rows:
        assert total == pytest.approx(sum(by_step[step]))
        kept = frame[(frame.step == step) & (frame.state == "trained")]
        assert kept.weight.sum() == pytest.approx(total)
        chosen = lazy.filter((polars.col("step") == step) & (polars.col("state") == "trained"))
        assert chosen["weight"].sum() == pytest.approx(total)
    assert 0 < sum(len(weights) for weights in by_step.values()) < len(run.decided)


def test_the_metadata_has_version_plan_and_configuration(tmp_path: Path) -> None:
    run = simulate({"plugins": presets.block("vcrl")["plugins"]}, tmp_path)
    (first, *_) = files.listing(run.folder)
    assert f'"version": {VERSION}' in pq.read_metadata(first.path).metadata[FACTS_KEY].decode()
    facts = DecisionLog.open(tmp_path).facts
    assert facts.plan == ("a plan",) and facts.rollouts == 4 and facts.coefficients["kind"] == "token"
    # The steps of a schedule stay numbers, and infinity stays infinite.
    assert dh.parse(__import__("omegaconf").OmegaConf.create(facts.dataflex)).plugins[0].keywords == {
        key: value for key, value in presets.block("vcrl")["plugins"]["vcrl"].items() if key != "plugin"
    }


def test_single_steps_are_merged_by_rows_steps_and_bytes(tmp_path: Path) -> None:
    written(tmp_path / "steps", range(1, 8), steps_per_file=3)
    assert names(tmp_path / "steps") == [
        "step-00000007.parquet",
        "steps-00000001-00000003.parquet",
        "steps-00000004-00000006.parquet",
    ]
    written(tmp_path / "rows", range(1, 4), rows_per_file=8, steps_per_file=8)
    assert names(tmp_path / "rows") == ["step-00000003.parquet", "steps-00000001-00000002.parquet"]
    written(tmp_path / "bytes", range(1, 4), bytes_per_file=1)
    assert names(tmp_path / "bytes") == [files.step_name(step) for step in (1, 2, 3)]
    written(tmp_path / "large", range(1, 6), rows_per_file=8, steps_per_file=64)
    assert len(names(tmp_path / "large")) == 5
    for folder in ("steps", "rows", "bytes"):
        assert all(weights == [float(step)] * 4 for step, weights in read(tmp_path / folder).items())
    assert list(read(tmp_path / "steps")) == [1, 2, 3, 4, 5, 6, 7]


def test_no_row_is_lost_where_a_step_begins_in_one_row_group_and_ends_in_the_next(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "merged", Facts())
    for step in range(1, 18):
        writer.write(step, [table(step, rows=4000)], {})
    assert names(tmp_path / "merged") == ["steps-00000001-00000017.parquet"]
    LogWriter(tmp_path / "large", Facts()).write(1, [table(1, rows=ROWS_PER_FILE + 7)], {})
    for folder, rows in (("merged", 4000), ("large", ROWS_PER_FILE + 7)):
        (path,) = (tmp_path / folder).glob("*.parquet")
        assert pq.ParquetFile(path).num_row_groups == 2
        steps = list(DecisionLog.open(tmp_path / folder).steps(["uid", "weight"]))
        assert [step.table.num_rows for step in steps] == [rows] * len(steps)
        code, texts = coded(steps[-1].table["uid"])
        assert texts[code].tolist() == [f"u{row}" for row in range(rows)]


def test_a_resumed_run_supersedes_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, range(1, 9), steps_per_file=3)
    written(tmp_path, range(5, 7), value=100.0, steps_per_file=3)
    found = read(tmp_path)
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found[4] == [4.0] * 4 and found[5] == [105.0] * 4
    rows = pq.ParquetDataset([tmp_path / name for name in names(tmp_path)]).read().column("step").to_pylist()
    assert sorted(rows) == [step for step in range(1, 7) for _ in range(4)]
    aside = sorted(path.name for path in (tmp_path / files.SUPERSEDED / "1").iterdir())
    assert aside == ["step-00000007.parquet", "step-00000008.parquet", "steps-00000004-00000006.parquet"]
    written(tmp_path, [7], value=100.0)
    assert list(read(tmp_path)) == [1, 2, 3, 4, 5, 6, 7] and not (tmp_path / files.SUPERSEDED / "2").exists()


def test_a_kill_while_later_steps_are_set_aside_loses_and_doubles_nothing(tmp_path: Path, monkeypatch) -> None:
    written(tmp_path, range(1, 7), steps_per_file=6)

    def killed(folder, later):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files, "set_aside", killed)
        with pytest.raises(KeyboardInterrupt):
            written(tmp_path, [3], value=100.0)
    assert list(read(tmp_path)) == [1, 2, 3, 4, 5, 6]
    written(tmp_path, [5], value=100.0)
    assert names(tmp_path) == ["step-00000005.parquet", "steps-00000001-00000004.parquet"]
    assert read(tmp_path) == {**{step: [float(step)] * 4 for step in (1, 2, 3, 4)}, 5: [105.0] * 4}


def test_readers_of_a_whole_folder_see_what_counts_and_no_more(tmp_path: Path) -> None:
    import pandas
    import polars

    run = simulate(BLOCK, tmp_path, steps=3)
    assert run.log is not None and run.hooks is not None
    run.log.resumed(2)
    written(run.folder, [3])
    assert (files.state_folder(run.folder, 2) / "dataflex").is_dir() and (run.folder / files.SUPERSEDED / "1").is_dir()
    frame = pandas.read_parquet(run.folder)
    assert frame.groupby("step").size().to_dict() == {1: 24, 2: 24, 3: 4}
    # Files with other columns, as the page says to read them.
    paths = sorted(run.folder.glob("*.parquet"))
    assert len(pandas.concat(map(pandas.read_parquet, paths))) == 52
    assert polars.concat(map(polars.read_parquet, paths), how="diagonal").shape == (52, len(frame.columns))


def test_another_run_in_the_same_folder_sets_the_first_aside(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4))
    written(tmp_path, range(1, 2), value=100.0)
    assert read(tmp_path) == {1: [101.0] * 4}
    assert len(list((tmp_path / files.SUPERSEDED / "1").iterdir())) == 3


@pytest.mark.parametrize("moment", ["replace", "unlink"])
def test_a_kill_while_files_are_merged_loses_and_doubles_nothing(tmp_path: Path, monkeypatch, moment: str) -> None:
    """``replace``: before the merged file has its name; ``unlink``: before what was merged is removed."""
    writer = written(tmp_path, [1, 2], steps_per_file=3)
    original = getattr(Path, moment)

    def killed(self, *arguments, **keywords):
        if moment == "unlink" or "steps-" in self.name:
            raise KeyboardInterrupt
        return original(self, *arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(Path, moment, killed)
        with pytest.raises(KeyboardInterrupt):
            writer.write(3, [table(3)], {})
    assert read(tmp_path) == {step: [float(step)] * 4 for step in (1, 2, 3)}
    written(tmp_path, [4])
    assert read(tmp_path) == {step: [float(step)] * 4 for step in (1, 2, 3, 4)}
    merged = ["steps-00000001-00000003.parquet"] if moment == "unlink" else []
    single = [files.step_name(step) for step in ((4,) if merged else (1, 2, 3, 4))]
    assert names(tmp_path) == single + merged


CHILD = """
import sys
from pathlib import Path
from tests.unit.log.test_log_files import BLOCK
from tests.unit.log import simulated
ended = simulated.RunLog.end_of_step
def end_of_step(log):
    step = log._records[-1].step
    ended(log)
    print(step, flush=True)
simulated.RunLog.end_of_step = end_of_step
simulated.simulate(BLOCK, Path(sys.argv[1]), steps=10000)
"""


def test_a_killed_process_loses_one_step_at_most(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    assert child.stdout is not None
    last = 0
    while last < 70:
        last = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read().split()
    child.wait()
    last = int(rest[-1]) if rest else last
    log = DecisionLog.open(tmp_path)
    steps = {step.step: step.table.num_rows for step in log.steps(["weight"])}
    assert not log.damaged
    assert list(steps) == list(range(1, max(steps) + 1)) and max(steps) >= last - 1
    assert set(steps.values()) == {24}
    assert any(file.merged for file in files.listing(log.folder))


def test_a_damaged_file_is_a_marked_gap_and_nothing_at_all_an_error(tmp_path: Path) -> None:
    written(tmp_path, [1, 2, 3])
    (tmp_path / files.step_name(2)).write_bytes((tmp_path / files.step_name(2)).read_bytes()[:100])
    log = DecisionLog.open(tmp_path)
    assert [step.step for step in log.steps([])] == [1, 3]
    assert len(log.damaged) == 1 and "step-00000002.parquet cannot be read and is left out" in log.damaged[0]
    for step in (1, 3):
        (tmp_path / files.step_name(step)).write_bytes(b"")
    with pytest.raises(files.LogError, match="none of its files can be read"):
        DecisionLog.open(tmp_path)
    with pytest.raises(files.LogError, match="no decision log here"):
        DecisionLog.open(tmp_path / "elsewhere")


def test_a_newer_version_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("dataflex_hooks.decision_log.writer.VERSION", VERSION + 1)
    written(tmp_path, [1])
    with pytest.raises(files.LogError, match=f"of version {VERSION + 1}.*reads up to version {VERSION}"):
        DecisionLog.open(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_step_is_a_file_when_a_run_ends_or_fails(tmp_path: Path, monkeypatch, fails: bool) -> None:
    def late(self, step, tables, info):
        time.sleep(0.2)
        return write(self, step, tables, info)

    write = LogWriter.write
    run = simulate(BLOCK, tmp_path, steps=2)
    monkeypatch.setattr(LogWriter, "write", late)
    with contextlib.suppress(ZeroDivisionError), written_to_the_end(run.log):
        next_step(run, 3)
        assert list(read(run.folder)) == [1, 2]
        if fails:
            raise ZeroDivisionError
    assert list(read(run.folder)) == [1, 2, 3]
