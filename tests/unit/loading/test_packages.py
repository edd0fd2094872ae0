"""Packages of others, good and broken, under ``dataflex check``, ``dataflex plugins`` and a run's manager."""

from __future__ import annotations

import json
import sys

import pytest

from dataflex_hooks import ConfigError, HookManager

pytestmark = pytest.mark.usefixtures("registry")

GOOD = ["trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
PLUGIN = """
    from dataflex_hooks import Scorer, UpdateDecision, hookimpl, register_scorer

    class Halve:
        @hookimpl
        def post_advantage(self, batch, ctx):
            return UpdateDecision(update_scale=0.5)

    @register_scorer("len")
    class Length(Scorer):
        def score(self, batch, step_id, **ctx):
            return batch.lengths.float()
"""
BROKEN = "def helper():\n    import not_there_at_all\n\nhelper()\n"
PAIR = ["+dataflex.mechanism=select", "+dataflex.actuator.name=threshold_band"]


@pytest.fixture
def rows(dataflex):
    """Rows of ``dataflex plugins --json`` by name."""

    def listed(*arguments):
        result = dataflex("plugins", "--json", *arguments)
        assert result.exit_code == 0, result.output
        return {row["name"]: row for row in json.loads(result.stdout)}

    return listed


def test_a_broken_package_that_is_not_named_never_disturbs(distribution, dataflex, rows):
    distribution("acme-broken", {"broken": "acme_l1:X"}, {"acme_l1": BROKEN})
    assert dataflex("check", *GOOD, "+dataflex=[difffilter,per]").exit_code == 0
    assert "acme_l1" not in sys.modules
    assert rows()["broken"] == {
        "name": "broken",
        "kind": "?",
        "distribution": "acme-broken",
        "version": "1.2.3",
        "hooks": [],
        "active": False,
        "error": "importing acme_l1:X from acme-broken 1.2.3 raised ModuleNotFoundError: No module named "
        "'not_there_at_all'",
    }


def test_one_that_is_named_stops_with_its_own_traceback(distribution, dataflex):
    distribution("acme-broken", {"broken": "acme_l2:X"}, {"acme_l2": BROKEN})
    result = dataflex("check", *GOOD, "+dataflex.plugins.b.plugin=broken")
    assert result.exit_code == 2
    text = result.output
    assert (
        "1. dataflex.plugins.b.plugin: got 'broken'; accepted: a name that can be imported; importing acme_l2:X" in text
    )
    assert 'acme_l2.py", line 4, in <module>' in text and 'acme_l2.py", line 2, in helper' in text
    assert "ModuleNotFoundError: No module named 'not_there_at_all'" in text
    assert "importlib" not in text and "discovery.py" not in text


def test_a_missing_dependency_and_a_syntax_error_are_told_apart(distribution, rows):
    distribution("acme-needs", {"needs": "acme_l3:X"}, {"acme_l3": "import pandas_of_tomorrow\n"})
    distribution("acme-typo", {"typo": "acme_l4:X"}, {"acme_l4": "def f(:\n"})
    listed = rows()
    assert listed["needs"]["error"].endswith("ModuleNotFoundError: No module named 'pandas_of_tomorrow'")
    assert "raised SyntaxError" in listed["typo"]["error"]


def test_a_name_of_two_distributions_is_listed_twice_and_refused_when_named(distribution, dataflex, check_json):
    distribution("acme-one", {"halve": "acme_l5:Halve"}, {"acme_l5": PLUGIN})
    distribution("acme-two", {"halve": "acme_l6:Halve"}, {"acme_l6": PLUGIN}, version="2.0")
    listed = [row for row in json.loads(dataflex("plugins", "--json").stdout) if row["name"] == "halve"]
    assert sorted(row["distribution"] for row in listed) == ["acme-one", "acme-two"]
    assert {row["error"] for row in listed} == {"declared by acme-one 1.2.3 and acme-two 2.0: uninstall one"}
    (problem,) = check_json(*GOOD, "+dataflex.plugins.halve={}")["problems"]
    assert problem["text"].endswith(
        "acme-one 1.2.3 (acme_l5:Halve) and acme-two 2.0 (acme_l6:Halve) both declare it: uninstall one"
    )
    assert check_json(*GOOD, "+dataflex=per")["ok"]


def test_a_plugin_may_have_the_name_of_a_component(distribution, check_json):
    distribution("acme-softmax", {"softmax": "acme_l7:Halve"}, {"acme_l7": PLUGIN})
    found = check_json(*GOOD, "+dataflex=softmax", "+dataflex.plugins.mine.plugin=softmax")
    ours, theirs = found["plan"]["plugins"]
    assert (ours["plugin"], ours["actuator"]) == ("reweight", "softmax")
    assert (theirs["plugin"], theirs["distribution"], theirs["hooks"]) == (
        "softmax",
        "acme-softmax",
        ["post_advantage"],
    )


def test_an_entry_point_unlike_the_registered_name_is_the_name_to_use(distribution, check_json, rows):
    distribution("acme-len", {"acme_length": "acme_l8:Length"}, {"acme_l8": PLUGIN})
    assert check_json(*GOOD, *PAIR, "+dataflex.scorer.name=acme_length")["ok"]
    assert rows()["acme_length"]["kind"] == "scorer"


def test_an_entry_point_to_a_module_without_such_a_component_says_so(distribution, check_json, rows):
    distribution("acme-len", {"acme_length": "acme_l9"}, {"acme_l9": PLUGIN})
    (problem,) = check_json(*GOOD, *PAIR, "+dataflex.scorer.name=acme_length")["problems"]
    assert problem["hint"] == "the module acme_l9 registers no scorer 'acme_length', only len"
    assert rows()["acme_length"]["error"] == "the module acme_l9 registers no component 'acme_length'"


def test_a_misspelled_entry_point_of_a_component_gets_a_hint(distribution, check_json):
    distribution("acme-len", {"acme_length": "acme_l10:Length"}, {"acme_l10": PLUGIN})
    (problem,) = check_json(*GOOD, *PAIR, "+dataflex.scorer.name=acme_lenght")["problems"]
    assert problem["hint"] == "did you mean 'acme_length'?"


@pytest.mark.parametrize(
    ("requirement", "refused"),
    [
        ("dataflex-verl>=99.1", ">=99.1"),
        ("dataflex_verl (>=99.1)", ">=99.1"),
        ("Dataflex-Verl<100,>=99.0; python_version > '3'", ">=99.0"),
        ("dataflex-verl>=0.1", None),
        ("dataflex-verl", None),
        ("dataflex-verl-extras>=99", None),
    ],
)
def test_a_plugin_made_for_a_newer_version_says_what_to_upgrade(distribution, check_json, requirement, refused):
    distribution("acme-new", {"new": "acme_l11:Halve"}, {"acme_l11": PLUGIN}, requires=[requirement])
    found = check_json(*GOOD, "+dataflex.plugins.new={}")
    if refused is None:
        assert found["ok"], found["problems"]
        return
    (problem,) = found["problems"]
    assert problem["hint"] == f"acme-new 1.2.3 needs dataflex-verl {refused}: upgrade with pip install -U dataflex-verl"
    assert "acme_l11" not in sys.modules


def test_the_manager_of_a_run_chains_the_packages_own_exception(distribution):
    distribution("acme-broken", {"broken": "acme_l12:X"}, {"acme_l12": BROKEN})
    with pytest.raises(ConfigError) as caught:
        HookManager.from_config({"plugins": {"broken": {}}}, estimator="grpo", has_groups=True)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_plugins_marks_what_the_configuration_makes_active(rows, dataflex):
    plain = rows()
    assert set(plain) >= {"select", "reweight"} and "softmax" not in plain
    assert not any(row["active"] for row in plain.values())
    listed = rows("--all", *GOOD, "+dataflex=[difffilter,softmax]")
    active = {name for name, row in listed.items() if row["active"]}
    assert active == {"select", "reweight", "group_solve_rate", "threshold_band", "advantage_magnitude", "softmax"}
    assert listed["select"]["hooks"] == ["pre_rollout", "post_reward", "post_advantage"] and listed["select"]["version"]
    assert {row["kind"] for row in listed.values()} >= {"plugin", "scorer", "selector", "reweighter"}
    table = dataflex("plugins", *GOOD, "+dataflex=per").stdout.splitlines()
    assert table[0].split() == ["name", "kind", "from", "hooks", "active", "error"]
    assert any(line.split()[0] == "reweight" and "active" in line for line in table)


def test_plugins_lists_what_the_configuration_names_by_module_and_what_is_not_there(distribution, rows):
    distribution("acme-plain", {}, {"acme_l13": PLUGIN.replace('"len"', '"len_13"')})
    listed = rows(*GOOD, "+dataflex.plugins.a.plugin=acme_l13:Halve", "+dataflex.plugins.b.plugin=nothing_like_it")
    assert (listed["acme_l13:Halve"]["kind"], listed["acme_l13:Halve"]["active"]) == ("plugin", True)
    assert listed["nothing_like_it"]["error"] == "nothing of this name is installed"


def test_plugins_without_a_configuration_says_why(dataflex):
    result = dataflex("plugins", "--config-name=nothing_here", "+dataflex=per")
    assert result.exit_code == 2 and "Cannot find primary config 'nothing_here'" in result.output
