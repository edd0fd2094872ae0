"""Plugins from entry points of distributions on disk."""

from __future__ import annotations

import importlib
import sys

import pytest

from dataflex_hooks import ConfigError, HookManager
from dataflex_hooks.discovery import distribution_of

PLUGIN = """
    from dataflex_hooks import UpdateDecision, hookimpl

    class Keep:
        def __init__(self, share, seed=0, **kwargs):
            self.share, self.kwargs = share, kwargs
            if not 0 < share <= 1:
                raise ValueError("share has to lie in (0, 1]")

        @hookimpl
        def post_advantage(self, batch, ctx):
            return UpdateDecision(update_scale=self.share)

    class Owner:
        provides = {"rewards"}

        @hookimpl
        def post_reward(self, batch, ctx):
            return None

    def make(share=1.0):
        return Keep(share)

    def make_class():
        return Keep

    instance = Keep(1.0)
"""


def build(plugins, **settings):
    return HookManager.from_config({"plugins": plugins, **settings}, estimator="grpo", has_groups=True)


def test_a_plugin_is_found_by_its_entry_point(distribution, batches, ctx, token_mean):
    distribution("acme-keep", {"keep": "acme_keep_1:Keep"}, {"acme_keep_1": PLUGIN}, version="4.5")
    manager = build({"keep": {"share": 0.5}, "other": {"plugin": "keep", "share": 0.25}})
    assert [(row["label"], row["plugin"], row["distribution"], row["version"]) for row in manager.plan()] == [
        ("keep", "keep", "acme-keep", "4.5"),
        ("other", "keep", "acme-keep", "4.5"),
    ]
    assert manager.post_advantage(batches.groups([1, 0]), ctx, token_mean).update_scale == 0.125


def test_module_and_class_name_a_plugin_without_an_entry_point(distribution):
    distribution("acme-keep", {}, {"acme_keep_2": PLUGIN})
    (row,) = build({"x": {"plugin": "acme_keep_2:Keep", "share": 1}}).plan()
    assert (row["plugin"], row["distribution"], row["version"]) == ("acme_keep_2:Keep", None, None)


def test_a_module_that_is_not_found_says_where_it_has_to_be(problems, tmp_path, monkeypatch):
    def said(name: str) -> str:
        (text,) = problems({"plugins": {"x": {"plugin": name}}})
        return text

    monkeypatch.chdir(tmp_path)
    path = ": its directory must be on PYTHONPATH, also the current one (PYTHONPATH=. dataflex ...)"
    assert said("my_keep_1:Keep") == (
        "dataflex.plugins.x.plugin: got 'my_keep_1:Keep'; accepted: a name that can be imported; importing "
        f"my_keep_1:Keep raised ModuleNotFoundError: No module named 'my_keep_1'{path}"
    )
    (tmp_path / "my_keep_1.py").write_text("import not_there_at_all\n")
    (tmp_path / "my_package_1").mkdir()
    assert said("my_keep_1:Keep").endswith(f"{path}; my_keep_1.py is in the current directory, which is not on it")
    assert said("my_package_1.parts:Keep").endswith(
        f"{path}; my_package_1/ is in the current directory, which is not on it"
    )
    # On the path, and what it imports is not there: another matter.
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said("my_keep_1:Keep").endswith("No module named 'not_there_at_all'")
    assert said("my_package_1.parts:Keep").endswith("No module named 'my_package_1.parts'")


def test_a_factory_function_is_called(distribution):
    distribution("acme-keep", {"keep": "acme_keep_3:make"}, {"acme_keep_3": PLUGIN})
    assert build({"keep": {"share": 0.5}}).labels == ("keep",)


def test_only_what_the_config_names_is_imported(distribution):
    distribution("acme-broken", {"broken": "acme_broken_1:X"}, {"acme_broken_1": "import not_there"})
    distribution("acme-idle", {"idle": "acme_idle:Keep"}, {"acme_idle": PLUGIN})
    build({"select": {"scorer": "reward_difficulty", "actuator": "threshold_band"}})
    assert "acme_broken_1" not in sys.modules and "acme_idle" not in sys.modules


