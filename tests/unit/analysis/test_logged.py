"""What a decision log adds to a report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataflex_hooks.decision_log.schema import Facts
from dataflex_hooks.decision_log.writer import LogWriter
from dataflex_verl.analysis.charts import charts
from dataflex_verl.analysis.logged import log_folder, logged_weights
from dataflex_verl.analysis.records import UnreadableRun, read_run
from tests.unit.analysis.conftest import Write, metrics_of
from tests.unit.analysis.test_report import values


def write_log(folder: Path, weights: list[list[float]]) -> None:
    """A step a list; weight -1 stands for a rollout that was masked, which has weight 0."""
    writer = LogWriter(folder, Facts())
    for step, row in enumerate(weights, start=1):
        masked = np.array(row) < 0
        table = pa.table(
            {
                "step": np.full(len(row), step, dtype=np.int32),
                "uid": pa.array([f"u{number}" for number in range(len(row))]),
                "state": pa.array(np.where(masked, "masked", "trained").tolist()),
                "weight": np.where(masked, 0.0, row).astype(np.float32),
            }
        )
        writer.write(step, [table], {})


def test_weights_of_the_trained_rollouts_are_drawn_by_their_quantiles(write_run: Write) -> None:
    folder = write_run("run", metrics_of(2))
    write_log(folder / "decisions", [[0.0, 0.5, 1.0, 1.5, 2.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
    log = read_run(folder)
    found = logged_weights(log_folder(log))
    quarter, median, three = (series.values.tolist() for series in found.quantiles[1:4])
    # Of the five that were trained on; the two masked ones would pull everything down.
    assert (quarter, median, three) == ([0.5, 1.0], [1.0, 1.0], [1.5, 1.0])
    chart = next(chart for chart in charts([log], [found]) if "rollouts in the update" in chart.title)
    assert values(next(one for one in chart.traces if one["name"] == "median")) == [1.0, 1.0]
    assert len(charts([log])) == len(charts([log], [found])) - 1


def test_a_log_beside_the_metrics_is_found_and_another_is_named(write_run: Write, dataflex, tmp_path: Path) -> None:
    folder = write_run("run", metrics_of(2))
    assert log_folder(read_run(folder)) is None
    write_log(tmp_path / "elsewhere", [[1.0, 2.0]])
    page = tmp_path / "page.html"
    assert dataflex("report", str(folder), "-o", str(page)).exit_code == 0
    assert "Weights of the rollouts in the update" not in page.read_text()
    done = dataflex("report", str(folder), "-o", str(page), "--decisions", str(tmp_path / "elsewhere"))
    assert done.exit_code == 0 and "Weights of the rollouts in the update" in page.read_text()
    write_log(folder / "checkpoints" / "decisions", [[1.0, 2.0]])
    assert log_folder(read_run(folder)) == folder / "checkpoints" / "decisions"


def test_a_log_that_cannot_be_read_is_noted_or_where_it_was_named_refused(
    write_run: Write, dataflex, tmp_path: Path
) -> None:
    folder = write_run("run", metrics_of(2))
    broken = folder / "decisions"
    broken.mkdir()
    (broken / "step-00000001.parquet").write_bytes(b"PAR1")
    with pytest.raises(UnreadableRun, match="none of its files can be read"):
        logged_weights(broken)
    page = tmp_path / "page.html"
    assert dataflex("report", str(folder), "-o", str(page)).exit_code == 0
    assert "decision log: " in page.read_text()
    refused = dataflex("report", str(folder), "-o", str(page), "--decisions", str(tmp_path / "nothing"))
    assert refused.exit_code == 2 and "no decision log here" in refused.stderr
    two = dataflex("report", str(folder), str(folder), "--decisions", str(broken), "-o", str(page))
    assert two.exit_code == 2 and "accepted with one run" in two.stderr
