"""The dataflex block: both forms, every mistake with its full path, several at once."""

from __future__ import annotations

import math
import pickle

import pytest
from omegaconf import OmegaConf

from dataflex_hooks import ConfigError, HookManager, Problem, Scorer, parse, register_scorer

SELECT = {"scorer": "group_solve_rate", "actuator": "threshold_band"}


def test_no_block_means_no_plugins():
    for block in (None, {}, OmegaConf.create({}), {"apply": True}, {"plugins": None}):
        config = parse(block)
        assert config.plugins == ()
        assert (config.apply, config.apply_to, config.mask_scale, config.update_step) == (True, "weights", "none", 1)
    manager = HookManager.from_config(None, estimator="gae", has_groups=None)
    assert manager.labels == () and not manager.active("post_advantage", 0)


def test_the_published_short_form_works_verbatim():
    block = OmegaConf.from_dotlist(
        [
            "mechanism=select",
            "scorer.name=group_solve_rate",
            "scorer.params.success_threshold=0.5",
            "actuator.name=threshold_band",
            "actuator.params.low=0.2",
            "actuator.params.high=0.8",
            "warmup_step=2",
        ]
    )
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    (row,) = manager.plan()
    assert row.pop("version")
    components = row.pop("components")
    assert components["scorer"]["params"] == {"success_threshold": 0.5, "signal": "reward"}
    assert components["actuator"]["params"] == {"low": 0.2, "high": 0.8}
    assert row == {
        "label": "select",
        "path": "dataflex",
        "plugin": "select",
        "effect": "mask",
        "advantages": None,
        "distribution": "dataflex-verl",
        "hooks": ["post_advantage"],
        "scorer": "group_solve_rate",
        "actuator": "threshold_band",
        "warmup_step": 2,
        "on_error": "raise",
        "slow_plugin_seconds": 30.0,
        "provides": ["mask"],
        "declares": True,
        "per_token": False,
        "normalize": None,
        "keywords": {
            "scorer": {"name": "group_solve_rate", "params": {"success_threshold": 0.5}},
            "actuator": {"name": "threshold_band", "params": {"low": 0.2, "high": 0.8}},
        },
        "params": {"effect": "mask"},
    }
    assert not manager.active("post_advantage", 1) and manager.active("post_advantage", 2)


def test_the_full_form_keeps_the_order_of_labels():
    block = {
        "warmup_step": 4,
        "apply": False,
        "mask_scale": "kept",
        "apply_to": "advantages",
        "update_step": 5,
        "plugins": {
            "focus": {"plugin": "select", "warmup_step": 1, **SELECT},
            "select": {"on_error": "disable", **SELECT},
        },
    }
    config = parse(block)
    assert [(p.label, p.plugin, p.warmup_step, p.on_error) for p in config.plugins] == [
        ("focus", "select", 1, "raise"),
        ("select", "select", 4, "disable"),
    ]
    assert (config.apply, config.mask_scale, config.apply_to, config.update_step) == (False, "kept", "advantages", 5)
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    assert manager.labels == ("focus", "select") and manager.config == config


def test_shared_settings_reach_the_plugins_that_take_them(registry):
    reweight = {"scorer": "token_prob", "actuator": "softmax"}
    block = {"normalize": "none", "domains": ["a"], "window": 3, "domain_key": "d", "plugins": {"reweight": reweight}}
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    assert manager._entries["reweight"].plugin.normalize == "none"
    block["plugins"]["reweight"] = {**reweight, "normalize": "mean"}
    manager = HookManager.from_config(block, estimator="grpo", has_groups=True)
    assert manager._entries["reweight"].plugin.normalize == "mean"


