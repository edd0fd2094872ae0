"""Checks on plugin objects: each mistake that pluggy accepts in silence, with the fix in the message."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from dataflex_hooks import ConfigError, HookManager, UpdateDecision, hookimpl


class Fine:
    @hookimpl
    def post_advantage(self, batch, ctx):
        return UpdateDecision()


class Instance(Fine):
    pass


class Undecorated:
    def post_advantage(self, batch, ctx):
        return None


class Misspelled:
    @hookimpl
    def post_advantages(self, batch, ctx):
        return None


class UnlikeAnyHook:
    @hookimpl
    def compute(self):
        return None


class NoHook:
    def helper(self):
        return None


class DefaultArgument:
    @hookimpl
    def post_advantage(self, batch, ctx=None):
        return None


class UnknownArgument:
    @hookimpl
    def post_advantage(self, batches, trainer):
        return None


class KeywordOnly:
    @hookimpl
    def post_advantage(self, batch, *, ctx):
        return None


class StarArguments:
    @hookimpl
    def post_advantage(self, *args, **kwargs):
        return None


class Wrapper:
    @hookimpl(wrapper=True)
    def post_advantage(self, batch, ctx):
        return (yield)


@dataclass
class Unhashable(Fine):
    size: int = 0


class ProvidesUnknown(Fine):
    provides = {"masks"}


class ProvidesText(Fine):
    provides = "mask"


class RequiresList(Fine):
    requires = ("advantages",)


class RequiresUnknownHook(Fine):
    requires = {"post_advantages": ("advantages",)}


class RequiresText(Fine):
    requires = {"post_advantage": "advantages"}


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (
            Instance,
            [r"got the class .*\.Instance; accepted: an instance of a plugin class; register .*: Instance\(\)"],
        ),
        (
            Undecorated(),
            [r"got method post_advantage without @hookimpl, .*; put @dataflex_hooks.hookimpl above post_advantage"],
        ),
        (Misspelled(), [r"got @hookimpl on post_advantages, which is no hook; .*did you mean 'post_advantage'\?"]),
        (
            UnlikeAnyHook(),
            [r"got @hookimpl on compute, which is no hook; .*without @hookimpl it is an ordinary method"],
        ),
        (
            NoHook(),
            [r"got an object of .*NoHook; accepted: a plugin that implements a hook, .*; decorate one with @dataflex"],
        ),
        (DefaultArgument(), [r"got argument 'ctx' of post_advantage; .*remove '= None': pluggy never passes"]),
        (
            UnknownArgument(),
            [r"argument 'batches' .*did you mean 'batch'\?", r"argument 'trainer' .*arguments of the hook: batch, ctx"],
        ),
        (KeywordOnly(), [r"argument 'ctx' of post_advantage; .*keyword-only"]),
        (StarArguments(), [r"argument 'args'.*never passes \*args", r"argument 'kwargs'"]),
        (Wrapper(), [r"got post_advantage as a hook wrapper; accepted: an ordinary hookimpl"]),
        (Unhashable(), [r"accepted: a plugin that is hashable; a dataclass is with @dataclass\(eq=False\)"]),
        (ProvidesUnknown(), [r"got provides = {'masks'}; .*did you mean 'mask'\?"]),
        (ProvidesText(), [r"got provides = 'mask'; accepted: a set out of add, admit, keep, mask"]),
        (
            RequiresList(),
            [r"got requires = \('advantages',\); accepted: a mapping of hook to field names; for example"],
        ),
        (RequiresUnknownHook(), [r"got requires\['post_advantages'\]; .*did you mean 'post_advantage'\?"]),
        (RequiresText(), [r"got requires\['post_advantage'\] = 'advantages'; accepted: a tuple of field names"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_mistake_is_refused_with_its_fix(problems, plugin, expected):
    found = problems(None, extra_plugins={"mine": plugin})
    assert len(found) == len(expected)
    for text, pattern in zip(found, expected, strict=True):
        assert text.startswith("dataflex.plugins.mine.plugin: ")
        assert re.search(pattern, text)


def test_register_raises_the_same(problems):
    with pytest.raises(ConfigError, match="register an instance: Instance"):
        HookManager({"mine": Instance})
    manager = HookManager()
    with pytest.raises(ConfigError, match="did you mean 'post_advantage'"):
        manager.register("mine", Misspelled())
    assert manager.labels == ()


def test_an_optional_hook_of_a_later_version_is_let_through():
    class Forward(Fine):
        @hookimpl(optionalhook=True)
        def post_update(self, batch):
            return None

    assert HookManager({"x": Forward()}).plan()[0]["hooks"] == ["post_advantage"]


def test_a_hook_may_be_implemented_under_another_method_name(batches, ctx, token_mean):
    class Renamed:
        @hookimpl(specname="post_advantage")
        def decide(self, batch):
            return UpdateDecision(skip_update=True)

    manager = HookManager({"x": Renamed()})
    assert manager.post_advantage(batches.groups([1, 0]), ctx, token_mean).skip_update


def test_a_label_and_an_object_are_used_once(problems):
    plugin = Fine()
    manager = HookManager({"a": plugin})
    with pytest.raises(ConfigError, match="dataflex.plugins.a: got 'a'; accepted: a label that no other plugin"):
        manager.register("a", Fine())
    with pytest.raises(ConfigError, match="one object for each label; it is registered as 'a' already"):
        manager.register("b", plugin)


def test_one_owner_of_rewards(problems):
    class Owner(Fine):
        provides = {"rewards"}

    (text,) = problems(None, extra_plugins={"a": Owner(), "b": Owner()})
    assert text.startswith("dataflex.plugins.b: got rewards from 'b' (")
    assert "Owner) and 'a' (" in text
    assert text.endswith(
        "accepted: one plugin that provides rewards; remove one of the two, or let one adjust: scale and shift"
    )


def test_without_provides_a_plugin_may_give_what_its_hooks_share(manager_of_undeclared):
    assert manager_of_undeclared == {
        "r": ["add", "keep"],
        "u": ["keep", "mask", "skip_update", "update_scale", "weights"],
    }


@pytest.fixture
def manager_of_undeclared() -> dict[str, list[str]]:
    class Reward:
        @hookimpl
        def post_reward(self, batch):
            return None

    class Update:
        @hookimpl
        def post_advantage(self, batch):
            return None

    return {row["label"]: row["provides"] for row in HookManager({"r": Reward(), "u": Update()}).plan()}
