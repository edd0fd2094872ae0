"""Components by name: decorators, lookups, mistakes."""

from __future__ import annotations

import pytest

from dataflex_hooks import ConfigError, Mixer, Scorer, Selector, register_mixer, register_scorer, register_selector


def test_built_in_components_are_there_under_their_file_names(registry):
    published = {"advantage_magnitude", "group_solve_rate", "reward_difficulty", "token_prob"}
    assert published < set(registry.names("scorer"))
    assert {"threshold_band", "topk_fraction", "gfpo", "max_variance"} < set(registry.names("selector"))
    assert {"advantage_reweight", "per_advantage", "softmax", "difficulty_band"} < set(registry.names("reweighter"))
    for kind in ("scorer", "selector", "reweighter"):
        for name in registry.names(kind):
            assert registry.get(kind, name).__module__ == f"dataflex_hooks.{kind}s.{name}"


def test_a_mixer_can_be_registered(registry):
    @register_mixer("uniform")
    class Uniform(Mixer):
        def act(self, scores, batch, *, counts=None, **ctx):
            return [1 / len(scores)] * len(scores)

    assert registry.get("mixer", "uniform") is Uniform


def test_a_taken_name_is_refused_with_both_classes(registry):
    class Other(Selector):
        def act(self, scores, batch, **ctx):
            return scores

    taken = (
        r"selector 'threshold_band' is already dataflex_hooks\.selectors\.threshold_band\.ThresholdBand; .*Other needs"
    )
    with pytest.raises(ValueError, match=taken):
        register_selector("threshold_band")(Other)


def test_a_reloaded_class_replaces_itself(registry):
    def define():
        @register_scorer("mine")
        class Mine(Scorer):
            def score(self, batch, step_id, **ctx):
                return batch.rewards

        return Mine

    define()
    assert define() is registry.get("scorer", "mine")


def test_only_classes_of_the_kind_can_be_registered(registry):
    with pytest.raises(
        TypeError, match=r"@register_scorer\('x'\) needs a class derived from Scorer, got <class 'int'>"
    ):
        register_scorer("x")(int)
    with pytest.raises(TypeError, match="needs a class derived from Selector"):
        register_selector("x")(lambda: None)


def test_an_unknown_name_lists_what_there_is_and_the_nearest(registry):
    with pytest.raises(
        ConfigError, match=r"one of advantage_magnitude, .*token_prob, .*; or module:Class; did you mean 'token_prob'\?"
    ):
        registry.get("scorer", "token_probs")


def test_a_component_of_another_kind_says_where_it_belongs(registry):
    with pytest.raises(ConfigError, match="'softmax' is a reweighter: it belongs to mechanism 'reweight'"):
        registry.get("selector", "softmax")
    with pytest.raises(ConfigError, match="'threshold_band' is a selector: it belongs to mechanism 'select'"):
        registry.get("reweighter", "threshold_band")
    with pytest.raises(ConfigError, match="'token_prob' is a scorer$"):
        registry.get("reweighter", "token_prob")


SCORER = """
    from dataflex_hooks import Scorer, register_scorer

    {decorator}
    class Length(Scorer):
        def score(self, batch, step_id, **ctx):
            return batch.lengths.float()
"""


def test_an_entry_point_names_a_registered_component(registry, distribution):
    source = SCORER.format(decorator='@register_scorer("len")')
    distribution("acme-scorers", {"len": "acme_scorers_a"}, {"acme_scorers_a": source})
    assert registry.get("scorer", "len").__name__ == "Length"


def test_an_entry_point_may_point_at_the_class(registry, distribution):
    distribution("acme-scorers", {"len": "acme_scorers_b:Length"}, {"acme_scorers_b": SCORER.format(decorator="")})
    assert registry.get("scorer", "len").__name__ == "Length"
    assert registry.get("scorer", "acme_scorers_b:Length").__name__ == "Length"
    with pytest.raises(ConfigError, match="the name of a selector.*'len' is the class acme_scorers_b.Length"):
        registry.get("selector", "len")


def test_a_broken_module_is_named_with_its_distribution(registry, distribution):
    distribution("acme-broken", {"len": "acme_broken:Length"}, {"acme_broken": "import not_there_at_all"})
    with pytest.raises(
        ConfigError, match=r"acme_broken:Length from acme-broken 1\.2\.3 raised ModuleNotFoundError"
    ) as e:
        registry.get("scorer", "len")
    assert isinstance(e.value.__cause__, ModuleNotFoundError)
    with pytest.raises(ConfigError, match="importing nowhere:X raised ModuleNotFoundError"):
        registry.get("scorer", "nowhere:X")
