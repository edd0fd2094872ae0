from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from dataflex_verl.analysis import extra
from dataflex_verl.analysis.charts import MOST_POINTS, charts, packed, thinned
from dataflex_verl.analysis.colours import PALETTE
from dataflex_verl.analysis.page import in_script, layout
from dataflex_verl.analysis.records import RunLog, read_run
from dataflex_verl.analysis.report import figures_table
from dataflex_verl.analysis.summary import summarize_run
from tests.unit.analysis.conftest import Write, metrics_of
from tests.unit.analysis.synthetic import full_run

Dataflex = Callable[..., Result]
PLAN = ["2 plugin(s), applied to weights", "difffilter = select group_solve_rate -> threshold_band <0.1.0>"]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in full_run(40, 8)))
    (folder / "metrics.plan.json").write_text(json.dumps([f"DataFlex plan: {line}" for line in PLAN]))
    return folder


def named(logs: list[RunLog]) -> dict[str, Any]:
    return {chart.title: chart for chart in charts(logs)}


def values(trace: dict[str, Any]) -> list[float]:
    return np.frombuffer(base64.b64decode(trace["y"]["bdata"]), "<f4").tolist()


def test_every_chart_that_there_is_something_for_is_drawn(full: Path) -> None:
    found = named([read_run(full)])
    shares = [f"Share of {name}" for name in ("gsm8k", "word problems", "openai/gsm8k", "minerva")]
    expected = {
        "Mean reward of a step",
        "Validation, all domains",
        "Validation by domain",
        "Share of rollouts kept for the update",
        "Why rollouts were taken out",
        "Weight of a token in the loss",
        "Effective sample size",
        "Reward by domain",
        "Where a step's time goes",
        *shares,
    }
    assert expected <= set(found) and len(found) == 17
    stack = found["Why rollouts were taken out"].traces
    assert [trace["name"] for trace in stack] == [
        "difffilter: group_solve_rate/threshold_band (masked)",
        "overlong: truncated (dropped)",
    ]
    assert {trace["stackgroup"] for trace in stack} == {"reasons"}
    assert {trace["name"] for trace in found["Share of minerva"].traces} == {"target", "generated", "trained"}


def test_curves_are_what_was_logged(write_run: Write) -> None:
    log = read_run(write_run("a", metrics_of(3, **{"dataflex/kept_frac": [0.5, 0.25, 1.0]})))
    found = named([log])
    (kept,) = found["Share of rollouts kept for the update"].traces
    assert values(kept) == [0.5, 0.25, 1.0] and (kept["x0"], kept["dx"]) == (1, 1)
    reward = found["Mean reward of a step"].traces[0]
    assert values(reward) == pytest.approx([0.51, 0.52, 0.53])
    (validation,) = found["Validation, all domains"].traces
    assert values(validation) == pytest.approx([0.2, 0.4])


def test_the_time_of_a_step_adds_up(full: Path) -> None:
    log = read_run(full)
    stack = [trace for trace in named([log])["Where a step's time goes"].traces if "stackgroup" in trace]
    assert [trace["name"] for trace in stack] == ["gen", "old_log_prob", "update_actor", "other"]
    assert np.sum([values(trace) for trace in stack], axis=0) == pytest.approx(log.values("timing_s/step"), rel=1e-5)


def test_two_runs_made_without_us_show_what_is_there(write_run: Write, dataflex: Dataflex, tmp_path: Path) -> None:
    """Nothing but what verl itself logs, and of the second not even validation."""
    one = write_run("plain/one", metrics_of(5))
    two = write_run("plain/two", metrics_of(8, validation={}))
    found = named([read_run(one), read_run(two)])
    assert set(found) == {
        "Mean reward of a step",
        "Validation, all domains",
        "Validation by domain",
        "one: Where a step's time goes",
        "two: Where a step's time goes",
    }
    assert [trace["name"] for trace in found["Mean reward of a step"].traces] == [
        "one: all rollouts",
        "two: all rollouts",
    ]
    out = tmp_path / "both.html"
    done = dataflex("report", str(one), str(two), "-o", str(out))
    assert done.exit_code == 0, done.output
    text = out.read_text()
    assert "a run without DataFlex: what verl logs itself is shown" in text and "no validation was logged" in text


