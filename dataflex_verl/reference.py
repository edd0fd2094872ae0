"""The reference of the configuration, ``docs/configuration.md``: settings, plugins, components, from the code itself.

``python -m dataflex_verl.reference > docs/configuration.md`` writes it again. Names, types and defaults are those of
signatures, meanings those of docstrings, and what is accepted is what the code says when it is given nonsense.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from importlib.metadata import entry_points
from typing import Any

from dataflex_hooks import REGISTRY, ConfigError, config
from dataflex_hooks.construct import construct
from dataflex_hooks.keep import KeepRules
from dataflex_hooks.markers import GROUP
from dataflex_verl import presets

HEAD = """\
# Configuration

Written by `python -m dataflex_verl.reference` from the code: names, types and defaults are those of the signatures, and
"accepted" is what the code itself says when a value is wrong.

In a command, new keys take one `+` (`+dataflex.apply=false`) and keys that a preset has set take `++`. `null` is no
value. Every number of a scorer or an actuator may be [a schedule](methods/schedules.md). Everything wrong with a
configuration is reported at once, before anything starts: [errors](errors.md).
"""
SHORT = """\
Short form, one mechanism: `mechanism`, `scorer`, `actuator`. Full form, any number of them: `plugins`. One of the two.
"""
LABELS = """\
`dataflex.plugins.<label>` has these settings; everything else that stands there goes to the plugin's constructor.
"""
PAIR = "a name, or `{name: ..., params: {...}}`"
MEANINGS = {
    "mechanism": "short form: the plugin to run, `select`, `reweight`, `mix` or any other by its name",
    "scorer": f"short form: {PAIR}",
    "actuator": f"short form: {PAIR}",
    "plugins": "full form: plugins by label, in call order; see below",
    "warmup_step": "first step at which plugins are called; a plugin's own setting wins",
    "on_error": "what becomes of a plugin that fails; its own setting wins, see below",
    "slow_plugin_seconds": "a call that takes longer is warned of; a plugin's own setting wins. None for no limit",
    "normalize": "`mean` or `none`, for every reweighter that has no such setting of its own",
    "domain_key": "dataset column that names a row's domain; without it `domain`, else `data_source`",
    "domains": "the domains, in this order; rows of others are left out",
    "window": "steps looked back on; a component's own setting wins",
}
"""Settings whose meaning no docstring says."""
TYPES = {
    "bool": "true or false",
    "int": "integer",
    "float": "number",
    "Bound": "number or mapping",
    "object": "name or mapping",
}
KINDS = (("scorer", "Scorers"), ("selector", "Selectors"), ("reweighter", "Reweighters"), ("mixer", "Mixers"))
Row = tuple[str, ...]
COLUMNS = ("default", "meaning", "type", "accepted")


def described(owner: object) -> dict[str, str]:
    """Meanings by name, from the ``Args`` and ``Attributes`` of a docstring; of a class those of its bases too."""
    found: dict[str, str] = {}
    for cls in reversed(getattr(owner, "__mro__", (owner,))):
        text = inspect.cleandoc(cls.__doc__ or "")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:[ \t].*\n?|\n)+)", text, re.MULTILINE):
            for names, meaning in re.findall(r"^    ([\w, ]+): (.+(?:\n        .+)*)", section, re.MULTILINE):
                found |= dict.fromkeys(names.split(", "), _flat(meaning))
    return found


def _flat(text: str) -> str:
    text = re.sub(r":\w+:``?~?(?:[\w.]+\.)?(\w+)``?", r"`\1`", " ".join(text.split()).rstrip("."))
    text = text.replace("``", "`").replace('`"', "`").replace('"`', "`")
    # Outside of code a formula may have a "<" before a letter, which would begin a tag.
    parts = text.split("`")
    return "`".join(part if i % 2 else re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", part) for i, part in enumerate(parts))


def kind_of(annotation: object) -> str:
    """A type in words."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    choices = [part for part in re.split(r" \| (?![^\[]*\])", text) if part != "None"]
    words = []
    for part in choices:
        container = re.match(r"(\w+)\[", part)
        if container and container[1] != "Literal":
            words.append("mapping" if container[1] in ("Mapping", "dict") else "list")
        else:  # what is no number is a word out of a few
            words.append(TYPES.get(part, "text"))
    return " or ".join(dict.fromkeys(words))


def shown(default: object) -> str:
    """A default as it is written in YAML."""
    if default is None:
        return "`null`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, (tuple, list)):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{default}`"


def refused(attempt: Callable[[object], object], setting: str) -> str:
    """What the code accepts in place of something that nothing accepts; empty where it does not look."""
    try:
        attempt(object())
    except ConfigError as error:
        texts = [problem.accepted for problem in error.problems if problem.setting.split("params.")[-1] == setting]
        return _flat(texts[0]) if texts else ""
    except (TypeError, ValueError):
        return ""
    return ""


