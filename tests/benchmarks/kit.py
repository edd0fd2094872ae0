"""What the kit costs: its import beyond torch, and a check of the contract.

    python -m tests.benchmarks.kit

Figures of one machine at one load: compare them with each other. Imports are medians of processes of their own, in CPU
seconds; a check is the median over a few pairs of components.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median

RUNS = 5
IMPORTS = {
    "torch": "import torch",
    "dataflex_hooks": "import dataflex_hooks",
    "dataflex_hooks.testing": "import dataflex_hooks.testing",
}

PAIRS = (
    {"plugin": "select", "scorer": "group_solve_rate", "actuator": "threshold_band"},
    {"plugin": "reweight", "scorer": "advantage_magnitude", "actuator": "per_advantage"},
    {"plugin": "reweight", "scorer": "token_prob", "actuator": "advantage_reweight"},
    {"plugin": "mix", "scorer": "reward_difficulty", "actuator": "tscl"},
)


def cpu_seconds(code: str) -> float:
    program = f"import time\n{code}\nprint(time.process_time())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def imports() -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(RUNS):
        for name, code in IMPORTS.items():
            seconds[name].append(cpu_seconds(code))
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "torch, s": round(medians["torch"], 2),
        "dataflex_hooks beyond torch, s": round(medians["dataflex_hooks"] - medians["torch"], 2),
        "the kit beyond torch, s": round(medians["dataflex_hooks.testing"] - medians["torch"], 2),
        "the kit beyond torch, ratio": round(medians["dataflex_hooks.testing"] / medians["torch"] - 1, 2),
    }


def contract() -> float:
    """CPU seconds of one check."""
    from dataflex_hooks.testing import assert_plugin_contract

    seconds = []
    for settings in PAIRS:
        started = time.process_time()
        assert_plugin_contract(settings)
        seconds.append(time.process_time() - started)
    return round(median(seconds), 2)


if __name__ == "__main__":
    print(json.dumps({**imports(), "a check of the contract, s": contract()}, indent=1))