def test_normalize_that_nobody_takes_is_refused(problems):
    (text,) = problems({"normalize": "none", "mechanism": "select", **SELECT})
    assert text == "dataflex.normalize: got 'none'; accepted: nothing here: no configured plugin takes it"


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ([], "dataflex: got []; accepted: a mapping with keys out of mechanism, "),
        ({"aply": True}, "dataflex.aply: got True; accepted: one of actuator, apply, "),
        (
            {"mechanism": "selct", **SELECT},
            "dataflex.mechanism: got 'selct'; accepted: the name of an installed plugin, ",
        ),
        (SELECT, "dataflex.mechanism: got nothing; accepted: the name of an installed plugin"),
        ({"mechanism": ["select"]}, "dataflex.mechanism: got ['select']; accepted: the name of an installed plugin"),
        (
            {"plugins": {"x": {"plugin": "a:b:c"}}},
            "dataflex.plugins.x.plugin: got 'a:b:c'; accepted: the name of an inst",
        ),
        ({"mechanism": 3}, "dataflex.mechanism: got 3; accepted: the name of an installed plugin"),
        ({"mechanism": "budget"}, "dataflex.mechanism: got 'budget'; accepted: the name of an installed plugin"),
        (
            {"plugins": {"x": {"plugin": "curriculum"}}},
            "dataflex.plugins.x.plugin: got 'curriculum'; accepted: the name",
        ),
        ({"plugins": ["select"]}, "dataflex.plugins: got ['select']; accepted: a mapping of labels to plugin settings"),
        ({"plugins": {"a/b": {}}}, "dataflex.plugins.a/b: got 'a/b'; accepted: a label of letters, digits, _ and -"),
        (
            {"plugins": {"select": None}},
            "dataflex.plugins.select: got None; accepted: a mapping of settings, {} for all",
        ),
        ({"warmup_step": -1}, "dataflex.warmup_step: got -1; accepted: an integer >= 0"),
        ({"warmup_step": True}, "dataflex.warmup_step: got True; accepted: an integer >= 0"),
        ({"update_step": 0}, "dataflex.update_step: got 0; accepted: an integer >= 1"),
        ({"window": 0}, "dataflex.window: got 0; accepted: an integer >= 1"),
        ({"domains": "math"}, "dataflex.domains: got 'math'; accepted: a list of domain names"),
        ({"domain_key": 1}, "dataflex.domain_key: got 1; accepted: the name of a dataset column"),
        ({"apply": "no"}, "dataflex.apply: got 'no'; accepted: true or false"),
        (
            {"apply_to": "weigths"},
            "dataflex.apply_to: got 'weigths'; accepted: one of advantages, weights; did you mean 'we",
        ),
        ({"mask_scale": "keep"}, "dataflex.mask_scale: got 'keep'; accepted: one of kept, none; did you mean 'kept'?"),
        ({"on_starved": "stop"}, "dataflex.on_starved: got 'stop'; accepted: one of error, take"),
        (
            {"plugins": {"s": {"plugin": "select", "warmup_step": "1", **SELECT}}},
            "dataflex.plugins.s.warmup_step: got '1'; accepted: an integer >= 0",
        ),
        (
            {"plugins": {"s": {"plugin": "select", "on_error": "disabel", **SELECT}}},
            "dataflex.plugins.s.on_error: got 'disabel'; accepted: one of disable, raise; did you mean 'disable'?",
        ),
        (
            {"mechanism": "select", **SELECT, "plugins": {}},
            "dataflex: got dataflex.plugins together with dataflex.mechanism, dataflex.scorer, dataflex.actuator; acc",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_accepted(problems, block, expected):
    (text,) = problems(block)
    assert text.startswith(expected)


@pytest.mark.parametrize(
    ("scorer", "actuator", "expected"),
    [
        (None, "threshold_band", "scorer: got nothing; accepted: the name of a scorer, one of advantage_magnitude, "),
        ({"params": {}}, "threshold_band", "scorer.name: got nothing; accepted: the name of a scorer, one of adv"),
        (5, "threshold_band", "scorer: got 5; accepted: the name of a scorer, one of adv"),
        (
            "group_solve_rat",
            "threshold_band",
            "scorer.name: got 'group_solve_rat'; accepted: the name of a scorer, one",
        ),
        ("softmax", "threshold_band", "scorer.name: got 'softmax'; accepted: the name of a scorer"),
        ("token_prob", "softmax", "actuator.name: got 'softmax'; accepted: the name of a selector"),
        (
            {"name": "token_prob", "parms": {}},
            "threshold_band",
            "scorer.parms: got {}; accepted: one of name, params; did",
        ),
        (
            {"name": "token_prob", "alpha": 1},
            "threshold_band",
            "scorer.alpha: got 1; accepted: one of name, params; para",
        ),
        (
            {"name": "token_prob", "params": 1},
            "threshold_band",
            "scorer.params: got 1; accepted: a mapping of parameter",
        ),
        ({"name": "token_prob", "params": {"x": 1}}, "threshold_band", "scorer.params.x: got 1; accepted: nothing"),
        (
            {"name": "group_solve_rate", "params": {"sucess_threshold": 1}},
            "threshold_band",
            "scorer.params.sucess_threshold: got 1; accepted: one of signal, success_threshold; did you mean 'success",
        ),
        (
            {"name": "group_solve_rate", "params": {"success_threshold": "half"}},
            "threshold_band",
            "scorer.params.success_threshold: got 'half'; accepted: a finite number",
        ),
        (
            {"name": "advantage_magnitude", "params": {"agg": "men"}},
            "threshold_band",
            "scorer.params.agg: got 'men'; accepted: one of max, mean, sum; did you mean 'mean'?",
        ),
        (
            "token_prob",
            {"name": "threshold_band", "params": {"low": 0.8, "high": 0.2}},
            "actuator.params.low: got 0.8; accepted: a number below high, which is 0.2",
        ),
        (
            "token_prob",
            {"name": "threshold_band", "params": {"low": math.nan}},
            "actuator.params.low: got nan; accepted: a number",
        ),
        (
            "token_prob",
            {"name": "topk_fraction", "params": {"fraction": 0}},
            "actuator.params.fraction: got 0; accepted: a finite number > 0 and <= 1",
        ),
        (
            "token_prob",
            {"name": "topk_fraction", "params": {"largest": 1}},
            "actuator.params.largest: got 1; accepted: true or false",
        ),
        (
            "token_prob",
            {"name": "topk_fraction", "params": {"scorer": 1}},
            "actuator.params.scorer: got 1; accepted: one of fraction, largest",
        ),
    ],
)
def test_a_wrong_component_setting_is_named_with_its_full_path(problems, scorer, actuator, expected):
    keywords = {"actuator": actuator} if scorer is None else {"scorer": scorer, "actuator": actuator}
    (text,) = problems({"plugins": {"focus": {"plugin": "select", **keywords}}})
    assert text.startswith(f"dataflex.plugins.focus.{expected}")
    (text,) = problems({"mechanism": "select", **keywords})
    assert text.startswith(f"dataflex.{expected}")


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("softmax", {"temperature": 0}, "temperature: got 0; accepted: a finite number > 0"),
        ("softmax", {"temperature": math.inf}, "temperature: got inf; accepted: a finite number > 0"),
        ("per_advantage", {"alpha": -1}, "alpha: got -1; accepted: a finite number >= 0"),
        ("per_advantage", {"epsilon": -1}, "epsilon: got -1; accepted: a finite number >= 0"),
        ("advantage_reweight", {"alpha": 1.5}, "alpha: got 1.5; accepted: a finite number >= 0 and <= 1"),
    ],
)
def test_reweighter_ranges(problems, name, params, expected):
    (text,) = problems({"mechanism": "reweight", "scorer": "token_prob", "actuator": {"name": name, "params": params}})
    assert text == f"dataflex.actuator.params.{expected}"


