"""Presets: found by Hydra with no path flag, brought by other packages too, checked before the job starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from dataflex_verl import hydra_plugin
from dataflex_verl.commands.hydra_config import CommandLine, CompositionError, compose_with_presets
from dataflex_verl.hydra_plugin import PresetCheck
from dataflex_verl.preset_checks import named_presets, preset_problems
from dataflex_verl.presets.providers import BadPreset, all_presets, find_preset

GOOD = ["trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
BOOST = """
    # @package dataflex
    # Responses with more reward count more.
    plugins:
      boost:
        plugin: reweight
        scorer: reward_difficulty
        actuator: softmax
"""
NEVER_IMPORTED = "raise AssertionError('a package with presets must not be imported for them')"


def compose(*overrides: str):
    return compose_with_presets(CommandLine.parse([*GOOD, *overrides]))


@pytest.fixture
def acme(distribution):
    """A package that brings presets, in a folder of a package that cannot be imported."""

    def install(name: str = "acme-presets", package: str = "acme_presets_pkg", **files: str) -> None:
        modules = {f"{package}/__init__.py": NEVER_IMPORTED, f"{package}/inner/__init__.py": NEVER_IMPORTED}
        modules |= {f"{package}/inner/dataflex/{preset}.yaml": text for preset, text in files.items()}
        distribution(name, {}, modules, presets={name: f"{package}.inner"})

    return install


# -------------------------------------------------------------------- composition


def test_presets_stack_in_the_order_named_and_values_can_be_changed():
    low = "++dataflex.plugins.difffilter.actuator.params.low=0.3"
    found = compose("+dataflex=[per,difffilter]", low)
    assert list(found.config.dataflex.plugins) == ["per", "difffilter"]
    assert found.config.dataflex.plugins.difffilter.actuator.params.low == 0.3
    assert found.presets == {"per": ["per"], "difffilter": ["difffilter"]}
    assert "hydra" not in found.config


def test_the_block_is_the_file():
    presets = all_presets()[0]
    stacked = compose(f"+dataflex=[{','.join(preset.name for preset in presets)}]").config.dataflex
    assert stacked == {
        "plugins": {label: plugin for preset in presets for label, plugin in preset.block()["plugins"].items()}
    }
    assert all(set(preset.block()) == {"plugins"} for preset in presets)


def test_every_preset_checks_clean(check_json):
    """Those that select and weigh in one stack; each mixer beside it, since proportions have one owner."""
    blocks = {preset.name: preset.block()["plugins"][preset.name] for preset in all_presets()[0]}
    mixers = [name for name, plugin in blocks.items() if plugin["plugin"] == "mix"]
    others = [name for name in blocks if name not in mixers]
    assert len(mixers) > 1 and len(others) > 1
    assert check_json(*GOOD, f"+dataflex=[{','.join(others)}]")["ok"]
    for name in mixers:
        assert check_json(*GOOD, f"+dataflex={name}")["ok"]


def test_a_plain_block_brings_no_check():
    assert compose("+dataflex={mechanism: select}").presets == {}


def test_stock_main_ppo_composes_presets_and_refuses_before_ray_starts():
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+dataflex=[difffilter,per]"]
    bad = ["++dataflex.plugins.per.actuator.params.alpa=1", "hydra.run.dir=/nonexistent/never-made"]
    done = subprocess.run([*command, *bad], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line[:2] in ("da", "1.", "2.", "3.", "4.")]
    assert lines[0] == "dataflex: 4 problems in the configuration; nothing was started."
    assert "nothing would act on it" in lines[1] and "did you mean 'alpha'?" in lines[4]
    assert "algorithm.adv_estimator=gae does not" in lines[2] and "rollout.n > 1" in lines[3]
    assert "Traceback" not in done.stderr and "ray init" not in done.stdout + done.stderr


def test_a_worker_that_imports_hydra_does_not_pay_for_presets():
    code = (
        "import verl, hydra, sys\n"
        "ours = [name for name in sys.modules if name.startswith(('dataflex_verl.', 'dataflex_hooks'))]\n"
        "assert 'dataflex_verl.hydra_plugin' not in ours and 'dataflex_hooks' not in ours, ours\n"
        "assert 'hydra._internal.core_plugins' not in sys.modules\n"
        "from hydra.core.plugins import Plugins\n"
        "from hydra.plugins.search_path_plugin import SearchPathPlugin\n"
        "found = [cls.__name__ for cls in Plugins.instance().discover(SearchPathPlugin)]\n"
        "assert found == ['PresetSearchPath'], found\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_hydra_that_was_in_use_before_verl_gets_the_presets_at_once(mocker):
    import hydra.core.plugins as module

    from dataflex_verl import autoload

    register = mocker.patch.object(hydra_plugin, "register")
    module.Plugins.instance()
    autoload._install_presets(module)
    register.assert_called_once_with(module.Plugins.instance())


# -------------------------------------------------------------------- presets of other packages


def test_another_packages_preset_works_like_ours_and_nothing_of_it_is_imported(acme, check_json):
    acme(boost=BOOST)
    found = check_json(*GOOD, "+dataflex=[difffilter,boost]", "+dataflex.plugins.boost.normalize=none")
    assert found["plan"]["plugins"][1]["label"] == "boost"
    assert "acme_presets_pkg" not in sys.modules


def test_a_name_that_two_packages_bring_names_both(acme, check_json):
    acme(per=BOOST)
    assert check_json(*GOOD, "+dataflex=difffilter")["ok"]
    (problem,) = check_json(*GOOD, "+dataflex=per")["problems"]
    assert "dataflex-verl and acme-presets 1.2.3 both bring a preset 'per': uninstall one" in problem["text"]
    with pytest.raises(BadPreset):
        find_preset("per")


def test_a_label_that_two_presets_share_is_refused(acme, check_json):
    acme(mine=BOOST.replace("boost:", "per:"))
    (problem,) = check_json(*GOOD, "+dataflex=[per,mine]")["problems"]
    assert problem["text"] == (
        "dataflex.plugins.per: got label 'per' from presets per and mine; accepted: a label that one preset has: "
        "theirs would be merged; drop one of the presets"
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("# @package _global_\nplugins: {}\n", "accepted: '# @package dataflex', or none"),
        ("plugins: [unclosed\n", "preset 'bad' of acme-presets 1.2.3 cannot be read"),
        ("- a\n- b\n", "preset 'bad' of acme-presets 1.2.3 is no mapping of settings"),
    ],
)
def test_a_bad_preset_disturbs_only_those_who_name_it(acme, check_json, text, part):
    acme(bad=text, good=BOOST)
    assert check_json(*GOOD, "+dataflex=good")["ok"]
    (problem,) = check_json(*GOOD, "+dataflex=[good,bad]")["problems"]
    assert part in problem["text"]


def test_a_provider_without_presets_is_listed_as_broken_and_disturbs_nobody(distribution, dataflex, check_json):
    distribution("acme-empty", {}, {"acme_empty_pkg/__init__.py": NEVER_IMPORTED}, presets={"empty": "acme_empty_pkg"})
    distribution("acme-gone", {}, {}, presets={"gone": "acme_gone_pkg.inner"})
    assert check_json(*GOOD, "+dataflex=per")["ok"]
    _, broken = all_presets()
    assert [(provider.name, provider.source) for provider in broken] == [
        ("empty", "acme-empty 1.2.3"),
        ("gone", "acme-gone 1.2.3"),
    ]
    result = dataflex("presets")
    assert result.exit_code == 0
    assert "gone of acme-gone 1.2.3 is broken: there is no folder dataflex in a package acme_gone_pkg.inner" in (
        result.output
    )


# -------------------------------------------------------------------- the list


def test_presets_are_listed_a_line_each(acme, dataflex):
    acme(boost=BOOST)
    lines = dataflex("presets").stdout.splitlines()
    own = [preset.name for preset in all_presets()[0] if preset.name != "boost"]
    assert {"difffilter", "maxvar", "gfpo", "ar", "ar_paper", "diffband", "dapo", "vcrl", "curve"} < set(own)
    rows = {line.split()[0]: line for line in lines[1 : len(own) + 2]}
    assert list(rows) == [*own, "boost"]
    assert "Responses with more reward count more." in rows["boost"] and rows["boost"].endswith("acme-presets 1.2.3")
    listed = json.loads(dataflex("presets", "--json").stdout)
    assert [preset["name"] for preset in listed["presets"]] == list(rows) and listed["broken"] == []
    assert all(preset["description"] for preset in listed["presets"])


# -------------------------------------------------------------------- the check of the callback


def with_hydra(*overrides: str):
    found = compose(*overrides)
    task = {"hydra": {"overrides": {"task": [*overrides]}}}
    return OmegaConf.merge(task, found.config), PresetCheck(found.presets)


def test_the_callback_lets_a_good_configuration_pass():
    config, check = with_hydra("+dataflex=[difffilter,per]")
    assert check.on_run_start(config) is None
    assert check.on_job_start(config, task_function=None) is None


def test_the_callback_leaves_the_process_with_everything_wrong(capsys):
    config, check = with_hydra("+dataflex=[per,per]", "++dataflex.plugins.per.actuator.params.alpha=-1")
    with pytest.raises(SystemExit) as left:
        check.on_run_start(config)
    assert left.value.code == 2
    printed = capsys.readouterr().err
    assert "2 problems" in printed and "preset 'per' twice" in printed and "got -1" in printed


def test_the_callback_checks_each_job_of_a_multirun(mocker):
    examine = mocker.patch("dataflex_verl.commands.checks.examine", return_value=SimpleNamespace(problems=[]))
    config, check = with_hydra("+dataflex=per")
    for _ in range(2):
        check.on_job_start(config, task_function=None)
        check.on_job_end(config, job_return=None)
    assert examine.call_count == 2


def test_names_are_read_from_any_spelling_of_the_override():
    assert named_presets(["+dataflex=[a,b]", "trainer.x=1", "dataflex=c", "+dataflex.plugins.a.x=1"]) == ["a", "b", "c"]
    (problem,) = preset_problems(["+dataflex=[a,a,a]"], {"a": ["a"]})
    assert "preset 'a' 3 times" in str(problem)


def test_hydras_own_refusal_of_an_unknown_preset_lists_them(acme):
    acme(boost=BOOST)
    with pytest.raises(CompositionError, match=r"Could not find 'dataflex/boots'[^$]*boost\n"):
        compose("+dataflex=boots")
