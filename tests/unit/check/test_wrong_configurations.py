"""Wrong configurations: one run of ``dataflex check`` names every fault and nothing else."""

from __future__ import annotations

import pytest
from wrong import CASES, GOOD, Wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_every_fault_is_named_and_nothing_else(case: Wrong, check_json, yaml_file) -> None:
    options = yaml_file(case.yaml) if case.yaml else ()
    found = check_json(*options, *GOOD, *case.overrides)
    texts = [problem["text"] for problem in found["problems"]]
    assert [problem["setting"] for problem in found["problems"]] == [setting for setting, _ in case.problems], texts
    for text, (_, part) in zip(texts, case.problems, strict=True):
        assert part in text
        assert "\n" not in text and "Traceback" not in text and len(text) < 700


@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: case.name.replace(" ", "_"))
def test_people_get_the_same_list_numbered_and_no_traceback(case: Wrong, check_json, dataflex, yaml_file) -> None:
    arguments = (*(yaml_file(case.yaml) if case.yaml else ()), *GOOD, *case.overrides)
    result = dataflex("check", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    texts = [problem["text"] for problem in check_json(*arguments)["problems"]]
    assert result.stderr.splitlines()[1:] == [f"{number}. {text}" for number, text in enumerate(texts, start=1)]


def test_there_are_enough_cases_and_enough_of_several_faults() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(len(case.problems) >= 3 for case in CASES) >= 8
    assert sum(bool(case.yaml) for case in CASES) >= 5