def test_an_import_error_names_the_distribution_and_is_chained(distribution):
    distribution("acme-broken", {"broken": "acme_broken_2:X"}, {"acme_broken_2": "import not_there"}, version="0.9")
    with pytest.raises(ConfigError) as caught:
        build({"b": {"plugin": "broken"}})
    assert str(caught.value) == (
        "dataflex.plugins.b.plugin: got 'broken'; accepted: a name that can be imported; importing acme_broken_2:X "
        "from acme-broken 0.9 raised ModuleNotFoundError: No module named 'not_there'"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_missing_attribute_names_the_distribution(distribution):
    distribution("acme-keep", {"keep": "acme_keep_4:Kept"}, {"acme_keep_4": PLUGIN})
    with pytest.raises(ConfigError, match=r"acme_keep_4:Kept from acme-keep 1\.2\.3 raised AttributeError"):
        build({"keep": {"share": 1}})


def test_a_name_declared_twice_names_both_distributions(distribution):
    distribution("acme-one", {"keep": "acme_one:Keep"}, {"acme_one": PLUGIN})
    distribution("acme-two", {"keep": "acme_two:Keep"}, {"acme_two": PLUGIN}, version="2.0")
    expected = r"acme-one 1\.2\.3 \(acme_one:Keep\) and acme-two 2\.0 \(acme_two:Keep\) both declare it: uninstall one"
    with pytest.raises(ConfigError, match=expected):
        build({"keep": {"share": 1}})


def test_an_unknown_name_gets_the_nearest_and_the_list(distribution, problems):
    distribution("acme-keep", {"keep_share": "acme_keep_5:Keep"}, {"acme_keep_5": PLUGIN})
    (first, second) = problems({"plugins": {"x": {"plugin": "keep_shares", "shar": 1, "share": 1}}})
    assert "one of keep_share, " in first and first.endswith("did you mean 'keep_share'?")
    assert second == "dataflex.plugins.x.shar: got 1; accepted: one of seed, share; did you mean 'share'?"


def test_a_component_named_as_plugin_says_what_it_is(problems):
    (text,) = problems({"plugins": {"softmax": {}}})
    assert text.endswith("'softmax' is a reweighter: name it as actuator of mechanism 'reweight'")
    (text,) = problems({"mechanism": "token_prob"})
    assert text.endswith("'token_prob' is a scorer: name it as scorer")


def test_an_entry_point_has_to_be_a_class(distribution, problems):
    points = {"inst": "acme_keep_6:instance", "mod": "acme_keep_6", "cls": "acme_keep_6:make_class"}
    distribution("acme-keep", points, {"acme_keep_6": PLUGIN})
    instance, module, returned = problems({"plugins": {"inst": {}, "mod": {}, "cls": {}}})
    assert instance == (
        "dataflex.plugins.inst.plugin: got an object of acme_keep_6.Keep; accepted: a plugin class, or a function that "
        "returns a plugin; point the entry point at the class: acme_keep_6:Keep"
    )
    assert module.endswith("name the class in it: acme_keep_6:ClassName")
    assert returned.endswith("accepted: an instance of a plugin class; register an instance: Keep()")


def test_keywords_of_a_third_party_constructor_are_checked(distribution, problems):
    distribution("acme-keep", {"keep": "acme_keep_7:Keep"}, {"acme_keep_7": PLUGIN})
    texts = problems(
        {
            "plugins": {
                "a": {"plugin": "keep", "sed": 1},
                "b": {"plugin": "keep", "share": 3},
                "keep": {"share": 1, "k": 2},
            }
        }
    )
    assert texts == [
        "dataflex.plugins.a.sed: got 1; accepted: one of seed, share; did you mean 'seed'?",
        "dataflex.plugins.a.share: got nothing; accepted: a value: it has no default",
        "dataflex.plugins.b: got {'share': 3}; accepted: values that the constructor takes; "
        "Keep raised ValueError: share has to lie in (0, 1] (raised in acme_keep_7, from acme-keep 1.2.3)",
        "dataflex.plugins.keep.k: got 2; accepted: one of seed, share",
    ]


def test_two_owners_are_named_with_their_distributions(distribution, problems):
    distribution("acme-a", {"a": "acme_owner_a:Owner"}, {"acme_owner_a": PLUGIN})
    distribution("acme-b", {"b": "acme_owner_b:Owner"}, {"acme_owner_b": PLUGIN}, version="2")
    (text,) = problems({"plugins": {"a": {}, "b": {}}})
    assert "got rewards from 'b' (acme-b 2) and 'a' (acme-a 1.2.3)" in text


def test_a_builtin_type_is_refused_like_any_other_class_without_hooks(problems):
    (text,) = problems({"plugins": {"x": {"plugin": "builtins:dict"}}})
    assert "accepted: a plugin" in text


def test_a_module_belongs_to_a_package_with_more_in_common_than_a_shared_namespace(tmp_path, monkeypatch, distribution):
    distribution("acme-plugins", {"keep": "acme_space.plugins:Keep"}, {})
    for package in ("plugins", "research"):
        (tmp_path / "acme_space" / package).mkdir(parents=True)
        (tmp_path / "acme_space" / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("acme_space.plugins", "acme_space.research"):
        importlib.import_module(name)
    assert distribution_of("acme_space.plugins.parts") == ("acme-plugins", "1.2.3")
    assert distribution_of("acme_space.research") == (None, None)
    # In a package of its own, all of it is the distribution's.
    distribution("acme-whole", {"whole": "acme_whole.plugin:Keep"}, {})
    (tmp_path / "acme_whole").mkdir()
    (tmp_path / "acme_whole" / "__init__.py").write_text("")
    importlib.import_module("acme_whole")
    assert distribution_of("acme_whole.scorers") == ("acme-whole", "1.2.3")
    for name in ("acme_space.plugins", "acme_space.research", "acme_space", "acme_whole"):
        del sys.modules[name]
