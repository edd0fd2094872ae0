"""The demo against plain `main_ppo` with the same local settings: start-up, the share of a step, memory.

Alternates `dataflex train --local` and `python -m verl.trainer.main_ppo` on the demo's own configuration.

    python tests/benchmarks/demo_run.py [--steps 6] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import psutil

from dataflex_verl.commands.demo_plan import DEFAULT_STRATEGIES, DemoPlan
from dataflex_verl.demo.build import build_demo
from dataflex_verl.local.settings import local_environment

PARTS = ("gen", "old_log_prob", "update_actor", "adv")


def memory_of(mark: str) -> int:
    """Bytes of all processes of a run, a shared page split between those that share it (PSS).

    They are known by a variable of their environment: Ray's workers come from a fork server that is no child of the
    driver.
    """
    total = 0
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values():
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return total


def run(command: list[str], directory: Path) -> dict[str, float]:
    """Run to the end; seconds to the first step's record, median step and its parts, peak memory in GiB."""
    directory.mkdir(parents=True)
    metrics = directory / "metrics.jsonl"
    mark = uuid.uuid4().hex
    environment = {**os.environ, **local_environment(), "VERL_FILE_LOGGER_PATH": str(metrics), "BENCHMARK_RUN": mark}
    started = time.perf_counter()
    with (directory / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=directory, stdout=log, stderr=subprocess.STDOUT)
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(5.0):
            peak[0] = max(peak[0], memory_of(mark))

    watcher = threading.Thread(target=watch)
    watcher.start()
    first = None
    while process.poll() is None:
        if first is None and metrics.exists() and '"timing_s/step"' in metrics.read_text():
            first = time.perf_counter() - started
        time.sleep(0.05)
    done.set()
    watcher.join()
    total = time.perf_counter() - started
    assert process.returncode == 0, (directory / "log.txt").read_text()[-3000:]
    records = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "timing_s/step" in record]
    step = statistics.median(record["timing_s/step"] for record in steps)
    parts = statistics.median(sum(record[f"timing_s/{part}"] for part in PARTS) for record in steps)
    return {
        "first_step_s": round(first or total, 1),
        "step_s": round(step, 3),
        "parts_s": round(parts, 3),
        "step_to_parts": round(step / parts, 3),
        "total_s": round(total, 1),
        "peak_gib": round(peak[0] / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        files = build_demo(Path(work) / "cache", seed=0)
        ours = DemoPlan(files=files, steps=options.steps, seed=0, strategies=DEFAULT_STRATEGIES)
        plain = DemoPlan(files=files, steps=options.steps, seed=0, strategies=())
        no_validation = ["trainer.val_before_train=False", "trainer.test_freq=-1"]
        commands = {
            "plain": [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *plain.all_overrides()],
            "ours": [sys.executable, "-W", "ignore", "-m", "dataflex_verl.cli", "train", "--local", *ours.overrides()],
        }
        results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for number in range(options.rounds):
            for name, command in commands.items():
                results[name].append(run([*command, *no_validation], Path(work) / f"{name}-{number}"))
    medians = {
        name: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for name, runs in results.items()
    }
    ratio = medians["ours"]["first_step_s"] / medians["plain"]["first_step_s"]
    print(json.dumps({**medians, "first_step_ratio": round(ratio, 3)}, indent=2))


if __name__ == "__main__":
    main()
