"""Print what the product promises, the test behind each promise, and whether it passed. Fails on a missing one.

Reads ``tests/acceptance.toml``, the JUnit report of the run, and the committed results of the last nightly run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NIGHTLY = ROOT / "tests" / "nightly_results.json"


def outcomes(report: Path) -> dict[str, str]:
    """Outcome by test, as ``tests/path.py::name`` without parameters and group; the worst of a test's cases counts."""
    worst: dict[str, str] = {}
    order = {"passed": 0, "skipped": 1, "failed": 2}
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        name = f"{path}::{bare(case.get('name', ''))}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        if order[outcome] >= order[worst.get(name, "passed")]:
            worst[name] = outcome
    return worst


def bare(name: str) -> str:
    """A test's name without its parameters and the group that xdist ran it in."""
    return name.split("[")[0].split("@")[0]


def nightly_outcomes() -> dict[str, tuple[str, str]]:
    """Outcome of each nightly test when it last ran, the worst of its cases, and the commit at which it did."""
    if not NIGHTLY.exists():
        return {}
    results = json.loads(NIGHTLY.read_text())
    worst: dict[str, tuple[str, str]] = {}
    for test, result in results["tests"].items():
        name = bare(test)
        if worst.get(name, ("", ""))[0] != "failed":
            worst[name] = (result["outcome"], result.get("commit", results["commit"]))
    return {name: (outcome, shown(commit)) for name, (outcome, commit) in worst.items()}


def shown(commit: str) -> str:
    """A commit in short, and whether it is in this history."""
    known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
    return commit[:9] if known.returncode == 0 else f"{commit[:9]} (not in this clone)"


def main() -> int:
    run = outcomes(Path(sys.argv[1]))
    nightly = nightly_outcomes()
    promises = tomllib.loads((ROOT / "tests" / "acceptance.toml").read_text())
    missing = 0
    for area, rows in promises.items():
        print(f"\n{area}")
        for row in rows:
            for test in row["tests"]:
                if run.get(test) == "passed":
                    state = "passed"
                elif test not in run and nightly.get(test, ("", ""))[0] == "passed":
                    state = f"nightly ({nightly[test][1]})"
                else:
                    state = "missing" if test not in run else run[test]
                    missing += 1
                print(f"  {state:<22} {row['case']}\n{'':<25}{test}")
    print(f"\n{missing} promise(s) without a passed test")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
