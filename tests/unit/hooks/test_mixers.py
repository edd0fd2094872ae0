"""Each mixer against numbers worked out from its formula."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflex_hooks import REGISTRY, ConfigError
from dataflex_hooks.domain_window import DomainHistory, DomainWindow
from dataflex_hooks.mixers.dads import Dads
from dataflex_hooks.mixers.doremi import Doremi
from dataflex_hooks.mixers.dump_ucb import DumpUcb
from dataflex_hooks.mixers.odm import Odm
from dataflex_hooks.mixers.reward_gap import RewardGap
from dataflex_hooks.mixers.schedule import Schedule
from dataflex_hooks.mixers.sec import Sec
from dataflex_hooks.mixers.static import Static
from dataflex_hooks.mixers.tscl import Tscl, slopes

NAMES = ["a", "b"]
ALL = {"static", "reward_gap", "dump_ucb", "tscl", "schedule", "odm", "sec", "dads", "doremi"}


def expected_softmax(values, temperature):
    weights = [math.exp(value / temperature) for value in values]
    return [weight / sum(weights) for weight in weights]


def history(steps, scores, counts):
    return DomainHistory(np.array(steps), np.array(scores, dtype=float), np.array(counts))


def build(name, **params):
    if name == "schedule":
        params = {"phases": {0: {"a": 1, "b": 3}}, **params}
    return REGISTRY.get("mixer", name)(**params)


def test_all_nine_are_registered():
    assert set(REGISTRY.names("mixer")) >= ALL


def test_static_gives_what_it_was_given_from_the_start():
    assert Static(proportions=[0.9, 0.1], domains=NAMES).start(NAMES) == pytest.approx([0.9, 0.1])
    assert Static(proportions={"b": 9, "a": 1}).act({"a": 5.0, "b": 0.0}, None) == pytest.approx([0.1, 0.9])
    assert Static().act({"a": 5.0, "b": 0.0}, None) == [0.5, 0.5]


def test_reward_gap_is_the_softmax_of_the_gap_with_a_floor():
    q = expected_softmax([0.0, 0.6], 0.5)
    shares = RewardGap(temperature=0.5, domains=NAMES).act({"a": 0.8, "b": 0.2}, None)
    assert shares == pytest.approx([0.05 + 0.9 * q[0], 0.05 + 0.9 * q[1]])


def test_reward_gap_gives_a_domain_without_sessions_the_mean_of_the_others():
    mixer = RewardGap(floor=0.0)
    shares = mixer.act({"a": 0.8, "b": 0.0, "c": 0.2}, None, counts={"a": 4, "b": 0, "c": 4})
    assert shares == pytest.approx(expected_softmax([0.0, 0.3, 0.6], 1.0))
    assert mixer.act({"a": 0.0, "b": 0.0}, None, counts={"a": 0, "b": 0}) == [0.5, 0.5]


def test_dump_ucb_adds_a_bonus_for_few_sessions():
    u = [0.3 + math.sqrt(2 * math.log(41) / 31), 0.2 + math.sqrt(2 * math.log(41) / 11)]
    shares = DumpUcb(temperature=0.1).act({"a": 0.3, "b": 0.2}, None, counts={"a": 30, "b": 10})
    assert shares == pytest.approx(expected_softmax(u, 0.1))
    plain = DumpUcb(c=0.0).act({"a": 0.3, "b": 0.2}, None, counts={"a": 30, "b": 10})
    assert plain == pytest.approx(expected_softmax([0.3, 0.2], 1.0))
    assert DumpUcb().window == 50


def test_tscl_takes_the_slope_over_the_window():
    window = history([3, 4, 6], [[0.1, 0.9], [0.2, 0.8], [0.4, 0.6]], [[8, 8], [8, 8], [8, 8]])
    assert slopes(window) == pytest.approx([0.1, -0.1])
    scores = {"a": 0.0, "b": 0.0}
    assert Tscl(temperature=0.05).act(scores, None, history=window) == pytest.approx([0.5, 0.5])
    signed = Tscl(temperature=0.05, signed=True).act(scores, None, history=window)
    assert signed == pytest.approx(expected_softmax([0.1, -0.1], 0.05))


def test_the_slope_is_that_of_all_sessions():
    counts = [[3, 1], [1, 5], [2, 2]]
    scores = [[0.0, 0.5], [1.0, 0.2], [0.3, 0.9]]
    for domain in range(2):
        x = [step for step, n in zip([1, 2, 7], counts, strict=True) for _ in range(n[domain])]
        y = [s[domain] for s, n in zip(scores, counts, strict=True) for _ in range(n[domain])]
        assert slopes(history([1, 2, 7], scores, counts))[domain] == pytest.approx(np.polyfit(x, y, 1)[0])


def test_a_domain_seen_in_one_step_has_slope_zero():
    assert slopes(history([1, 2], [[0.5, 0.0], [0.0, 1.0]], [[4, 0], [0, 4]])).tolist() == [0.0, 0.0]
    assert slopes(history([1, 2], [[0.5, 0.0], [1.0, 1.0]], [[4, 0], [4, 4]])) == pytest.approx([0.5, 0.0])


def test_schedule_is_in_force_for_the_prompts_of_its_first_step():
    mixer = Schedule(phases={0: [1, 1], "3": [1, 3]}, domains=NAMES)
    assert mixer.start(NAMES) == [0.5, 0.5]
    after = [mixer.act({"a": 0, "b": 0}, None, step_id=step) for step in (1, 2, 3)]
    assert after == [[0.5, 0.5], [0.25, 0.75], [0.25, 0.75]]


def test_sec_averages_the_size_of_the_advantage():
    mixer = Sec(alpha=0.5, temperature=0.2)
    first = mixer.act({"a": 0.8, "b": 0.4}, None, history=history([1], [[0.8, 0.4]], [[4, 4]]))
    assert first == pytest.approx(expected_softmax([0.4, 0.2], 0.2))


def test_sec_uses_each_step_once_and_keeps_what_was_not_seen():
    mixer = Sec(alpha=0.5, temperature=0.2, domains=NAMES)
    window = history([1], [[0.8, 0.4]], [[4, 4]])
    first = mixer.act({}, None, history=window)
    assert mixer.act({}, None, history=window) == first
    later = history([1, 2], [[0.8, 0.4], [0.0, 0.9]], [[4, 4], [0, 4]])
    assert mixer.act({}, None, history=later) == pytest.approx(expected_softmax([0.4, 0.55], 0.2))


def test_odm_follows_exp3():
    mixer = Odm(alpha=0.9, domains=NAMES)
    one = mixer.act({}, None, history=history([1], [[1.0, 0.5]], [[4, 4]]))
    estimate = [0.1 * 1.0 / 0.5, 0.1 * 0.5 / 0.5]
    # eps_0 = 1/K; eps_1 = min(1/2, sqrt(ln 2 / 2)) = 1/2: still uniform.
    assert one == [0.5, 0.5]
    two = mixer.act({}, None, history=history([1, 2], [[1.0, 0.5], [0.2, 0.6]], [[4, 4], [4, 4]]))
    estimate = [0.9 * estimate[0] + 0.1 * 0.2 / 0.5, 0.9 * estimate[1] + 0.1 * 0.6 / 0.5]
    eps = math.sqrt(math.log(2) / 4)
    q = expected_softmax([0.5 * value for value in estimate], 1.0)
    assert two == pytest.approx([(1 - 2 * eps) * value + eps for value in q])
    three = mixer.act({}, None, history=history([3], [[0.0, 1.0]], [[0, 4]]))
    estimate = [estimate[0], 0.9 * estimate[1] + 0.1 * 1.0 / two[1]]
    q = expected_softmax([eps * value for value in estimate], 1.0)
    eps = math.sqrt(math.log(2) / 6)
    assert three == pytest.approx([(1 - 2 * eps) * value + eps for value in q])


def test_odm_with_many_domains_stays_a_distribution():
    names = [f"d{index}" for index in range(50)]
    mixer = Odm(domains=names)
    for step in range(1, 200):
        shares = mixer.act(dict.fromkeys(names, 0.5), None, step_id=step)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0.02 - 1e-12


def test_dads_weighs_the_latest_steps_most_and_aims_at_the_target():
    window = history([1, 2, 3], [[0.0, 0.5], [0.3, 0.5], [0.9, 0.5]], [[2, 2], [2, 2], [2, 2]])
    mean = (0.9 + 0.3 / 2 + 0.0 / 3) / (1 + 1 / 2 + 1 / 3)
    q = expected_softmax([1 - mean, 0.5], 0.3)
    shares = Dads(domains=NAMES).act({}, None, history=window)
    assert shares == pytest.approx([0.1 + 0.8 * q[0], 0.1 + 0.8 * q[1]])
    above = Dads(domains=NAMES, target=0.4).act({}, None, history=window)
    assert above == pytest.approx([0.5, 0.5])


def test_dads_with_ewma_starts_at_the_first_mean():
    mixer = Dads(decay="ewma", alpha=0.5, floor=0.0, domains=NAMES)
    assert mixer.act({}, None, history=history([8], [[0.2, 0.6]], [[4, 4]])) == pytest.approx(
        expected_softmax([0.8, 0.4], 0.3)
    )
    later = history([8, 16], [[0.2, 0.6], [0.6, 0.0]], [[4, 4], [4, 0]])
    assert mixer.act({}, None, history=later) == pytest.approx(expected_softmax([0.6, 0.4], 0.3))


def test_doremi_multiplies_weights_by_the_excess():
    mixer = Doremi(eta=2.0, c=0.1, domains=NAMES)
    grown = [0.5 * math.exp(2.0 * 0.2), 0.5 * math.exp(-2.0 * 0.2)]
    first = [0.9 * value / sum(grown) + 0.05 for value in grown]
    assert mixer.act({}, None, history=history([1], [[0.8, 0.4]], [[4, 4]])) == pytest.approx(first)
    grown = [first[0] * math.exp(-10.0), first[1] * math.exp(10.0)]
    second = [0.9 * value / sum(grown) + 0.05 for value in grown]
    assert mixer.act({}, None, history=history([2], [[0.0, 100.0]], [[4, 4]])) == pytest.approx(second)


@settings(max_examples=30, deadline=None)
@given(scores=st.dictionaries(st.sampled_from("abcdef"), st.floats(-1e3, 1e3), min_size=1))
@pytest.mark.parametrize("name", sorted(ALL - {"schedule"}))
def test_any_scores_give_proportions_above_the_floor(name, scores):
    shares = build(name, floor=0.02).act(scores, None, counts=dict.fromkeys(scores, 3), step_id=4)
    assert len(shares) == len(scores)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0.02


def decide(mixer, window, step):
    window.add(step, np.array([step % 3, step % 5 / 2.0]), np.array([4, 2]))
    seen = window.history()
    scores = dict(zip(NAMES, seen.mean().tolist(), strict=True))
    counts = dict(zip(NAMES, seen.total().tolist(), strict=True))
    return mixer.act(scores, None, counts=counts, step_id=step, history=seen)


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_saved_mixer_goes_on_as_the_first(name):
    mixer, window = build(name, domains=NAMES), DomainWindow(NAMES, 5)
    whole = [decide(mixer, window, step) for step in range(1, 9)]
    assert len({tuple(shares) for shares in whole}) > 1 or name in ("static", "schedule")
    mixer, window = build(name, domains=NAMES), DomainWindow(NAMES, 5)
    shares = []
    for step in range(1, 9):
        shares.append(decide(mixer, window, step))
        saved = json.loads(json.dumps(mixer.state_dict())) if hasattr(mixer, "state_dict") else None
        mixer = build(name, domains=NAMES)
        if saved is not None:
            mixer.load_state_dict(saved)
    assert shares == whole


@pytest.mark.parametrize(
    ("name", "params", "wrong"),
    [
        ("static", {"proportions": [0.5], "domains": NAMES}, "proportions: got [0.5]; accepted: 2 shares"),
        ("static", {"proportions": [0.0, 0.0]}, "proportions: got [0.0, 0.0]; accepted: finite numbers >= 0"),
        ("static", {"proportions": [1.5, -0.5]}, "proportions: got [1.5, -0.5]"),
        ("static", {"domains": ["a", "a"]}, "domains: got ['a', 'a']; accepted: each name once"),
        ("reward_gap", {"floor": 0.6, "domains": NAMES}, "floor: got 0.6; accepted: floors of 2 domains"),
        ("reward_gap", {"temperature": 0}, "temperature: got 0; accepted: a finite number > 0"),
        ("reward_gap", {"window": 0}, "window: got 0; accepted: an integer >= 1"),
        ("tscl", {"window": 1}, "window: got 1; accepted: an integer >= 2"),
        ("tscl", {"signed": "yes"}, "signed: got 'yes'; accepted: true or false"),
        ("dump_ucb", {"c": -1}, "c: got -1"),
        ("dads", {"floor": {"a": 2.0}}, "floor.a: got 2.0"),
        ("dads", {"decay": "harmonics"}, "did you mean 'harmonic'?"),
        ("odm", {"alpha": 1.0}, "alpha: got 1.0; accepted: a number >= 0 and < 1"),
        ("sec", {"alpha": 0}, "alpha: got 0"),
        ("doremi", {"c": 1.5}, "c: got 1.5"),
        ("schedule", {"phases": None}, "phases: got None; accepted: a mapping of first steps to shares"),
        ("schedule", {"phases": {"soon": [1, 1]}}, "phases.soon: got 'soon'; accepted: an integer >= 0"),
        ("schedule", {"phases": {5: [1]}, "domains": NAMES}, "phases.5: got [1]; accepted: 2 shares"),
    ],
)
def test_wrong_parameters_are_named(name, params, wrong):
    with pytest.raises(ConfigError) as caught:
        build(name, **params)
    assert wrong in str(caught.value)
    assert len(caught.value.problems) == 1