def test_a_run_that_plotly_refuses_would_fail_here(full: Path) -> None:
    from plotly import graph_objects

    for chart in charts([read_run(full), read_run(full)]):
        graph_objects.Figure({"data": chart.traces, "layout": layout(chart)})
    with pytest.raises(ValueError, match="no_such"):
        graph_objects.Figure({"data": [{"type": "scatter", "no_such": 1}]})


def test_long_runs_are_drawn_as_means_over_equal_stretches() -> None:
    steps, numbers = np.arange(1, 2 * MOST_POINTS + 2), np.arange(2.0 * MOST_POINTS + 1)
    few_steps, few = thinned(steps, numbers)
    assert len(few) <= MOST_POINTS and few_steps[-1] == steps[-1]
    assert few[:2].tolist() == [1.0, 4.0] and few_steps[:2].tolist() == [3, 6]
    same_steps, same = thinned(steps[:MOST_POINTS], numbers[:MOST_POINTS])
    assert same is not None and same.tolist() == numbers[:MOST_POINTS].tolist() and len(same_steps) == MOST_POINTS


def test_text_of_users_cannot_leave_its_place(write_run: Write, dataflex: Dataflex, tmp_path: Path) -> None:
    folder = write_run("run", metrics_of(2, {"</script><b>x": 0.5, "y": 0.1}), plan=["<img src=x onerror=alert(1)>"])
    out = tmp_path / "page.html"
    assert dataflex("report", f"<i>name</i>={folder}", "-o", str(out)).exit_code == 0
    text = out.read_text()
    assert "<img src=x" not in text and "<i>name" not in text and "</script><b>" not in text
    assert json.loads(in_script({"a": "</script>"})) == {"a": "</script>"}
    assert "</" not in in_script({"a": "</script>"})


def test_a_validation_at_the_end_alone_is_shown_as_no_change(write_run: Write) -> None:
    records = metrics_of(4, validation={"add": 0.5, "sort": 0.3})
    runs = [read_run(write_run(name, of_it)) for name, of_it in (("once", records[1:]), ("twice", records))]
    found = [summarize_run(run) for run in runs]
    assert [summary["validation"] for summary in found] == [[None, pytest.approx(0.4)], pytest.approx([0.2, 0.4])]
    table = figures_table(found)
    assert "<td>0.400</td>" in table and "<td>0.200 → 0.400</td>" in table


def test_json_has_figures_findings_plan_and_versions(full: Path, dataflex: Dataflex, tmp_path: Path) -> None:
    (full / "run.json").write_text(json.dumps({"versions": {"verl": "0.9.1"}}))
    done = dataflex("report", str(full), "--json")
    assert done.exit_code == 0
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["steps"], run["plan"], run["versions"]) == (40, PLAN, {"verl": "0.9.1"})
    assert run["reward"][0] < run["reward"][1] and len(run["validation_by_domain"]) == 8
    assert run["findings"] == []
    assert not Path("report.html").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "there is nothing here"), ("", "the file is empty"), ("hello\n", "no line that verl's file logger writes")],
)
def test_what_is_no_run_is_refused(dataflex: Dataflex, tmp_path: Path, content: str | None, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    done = dataflex("report", str(path), "-o", str(tmp_path / "page.html"))
    assert done.exit_code == 2 and text in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_runs_of_one_name_are_told_apart(write_run: Write, dataflex: Dataflex) -> None:
    folders = [write_run(f"{arm}/seed-0", metrics_of(2)) for arm in ("none", "per")]
    done = dataflex("report", *map(str, folders), "--json")
    assert [run["name"] for run in json.loads(done.stdout)["runs"]] == ["none/seed-0", "per/seed-0"]


def test_without_plotly_the_extra_is_named(full: Path, dataflex: Dataflex, monkeypatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(extra, "import_module", missing)
    done = dataflex("report", str(full), "-o", str(tmp_path / "page.html"))
    assert done.exit_code == 2 and "pip install 'dataflex-verl[analysis]'" in done.stderr
    assert dataflex("report", str(full), "--json").exit_code == 0


def test_two_thousand_steps_of_eight_domains_take_six_megabytes_at_most(tmp_path: Path, dataflex: Dataflex) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in full_run(2000, 8)))
    assert dataflex("report", str(tmp_path), "-o", str(tmp_path / "page.html")).exit_code == 0
    assert (tmp_path / "page.html").stat().st_size <= 6e6
    assert "the mean over 5 steps" in (tmp_path / "page.html").read_text()


