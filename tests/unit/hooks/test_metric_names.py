"""Names of metrics: what verl makes of them, and that no two of them are the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataflex_hooks.metric_names import (
    FIXED,
    OF_LABEL,
    decode,
    domain_metric,
    encode,
    label_metric,
    label_time,
    plugin_metric,
    reduction,
)

READABLE = {
    "math": "math",
    "openai/gsm8k": "openai:gsm8k",
    "minerva": "mi-nerva",
    "maxwell": "ma-xwell",
    "summary": "su-mmary",
    "total": "tota-l",
    "ma-x": "ma--x",
    "Minimum": "Mi-nimum",
    "lr": "l-r",
    "my_lr": "my_l-r",
    "lrs": "lrs",
    "math-500": "math-500",
    "v1.5": "v1.5",
    "v1.25": "v1.2e25",
    "word problems": "word.20problems",
    "数学": "数学",
    "": ".ff",
}
WORDS = st.lists(
    st.sampled_from(
        ["max", "MIN", "sum", "total", "lr", "_lr", "timing_s/", "ma", "x", "-", "--", "/", ".", "2e", ":", "ff", "a"]
    )
    | st.characters(),
    max_size=8,
).map("".join)
LABELS = st.from_regex(r"[A-Za-z0-9_-]+", fullmatch=True) | st.sampled_from(
    ["max_weight", "min", "sum", "total", "mean", "lr", "timing_s", "prop", "prop_math", "reward", "ma-x"]
)
NAMES = ("kept_frac", "weight_mean", "disabled", "decided_total")


@pytest.mark.parametrize("text", READABLE, ids=repr)
def test_names_stay_readable(text):
    assert encode(text) == READABLE[text]
    assert decode(READABLE[text]) == text


@given(WORDS | st.text(alphabet=st.characters(codec=None), max_size=30))
@example("max.20")
@example(". ")
@example("\ud800")
@example("K" * 3 + "ſum" + "mİn")
def test_a_part_has_no_word_of_verls_and_decodes_to_its_text(text):
    part = encode(text)
    assert re.fullmatch(r"[\w\-.:]+", part)
    assert (
        reduction(part) == "mean" and reduction(f"dataflex/x_{part}") == "mean" and reduction(f"a/{part}/b") == "mean"
    )
    if len(part) <= 100 and ".fe" not in part:
        assert decode(part) == text


@given(st.text(min_size=80, max_size=400), st.text(min_size=80, max_size=400))
def test_long_names_are_cut_and_stay_apart(first, second):
    assert len(encode(first)) <= 100
    assert (encode(first) == encode(second)) == (first == second)


def test_a_cut_name_says_that_it_cannot_be_read_back():
    part = encode("very long " * 40)
    assert part.startswith("very.20long.20very") and len(part) <= 100
    assert encode("very long " * 40 + "!") != part
    with pytest.raises(ValueError, match="beginning of a longer name"):
        decode(part)


@given(st.lists(st.tuples(st.sampled_from(["prop", "reward", "kept", "unscored", "weight"]), WORDS), min_size=2))
@example([("reward", "all"), ("reward", "al-l"), ("kept", "frac"), ("weight", "mean"), ("kept", "tokens_frac")])
def test_two_domain_metrics_never_share_a_name_nor_take_a_fixed_one(pairs):
    names = {domain_metric(kind, domain) for kind, domain in pairs}
    assert len(names) == len(set(pairs))
    assert not names & {f"dataflex/{name}" for name in FIXED}
    assert {reduction(name) for name in names} == {"mean"}


@given(st.lists(st.tuples(LABELS | WORDS, st.sampled_from(NAMES)), min_size=1), st.lists(WORDS, min_size=1))
@example([("prop_openai", "kept_frac")], ["openai/kept_frac"])
def test_label_metrics_meet_neither_each_other_nor_domains(pairs, domains):
    names = {label_metric(label, name) for label, name in pairs}
    assert len(names) == len(set(pairs))
    assert not names & {domain_metric("prop", domain) for domain in domains}
    for label, name in pairs:
        assert reduction(label_metric(label, name)) == ("sum" if name.endswith("_total") else "mean")


@given(st.lists(st.tuples(LABELS, WORDS), min_size=1))
def test_reasons_of_labels_stay_apart_and_are_added_up(pairs):
    names = {label_metric(label, "masked_rows_total", reason) for label, reason in pairs}
    assert len(names) == len(set(pairs))
    assert {reduction(name) for name in names} == {"sum"}


@given(LABELS)
@example("my_lr")
def test_times_are_added_up_whatever_the_label(label):
    assert label_time(label) == f"timing_s/dataflex/{encode(label)}"
    assert reduction(label_time(label)) == "sum"


def test_unsafe_names_would_be_reduced_otherwise():
    raw = {
        "dataflex/prop_minerva": "min",
        "dataflex/prop_summary": "sum",
        "dataflex/prop_lr": "last",
        "dataflex/max_weight/kept_frac": "max",
        "dataflex/timing_s/kept_frac": "sum",
    }
    assert {name: reduction(name) for name in raw} == raw


@pytest.mark.parametrize("kind", ["kept_frac", "max", "total", "Prop", "", "prop/"])
def test_a_kind_that_could_be_misread_is_refused(kind):
    with pytest.raises(ValueError, match="lower-case letters"):
        domain_metric(kind, "math")


@given(LABELS, st.lists(WORDS, min_size=1, unique=True))
@example("p", ["x_total", "x", "total", "_total", "kept_frac/x", "x_tota-l"])
def test_metrics_of_plugins_stay_apart_and_off_the_hosts(label, names):
    names = [name for name in names if name not in OF_LABEL]
    metrics = [plugin_metric(label, name) for name in names]
    assert len(set(metrics)) == len(names)
    assert not set(metrics) & {label_metric(label, name) for name in OF_LABEL}
    for name, metric in zip(names, metrics, strict=True):
        assert reduction(metric) == ("sum" if name.endswith("_total") else "mean")


@pytest.mark.parametrize("name", sorted(OF_LABEL))
def test_a_plugin_cannot_take_a_name_of_the_hosts(name):
    with pytest.raises(ValueError, match=f"'{name}' is logged by the host"):
        plugin_metric("p", name)