def test_everything_wrong_is_reported_at_once():
    block = {
        "aply": True,
        "warmup_step": -1,
        "plugins": {
            "focus": {
                "plugin": "select",
                "scorer": {"name": "group_solve_rate", "params": {"treshold": 1, "success_threshold": "x"}},
                "actuator": {"name": "topk_fraction", "params": {"fraction": 2, "largest": "no"}},
            },
            "per": {"plugin": "reweight", "normalize": "maen", "scorer": "tokn_prob", "actuator": "threshold_band"},
            "boost": {"plugin": "reweigth", "scorer": "tokn_prob", "actuator": "softmax"},
            "later": {"plugin": "curriculum"},
        },
    }
    with pytest.raises(ConfigError) as caught:
        HookManager.from_config(block, estimator="grpo", has_groups=True)
    assert [problem.setting for problem in caught.value.problems] == [
        "dataflex.aply",
        "dataflex.warmup_step",
        "dataflex.plugins.later.plugin",
        "dataflex.plugins.focus.scorer.params.treshold",
        "dataflex.plugins.focus.scorer.params.success_threshold",
        "dataflex.plugins.focus.actuator.params.fraction",
        "dataflex.plugins.focus.actuator.params.largest",
        "dataflex.plugins.per.scorer.name",
        "dataflex.plugins.per.actuator.name",
        "dataflex.plugins.per.normalize",
        "dataflex.plugins.boost.plugin",
        "dataflex.plugins.boost.scorer.name",
    ]
    lines = str(caught.value).splitlines()
    assert lines[0] == "12 problems in the dataflex configuration:"
    assert [line.split(".")[0] for line in lines[1:]] == [str(n) for n in range(1, 13)]


