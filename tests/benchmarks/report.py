"""What a report of a long run costs: 2,000 steps with 8 domains, beside reading the same lines as JSON.

With playwright and a Chromium, also how soon its page is there: text, first charts, a click in a legend, charts below.

python -m tests.benchmarks.report
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from dataflex_verl.cli import app
from tests.unit.analysis.synthetic import full_run


def seconds(act: Callable[[], object]) -> dict[str, float]:
    """CPU and wall seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return {"wall": round(time.perf_counter() - wall, 2), "cpu": round(time.process_time() - cpu, 2)}


def in_browser(page: Path) -> dict[str, Any]:
    """Seconds from opening the page to what a reader waits for, on a wide screen."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        return {"browser": "none here"}
    with sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = chromium.new_page(viewport={"width": 1280, "height": 800})
        started = time.perf_counter()

        def since() -> float:
            return round(time.perf_counter() - started, 2)

        tab.goto(page.as_uri())
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
        tab.wait_for_selector(".plot .main-svg")
        found: dict[str, Any] = {"first_text": round(paint, 2), "first_charts": since()}
        started = time.perf_counter()
        tab.click(".plot .legendtoggle")
        found["click_in_a_legend"] = since()
        started = time.perf_counter()
        tab.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        tab.wait_for_function("[...document.querySelectorAll('.plot')].at(-1).querySelector('.main-svg')")
        found["charts_at_the_end"] = since()
        chromium.close()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, page = folder / "metrics.jsonl", folder / "page.html"
        log.write_text("".join(json.dumps(record) + "\n" for record in full_run(2000, 8)))
        results = {
            "read_lines": seconds(lambda: [json.loads(line) for line in log.read_text().splitlines()]),
            "report": seconds(lambda: CliRunner().invoke(app, ["report", str(folder), "-o", str(page)])),
            "log_megabytes": round(log.stat().st_size / 1e6, 2),
            "page_megabytes": round(page.stat().st_size / 1e6, 2),
            "in_browser": in_browser(page),
        }
    json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
