"""Our metrics through verl's own aggregation and its real loggers: JSONL, TensorBoard and W&B offline."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from verl.trainer.ppo.v1.utils import MetricsAggregator  # noqa: E402
from verl.utils.tracking import Tracking  # noqa: E402

from dataflex_hooks import HookManager, LossCoefficients, StepContext, UpdateDecision, hookimpl  # noqa: E402
from dataflex_hooks.metric_names import FIXED, domain_metric, label_metric, label_time, reduction  # noqa: E402

ODD = (
    "openai/gsm8k",
    "minerva",
    "summary",
    "total",
    "maxwell",
    "Maximum Likelihood",
    "lr",
    "timing_s/x",
    "all",
    "数学",
    "a.b/c:d @ e%",
    "very long " * 30,
    "",
)
LABELS = ("difffilter", "max_weight", "min-len", "sum", "my_lr", "timing_s", "prop")
DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def reduced(name: str, values: list[float], samples: list[int]) -> float:
    """What verl makes of a metric's values over the updates of a step."""
    aggregator = MetricsAggregator()
    for value, count in zip(values, samples, strict=True):
        aggregator.add_step_metrics({name: value}, sample_count=count)
    return aggregator.get_aggregated_metrics()[name]


EXPECTED = {"mean": 3.5, "sum": 5.0, "max": 4.0, "min": 1.0, "last": 4.0}


@given(st.text(max_size=40) | st.sampled_from(ODD), st.text(max_size=20) | st.sampled_from(LABELS))
def test_verl_averages_shares_and_adds_up_counts_and_times_whatever_the_names(domain, label):
    def over(name: str) -> float:
        return reduced(name, [1.0, 4.0], [10, 50])

    assert over(domain_metric("prop", domain)) == EXPECTED["mean"]
    assert over(label_metric(label, "kept_frac")) == EXPECTED["mean"]
    assert over(label_metric(label, "decided_total")) == EXPECTED["sum"]
    assert over(label_metric(label, "masked_rows_total", domain)) == EXPECTED["sum"]
    assert over(label_time(label)) == EXPECTED["sum"]


@given(st.text(max_size=30) | st.lists(st.sampled_from(["max", "MIN", "sum", "total", "/lr", "_lr", "x"])).map("".join))
@pytest.mark.parametrize("prefix", ["", "timing_s/", "timing_per_token_ms/"])
def test_our_account_of_verls_rule_is_verls(prefix, text):
    name = prefix + text
    kind = MetricsAggregator()._get_aggregation_type(name)
    assert reduction(name) == {"weighted_avg": "mean", "time_sum": "sum"}.get(kind, kind)


def test_raw_names_would_be_reduced_wrongly():
    assert reduced("dataflex/prop_minerva", [1.0, 4.0], [10, 50]) == EXPECTED["min"]
    assert reduced("dataflex/max_weight/kept_frac", [1.0, 4.0], [10, 50]) == EXPECTED["max"]


def test_the_documented_reductions_are_verls():
    rows = re.findall(r"^\| (`.+?`(?:, `.+?`)*) \| (mean|sum) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name: kind for names, kind in rows for name in re.findall(r"`(.+?)`", names)}
    assert {name for name in documented if not set(name) & set("<>/")} == FIXED
    assert len(documented) > len(FIXED) + 8
    for name, kind in documented.items():
        full = name if name.startswith("timing_s/") else f"dataflex/{name}"
        assert reduced(full, [1.0, 4.0], [10, 50]) == EXPECTED[kind], name


class Half:
    """Keeps every other row, or abstains."""

    def __init__(self, decides: bool) -> None:
        self.decides = decides

    @hookimpl
    def post_advantage(self, batch):
        if not self.decides:
            return None
        return UpdateDecision(
            mask=torch.arange(batch.bs) % 2 == 0, reason="total/nonsense", weights=torch.ones(batch.bs)
        )


@pytest.fixture(scope="module")
def metrics(batches) -> dict[str, float]:
    """What two updates of a step log, through verl's aggregator, with domains beside it."""
    aggregator = MetricsAggregator()
    manager = HookManager({label: Half(label != "sum") for label in LABELS})
    batch = batches.groups([1, 0, 1, 0], [0, 0, 1, 0])
    for update in range(2):
        merged = manager.post_advantage(batch, StepContext(step=1, local_update=update), LossCoefficients("token"))
        shares = {domain_metric("prop", domain): 1 / len(ODD) for domain in ODD}
        aggregator.add_step_metrics({**merged.metrics, **manager.calls.take(), **shares}, sample_count=8)
    return aggregator.get_aggregated_metrics()


def test_counts_of_two_updates_are_added_and_shares_averaged(metrics):
    assert metrics["dataflex/ma-x_weight/kept_frac"] == 0.5
    assert metrics["dataflex/ma-x_weight/masked_rows_total/tota-l:nonsense"] == 8
    assert (metrics["dataflex/ma-x_weight/decided_total"], metrics["dataflex/su-m/abstained_total"]) == (2, 2)
    assert metrics["dataflex/prop_su-mmary"] == pytest.approx(1 / len(ODD))
    assert sum(name.startswith("dataflex/prop_") for name in metrics) == len(ODD)


def test_verls_jsonl_logger_receives_them(metrics, tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    tracking = Tracking("project", "run", ["file"], config={"trainer": {}})
    tracking.log(metrics, step=3)
    tracking.finish()
    (record,) = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert record == {"step": 3, "data": pytest.approx(metrics)}


def test_tensorboard_receives_them(metrics, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs tensorboard, which verl requires: pip install verl")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    tracking = Tracking("project", "run", ["tensorboard"], config={"trainer": {}})
    for step in (1, 2):
        tracking.log(metrics, step=step)
    tracking.finish()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(metrics)
    for name, value in metrics.items():
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [1, 2]
        assert scalars[1].value == pytest.approx(value, rel=1e-6)


def test_wandb_offline_receives_them(metrics, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb, which verl requires: pip install verl")
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    # wandb starts a process of its own, which takes its time on a busy machine.
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")
    tracking = Tracking("project", "run", ["wandb"], config={"trainer": {}})
    for step in (1, 2):
        tracking.log(metrics, step=step)
    tracking.finish()
    deadline = time.monotonic() + 120
    while len(history := wandb_history(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert [row["_step"] for row in history] == [1, 2]
    for row in history:
        assert {name: row[name] for name in metrics} == pytest.approx(metrics)


def wandb_history(directory: Path) -> list[dict[str, float]]:
    """Rows of the offline run in ``directory``, read back from wandb's own file."""
    from wandb.proto import wandb_internal_pb2

    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind wandb's header of 7 bytes: chunks of crc32, length and kind, in blocks."""
    block, position, parts = 32768, 7, b""
    while position + 7 <= len(data):
        room = block - position % block
        if room < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if kind == 0:
            break
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
