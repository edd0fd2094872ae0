"""What a report of a long run costs: 2,000 steps with 8 domains, beside reading the same lines as JSON.

python -m tests.benchmarks.report
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from dataflex_verl.cli import app
from tests.unit.analysis.synthetic import full_run


def seconds(act: Callable[[], object]) -> dict[str, float]:
    """CPU and wall seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return {"wall": round(time.perf_counter() - wall, 2), "cpu": round(time.process_time() - cpu, 2)}


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
        }
    json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
