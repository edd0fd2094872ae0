"""State of plugins: which values can be stored and come back as they were, and whose state goes to whom."""

from __future__ import annotations

import json
import math
from collections import Counter as Counting
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflex_hooks import ConfigError, HookManager, PluginError, hookimpl
from dataflex_hooks.plugins.select import SelectPlugin
from dataflex_hooks.state_values import Packed, StateValueError, pack, unpack

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.tuples(st.text(), st.integers()) | st.just("$")
trees = st.recursive(
    scalars, lambda below: st.lists(below) | st.tuples(below, below) | st.dictionaries(keys, below), max_leaves=20
)


def through_json(value):
    packed = pack(value)
    return unpack(Packed(json.loads(json.dumps(packed.tree, allow_nan=False)), packed.tensors))


@settings(max_examples=300, deadline=None)
@given(trees)
def test_nested_values_come_back_equal_and_of_the_same_type(value):
    back = through_json(value)
    assert repr(back) == repr(value)


def test_floats_integers_and_special_values_are_exact():
    generator = np.random.default_rng(7)
    state = {
        "third": 1 / 3,
        "tiny": 5e-324,
        "minus zero": -0.0,
        "huge": 2**127 + 1,
        "inf": [math.inf, -math.inf],
        "rng": generator.bit_generator.state,
    }
    back = through_json(state)
    assert back == state and math.copysign(1, back["minus zero"]) == -1
    assert math.isnan(through_json(math.nan))
    again = np.random.default_rng(0)
    again.bit_generator.state = back["rng"]
    assert again.random(5).tolist() == generator.random(5).tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1],
        np.array([1.5, np.nan, -np.inf]),
        np.array(3.5, dtype=np.float32),
        np.zeros((0, 4), dtype=np.uint16),
        np.array([[True], [False]]),
        np.array([["math", "code"], ["é", ""]]),
        np.float32(0.1),
        np.int64(-5),
        np.bool_(True),
    ],
    ids=repr,
)
def test_numpy_comes_back_with_its_type_shape_and_bits(array):
    back = through_json({"a": array})["a"]
    assert type(back) is type(array) and back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.uint32])
def test_tensors_come_back_with_their_bits_in_memory_of_their_own(dtype):
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype).T
    packed = pack([tensor, tensor])
    back = unpack(packed)
    assert all(one.dtype == dtype and torch.equal(one, tensor) for one in back)
    assert len({one.data_ptr() for one in (tensor, *back, *packed.tensors.values())}) == 5


def test_a_state_is_stored_as_it_was_when_asked_for():
    array, tensor = np.zeros(2), torch.zeros(2, requires_grad=True)
    packed = pack({"a": array, "t": tensor})
    array += 1
    assert unpack(packed)["a"].tolist() == [0.0, 0.0]
    assert not unpack(packed)["t"].requires_grad


def test_an_ordered_dict_as_of_a_torch_module_comes_back_as_a_dict():
    module = torch.nn.Linear(2, 1)
    state = through_json({"module": module.state_dict()})
    assert isinstance(module.state_dict(), OrderedDict)
    other = torch.nn.Linear(2, 1)
    other.load_state_dict(state["module"])
    assert torch.equal(other.weight, module.weight)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({1, 2}, r"state\['x'\]\[1\] is set, which cannot be stored; accepted: dict, list"),
        (Counting("ab"), r"state\['x'\]\[1\] is collections.Counter"),
        (object(), r"is object"),
        (np.array([object()]), r"is numpy object, which cannot be stored; accepted: bfloat16, bool"),
        (np.array(["2024-01-01"], dtype="datetime64[D]"), r"is numpy datetime64\[D\]"),
        (np.ma.masked_array([1.0]), r"is numpy.ma.*MaskedArray.*plain numpy array"),
        (torch.zeros(2, dtype=torch.complex64), r"is torch.complex64"),
        (torch.nn.Parameter(torch.zeros(2)), r"is no plain tensor"),
        (torch.eye(2).to_sparse(), r"is no plain tensor"),
        ({b"k": 1}, r"state\['x'\]\[1\] has a key of type bytes, b'k'"),
    ],
    ids=lambda value: str(type(value)),
)
def test_what_cannot_be_stored_is_named_with_its_place(value, says):
    with pytest.raises(StateValueError, match=says):
        pack({"x": [0, value]})


def test_a_state_that_holds_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(StateValueError, match="deeper than 100"):
        pack(loop)


def test_a_tree_that_refers_to_nothing_is_refused():
    with pytest.raises(StateValueError, match="tensor '0', which is not there"):
        unpack(Packed([{"$": "tensor", "name": "0"}]))
    with pytest.raises(StateValueError, match="kind 'future'"):
        unpack(Packed({"a": {"$": "future"}}))


class Stateless:
    @hookimpl
    def post_advantage(self, batch):
        return None


class Counter(Stateless):
    def __init__(self, n=0):
        self.n = n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class OtherCounter(Counter):
    pass


def manager(plugins, resume="strict"):
    built = HookManager.from_config({"resume": resume}, estimator="grpo", has_groups=True, extra_plugins=plugins)
    return built


def test_state_goes_to_the_label_it_came_from():
    saved = manager({"a": Counter(1), "plain": Stateless(), "b": Counter(2)}).state_dict(step=4)
    assert saved["plain"].state is None
    a, b = Counter(), Counter()
    found = manager({"b": b, "a": a}).load_state_dict(saved, 4)
    assert (a.n, b.n) == (1, 2)
    assert (set(found.restored), found.fresh, found.disabled, found.lost) == ({"a", "b"}, (), (), ())


