"""How long `dataflex --help` and `dataflex check` take, beside `import torch` in the same run: medians of five each.

    python tests/benchmarks/commandline.py

`check` composes verl's configuration and builds the plugins of two presets; `check a plugin of torch` names a component
that needs torch itself. The load of the machine is printed: other work on it makes every figure larger.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 5
BASE = ["trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
PRESETS = [*BASE, "+dataflex=[difffilter,per]"]
OF_TORCH = [*BASE, "+dataflex.plugins.own.plugin=own_plugin:Own"]
PLUGIN = """
import dataflex_hooks as df
import torch.nn.functional


class Own:
    @df.hookimpl
    def post_advantage(self, batch, ctx):
        return df.UpdateDecision(mask=torch.nn.functional.relu(batch.lengths) > 0)
"""


def main() -> None:
    dataflex = [sys.executable, "-c", "from dataflex_verl.cli import main; main()"]
    commands = {
        "python": [sys.executable, "-c", "pass"],
        "import torch": [sys.executable, "-c", "import torch"],
        "dataflex --help": [*dataflex, "--help"],
        "dataflex check": [*dataflex, "check", *PRESETS],
        "dataflex check, a plugin of torch": [*dataflex, "check", *OF_TORCH],
    }
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "own_plugin.py").write_text(PLUGIN)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(ROUNDS + 1):
            for name, command in commands.items():
                started = time.perf_counter()
                subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
                # The first round reads files into memory.
                if number > 0:
                    taken[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    result = {
        "seconds": {name: round(seconds, 2) for name, seconds in medians.items()},
        "check_to_torch": round(medians["dataflex check"] / medians["import torch"], 2),
        "cores": os.cpu_count(),
        "load_before": [round(value, 2) for value in load],
        "load_after": [round(value, 2) for value in os.getloadavg()],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
