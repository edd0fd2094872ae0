"""Does `import verl` cost more with this package installed? Alternating processes, median of seven each.

python tests/benchmarks/import_verl.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

ROUNDS = 7


def seconds(plugins: str) -> float:
    """Wall time of a process that imports verl, with the given policy for its plugin entry points."""
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    environment["VERL_USE_EXTERNAL_PLUGINS"] = plugins
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import verl"], check=True, env=environment, capture_output=True
    )
    return time.perf_counter() - started


def main() -> None:
    seconds("auto"), seconds("none")
    without, with_us = [], []
    for _ in range(ROUNDS):
        without.append(seconds("none"))
        with_us.append(seconds("auto"))
    result = {
        "without_s": round(statistics.median(without), 3),
        "with_s": round(statistics.median(with_us), 3),
        "ratio": round(statistics.median(with_us) / statistics.median(without), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