def test_a_changed_list_of_plugins_is_refused_with_what_differs():
    saved = manager({"same": Counter(1), "gone": Counter(2), "other": Counter(3)}).state_dict()
    same, new, other = Counter(), Counter(), OtherCounter()
    with pytest.raises(ConfigError) as caught:
        manager({"same": same, "new": new, "other": other}).load_state_dict(saved, 4, "global_step_4")
    text = str(caught.value)
    for part in (
        "dataflex.resume: got strict, and global_step_4 has other plugins",
        "'gone' (test_state:Counter) is in the checkpoint only",
        "'new' (test_state:Counter) has state in this run only",
        "'other' is test_state:Counter in the checkpoint and test_state:OtherCounter in this run",
        "+dataflex.resume=matching",
        "+dataflex.resume=fresh",
    ):
        assert part.replace("test_state", __name__) in text
    assert "'same'" not in text and (same.n, new.n, other.n) == (0, 0, 0)


def test_matching_restores_what_is_the_same_and_fresh_nothing():
    saved = manager({"same": Counter(1), "gone": Counter(2), "other": Counter(3)}).state_dict()
    same, new, other = Counter(), Counter(), OtherCounter()
    found = manager({"same": same, "new": new, "other": other}, "matching").load_state_dict(saved, 4)
    assert (same.n, new.n, other.n) == (1, 0, 0)
    assert (found.restored, found.fresh, found.lost) == (("same",), ("new", "other"), ("gone", "other"))
    same = Counter()
    found = manager({"same": same}, "fresh").load_state_dict(saved, 4)
    assert (same.n, found.fresh) == (0, ("same",))


def test_plugins_without_state_may_come_and_go():
    saved = manager({"a": Counter(1), "plain": Stateless()}).state_dict()
    a = Counter()
    manager({"other": Stateless(), "a": a}).load_state_dict(saved, 4)
    assert a.n == 1


def test_an_unstorable_state_names_the_plugin_and_the_place():
    counter = Counter({"seen": {1}})
    with pytest.raises(PluginError, match=r"plugin 'mine'.*in state_dict at step 4: state\['n'\]\['seen'\] is set"):
        manager({"mine": counter}).state_dict(4)


def test_failures_of_the_plugins_own_methods_name_it():
    class Broken(Counter):
        def state_dict(self):
            raise RuntimeError("no state today")

    with pytest.raises(PluginError, match="plugin 'mine'.*in state_dict at step 4: RuntimeError: no state today"):
        manager({"mine": Broken()}).state_dict(4)
    saved = manager({"mine": Counter(1)}).state_dict(4)
    shy = Counter()
    shy.load_state_dict = lambda state: state["m"]
    with pytest.raises(PluginError, match="'mine'.*load_state_dict at step 4: cannot take the state.*KeyError: 'm'"):
        manager({"mine": shy}).load_state_dict(saved, 4)


def test_a_disabled_plugin_stays_disabled_and_keeps_no_state(batches, ctx, token_mean):
    class Failing(Counter):
        @hookimpl
        def post_advantage(self, batch):
            raise RuntimeError("broken")

    def build(plugin, resume="strict"):
        block = {"resume": resume, "plugins": {"p": {"plugin": f"{__name__}:Counter", "on_error": "disable"}}}
        built = HookManager.from_config(block, estimator="grpo", has_groups=True)
        entry = built._entries["p"]
        built._pluggy.unregister(entry.plugin)
        entry.built.__dict__["plugin"] = plugin
        built._pluggy.register(plugin, name="p")
        return built

    run = build(Failing())
    run.post_advantage(batches.groups((1.0, 0.0)), ctx, token_mean)
    assert not run.active("post_advantage", ctx.step)
    saved = run.state_dict(3)
    assert saved["p"].disabled and saved["p"].state is None
    resumed = build(Counter())
    assert resumed.active("post_advantage", 4)
    assert resumed.load_state_dict(saved, 3).disabled == ("p",)
    assert not resumed.active("post_advantage", 4)


def test_one_of_the_two_methods_alone_is_refused_at_start():
    class Half(Stateless):
        def state_dict(self):
            return {}

    with pytest.raises(ConfigError, match="state_dict without load_state_dict; accepted: both methods or neither"):
        HookManager({"half": Half()})


def test_a_mechanism_plugin_has_the_state_of_its_components(registry):
    class Seen:
        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    def build(stateful_scorer: bool, resume="strict"):
        block = {"resume": resume, "plugins": {"s": {"plugin": "select", "scorer": "reward_difficulty"}}}
        block["plugins"]["s"]["actuator"] = "topk_fraction"
        built = HookManager.from_config(block, estimator="grpo", has_groups=True)
        plugin = built._entries["s"].plugin
        assert isinstance(plugin, SelectPlugin)
        roles = {"scorer": plugin.scorer, "actuator": plugin.actuator}
        for role, component in roles.items():
            if stateful_scorer or role == "actuator":
                component.__class__ = type(component.__class__.__name__, (Seen, component.__class__), {})
                component.seen = 0
        return built, plugin

    plain = HookManager.from_config(
        {"mechanism": "select", "scorer": "reward_difficulty", "actuator": "topk_fraction"},
        estimator="grpo",
        has_groups=True,
    )
    assert plain.state_dict()["select"].state is None

    run, plugin = build(True)
    plugin.scorer.seen, plugin.actuator.seen = 3, 4
    saved = run.state_dict()
    resumed, again = build(True)
    resumed.load_state_dict(saved, 4)
    assert (again.scorer.seen, again.actuator.seen) == (3, 4)
    with pytest.raises(PluginError, match="saved state is that of actuator, scorer, and here actuator has state"):
        build(False)[0].load_state_dict(saved, 4)