@pytest.mark.parametrize(
    ("estimator", "has_groups", "refused"),
    [
        ("grpo", None, False),
        ("rloo", None, False),
        ("gae", None, True),
        ("remax", None, True),
        ("reinforce_plus_plus", None, True),
        ("reinforce_plus_plus_baseline", None, False),
        ("gae", True, True),
        ("grpo", True, False),
        ("grpo", False, True),
    ],
)
def test_a_group_scorer_needs_groups(problems, estimator, has_groups, refused):
    block = {"mechanism": "select", **SELECT}
    if not refused:
        HookManager.from_config(block, estimator=estimator, has_groups=has_groups)
        return
    (text,) = problems(block, estimator=estimator, has_groups=has_groups)
    assert text.startswith("dataflex.scorer.name: got 'group_solve_rate'; accepted: a scorer that needs no groups; ")
    assert ("rollout.n > 1" if has_groups is False else f"algorithm.adv_estimator={estimator}") in text


def test_interpolation_and_missing_values_are_reported(problems):
    root = OmegaConf.create(
        {"dataflex": {"mechanism": "select", "scorer": {"name": "???"}, "actuator": "threshold_band"}}
    )
    assert problems(root.dataflex)[0].startswith("dataflex.scorer.name: got Missing mandatory value")
    assert problems(OmegaConf.create({"mechanism": "${nowhere}"}))[0].startswith(
        "dataflex.mechanism: got Interpolation"
    )
    assert (
        parse(OmegaConf.create({"a": {"plugins": {"x": {"plugin": "${b}"}}}, "b": "select"}).a).plugins[0].plugin
        == "select"
    )


def test_open_params_admits_other_names(registry):
    @register_scorer("open")
    class Open(Scorer):
        open_params = True

        def __init__(self, **kwargs):
            self.kwargs = kwargs

        def score(self, batch, step_id, **ctx):
            return batch.rewards

    block = {"mechanism": "select", "scorer": {"name": "open", "params": {"anything": 1}}, "actuator": "threshold_band"}
    manager = HookManager.from_config(block, estimator="gae", has_groups=None)
    assert manager._entries["select"].plugin.scorer.kwargs == {"anything": 1, "domains": None, "window": None}


def test_constructor_failures_of_components_are_chained(problems, registry):
    @register_scorer("fails")
    class Fails(Scorer):
        def __init__(self, path, retries=1):
            raise OSError(f"cannot read {path}")

        def score(self, batch, step_id, **ctx):
            return batch.rewards

    block = {"mechanism": "select", "scorer": {"name": "fails", "params": {"path": "p"}}, "actuator": "threshold_band"}
    with pytest.raises(
        ConfigError, match=r"dataflex.scorer.params: got {'path': 'p'}.*raised OSError: cannot read p"
    ) as e:
        HookManager.from_config(block, estimator="gae", has_groups=None)
    assert isinstance(e.value.__cause__, OSError)
    (text,) = problems({**block, "scorer": "fails"})
    assert text == "dataflex.scorer.params.path: got nothing; accepted: a value: it has no default"


def test_an_unfinished_component_says_what_it_lacks(problems, registry):
    @register_scorer("unfinished")
    class Unfinished(Scorer):
        pass

    (text,) = problems({"mechanism": "select", "scorer": "unfinished", "actuator": "threshold_band"})
    assert text == "dataflex.scorer.name: got unfinished; accepted: a complete scorer; it does not define score"


def test_config_errors_survive_a_process_boundary():
    error = ConfigError([Problem("a.b", 1, "two", "hint", cause=OSError("x")), Problem("c", 2, "three")])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.problems == error.problems


def test_long_values_are_shortened():
    text = str(Problem("x", "y" * 500, "less"))
    assert len(text) < 220 and "yyy...; accepted: less" in text