def table(first: str, rows: Mapping[str, Row]) -> Iterator[str]:
    """A Markdown table."""
    yield f"| {first} | {' | '.join(COLUMNS)} |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for name, cells in rows.items():
        yield f"| `{name}` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def block() -> dict[str, Row]:
    """The settings of the ``dataflex`` block."""
    meanings = {**described(KeepRules), **described(config.DataFlexConfig), **MEANINGS}
    kinds, defaults = _fields(config.DataFlexConfig, KeepRules)
    kinds |= {"scorer": "object", "actuator": "object", "plugins": "Mapping[str, object]"}
    kinds |= {"warmup_step": "int", "domains": "Sequence[str]", "window": "int", "slow_plugin_seconds": "float"}
    usual = config.PluginSettings("", "", "")
    defaults |= {name: getattr(usual, name) for name in ("warmup_step", "on_error", "slow_plugin_seconds")}
    rows = {}
    for key in config._TOP:
        accepted = refused(lambda nonsense, key=key: config.parse({key: nonsense}), f"dataflex.{key}")
        default = None if key == "plugins" else defaults.get(key)
        rows[key] = (shown(default), meanings.get(key, ""), kind_of(kinds.get(key, "str")), accepted)
    return rows


def label() -> dict[str, Row]:
    """The settings below a label that every plugin has."""
    meanings, (kinds, defaults) = described(config.PluginSettings), _fields(config.PluginSettings)
    rows = {}
    for key in kinds:
        if key in ("label", "path", "keywords"):
            continue
        accepted = refused(
            lambda nonsense, key=key: config.parse({"plugins": {"x": {key: nonsense}}}), f"dataflex.plugins.x.{key}"
        )
        default = "the label" if key == "plugin" else shown(defaults.get(key))
        rows[key] = (default, meanings.get(key, ""), kind_of(kinds[key]), accepted)
    return rows


def _fields(*classes: Any) -> tuple[dict[str, Any], dict[str, object]]:
    found = [part for cls in classes for part in fields(cls)]
    return {part.name: part.type for part in found}, {
        part.name: part.default for part in found if part.default is not MISSING
    }


def constructor(cls: Any, attempt: Callable[[dict[str, object]], object], hidden: frozenset[str]) -> dict[str, Any]:
    """The keywords of a constructor; ``attempt`` calls it."""
    meanings = {**_COMMON, **described(cls)}
    rows = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD or name in hidden:
            continue
        accepted = refused(lambda nonsense, name=name: attempt({name: nonsense}), name)
        default = "required" if parameter.default is parameter.empty else shown(parameter.default)
        rows[name] = (default, meanings.get(name, ""), kind_of(parameter.annotation), accepted)
    return rows


_COMMON = {
    "domains": "the domains that lists of parameters refer to; null takes those of the run",
    "window": "steps looked back on; null takes `dataflex.window`, else 50",
}
_WORKING = {
    "select": {"scorer": "reward_difficulty", "actuator": "topk_fraction"},
    "reweight": {"scorer": "reward_difficulty", "actuator": "softmax"},
    "mix": {"actuator": "static"},
}


def plugin_rows(name: str) -> dict[str, Any]:
    """The settings of a built-in plugin."""
    (point,) = entry_points(group=GROUP, name=name)
    cls = point.load()
    return constructor(
        cls,
        lambda given: construct(cls, {**_WORKING[name], **given}, {}),
        getattr(cls, "host_keywords", frozenset()),
    )


def component_rows(kind: str, name: str) -> dict[str, Any]:
    """The parameters of a built-in component."""
    cls = REGISTRY.get(kind, name)
    hidden = cls.host_keywords | {"scorer"} | ({"domains", "window"} if kind != "mixer" else frozenset())
    return constructor(cls, lambda given: REGISTRY.build(kind, name, {}, given), frozenset(hidden))


def built_in(kind: str) -> list[str]:
    """Names of our own components of a kind."""
    return [name for name in REGISTRY.names(kind) if REGISTRY.get(kind, name).__module__.startswith("dataflex_hooks.")]


def pages() -> dict[str, list[str]]:
    """The pages of methods that use a component, by its name. Variants (``ar_paper``) are on their method's page."""
    found: dict[str, list[str]] = {"schedule": ["schedule"]}
    names = presets.names()
    for name in names:
        page = next(other for other in names if f"{name}_".startswith(f"{other}_"))
        (plugin,) = presets.block(name)["plugins"].values()
        for role in ("scorer", "actuator"):
            if role in plugin:
                found.setdefault(str(plugin[role]["name"]), []).append(page)
    return {component: sorted(set(of)) for component, of in found.items()}


def lines() -> Iterator[str]:
    """The page, line by line."""
    yield from HEAD.splitlines()
    yield from ("", "## The dataflex block", "", *SHORT.splitlines(), "", *table("setting", block()))
    yield from ("", "## Below a label", "", *LABELS.splitlines(), "", *table("setting", label()))
    for name in _WORKING:
        yield from ("", f"## Plugin `{name}`", "", *table("setting", plugin_rows(name)))
    used = pages()
    for kind, title in KINDS:
        yield from ("", f"## {title}")
        for name in built_in(kind):
            links = ", ".join(f"[{method}](methods/{method}.md)" for method in used.get(name, []))
            yield from ("", f"### `{name}`", "", _flat((REGISTRY.get(kind, name).__doc__ or "").split("\n\n")[0]) + ".")
            if links:
                yield from ("", f"Used by {links}.")
            rows = component_rows(kind, name)
            yield from ("", *(table("parameter", rows) if rows else ("It has no parameters.",)))


if __name__ == "__main__":
    print("\n".join(lines()))