def test_colours_are_told_apart_by_every_reader() -> None:
    """Simulated for the three kinds of colour blindness (Machado 2009, severity 1), as distances in Lab."""
    kinds = {
        "normal": np.eye(3),
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }

    def nearest(palette: tuple[str, ...]) -> float:
        rgb = np.array([[int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)] for text in palette])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        smallest = np.inf
        for matrix in kinds.values():
            seen = np.clip(linear @ np.asarray(matrix).T, 0, 1)
            to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
            xyz = seen @ np.array(to_xyz).T / [0.9505, 1.0, 1.089]
            f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
            lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)
            distance = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
            smallest = min(smallest, distance[~np.eye(len(lab), dtype=bool)].min())
        return float(smallest)

    assert nearest(PALETTE) > 9
    assert nearest(("#d62728", "#2ca02c", "#8c564b")) < 9  # red, green and brown of a usual palette


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright import sync_api

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine; the page's HTML and figures are tested without one")
    with sync_api.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_works_offline_in_a_browser(browser: Any, full: Path, tmp_path: Path, dataflex, width: int) -> None:
    out = tmp_path / "page.html"
    assert dataflex("report", f"one={full}", f"two={full}", "-o", str(out)).exit_code == 0
    view = browser.new_page(viewport={"width": width, "height": 900})
    wrong: list[str] = []
    asked: list[str] = []
    view.on("pageerror", lambda error: wrong.append(str(error)))
    view.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    view.on("request", lambda request: asked.append(request.url))
    view.goto(f"file://{out}")
    view.wait_for_selector(".plot .main-svg")
    # Charts far below wait until they are needed; then every one is drawn.
    drawn = "document.querySelectorAll('.plot[data-drawn]').length"
    places = view.evaluate("document.querySelectorAll('.plot').length")
    assert 0 < view.evaluate(drawn) < places == len(charts([read_run(full)] * 2))
    for place in view.query_selector_all(".plot"):
        place.scroll_into_view_if_needed()
        place.wait_for_selector(".main-svg")
    assert view.evaluate(drawn) == places
    # Nothing is wider than the screen, and lines have points.
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    lines = view.evaluate("[...document.querySelectorAll('.scatterlayer .js-line')].map(p => p.getAttribute('d'))")
    # A constant is two points, everything else many.
    assert len(lines) > 2 * places and all(re.fullmatch(r"M[^ML]+L.+", line) for line in lines)
    assert sum(len(line) > 200 for line in lines) > places
    assert (
        view.evaluate("Math.max(...[...document.querySelectorAll('.plot .main-svg')].map(s => s.clientWidth))") <= width
    )
    assert wrong == [] and [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert re.search(r"What to look at", view.inner_text("main"))
    view.close()


def test_packed_numbers_are_single_precision() -> None:
    assert values({"y": packed(np.array([0.1, 2.5]))}) == pytest.approx([0.1, 2.5], rel=1e-6)
