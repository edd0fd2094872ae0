"""The ``dataflex`` block of a run's configuration: short form (one mechanism) or full form (labelled plugins)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dataflex_hooks.errors import NOTHING, ConfigError, Described, Problem, did_you_mean, one_of
from dataflex_hooks.keep import FALLBACKS, KeepRules
from dataflex_hooks.merge import MaskScale
from dataflex_hooks.slow import LIMIT_S

_SHORT = ("mechanism", "scorer", "actuator")
_SHARED = ("normalize", "domain_key", "domains", "window")
_CALLS = ("on_error", "slow_plugin_seconds")
_RULES = ("apply", "apply_to", "mask_scale", "min_keep", "fallback", "max_fill", "resume", "on_starved")
_LOG = ("log_decisions", "log_dir")
_TOP = (*_SHORT, "plugins", "warmup_step", "update_step", *_CALLS, *_RULES, *_LOG, *_SHARED)
LATER: Mapping[str, str] = MappingProxyType(
    {
        "curriculum": "curriculum comes with the pre_rollout hook in a later version",
        "budget": "budget comes with the pre_rollout hook in a later version",
    },
)
"""Mechanisms that this version does not have, and why."""


@dataclass(frozen=True)
class PluginSettings:
    """One plugin of a run.

    Attributes:
        label: its name in the run, in metrics and in messages.
        plugin: the entry point's name, or ``module:Class``.
        path: where its keywords stand in the configuration, for messages.
        warmup_step: first step at which it is called.
        on_error: ``"raise"`` stops the run, ``"disable"`` logs the error and goes on without the plugin.
        slow_plugin_seconds: a call that takes longer is warned of; None for no limit.
        keywords: what its constructor gets.
    """

    label: str
    plugin: str
    path: str
    warmup_step: int = 0
    on_error: Literal["raise", "disable"] = "raise"
    slow_plugin_seconds: float | None = LIMIT_S
    keywords: Mapping[str, object] = field(default_factory=dict)

    @property
    def plugin_setting(self) -> str:
        """The setting that names the plugin, for messages."""
        return "dataflex.mechanism" if self.path == "dataflex" else f"{self.path}.plugin"


@dataclass(frozen=True)
class DataFlexConfig:
    """The whole block.

    Attributes:
        plugins: in call order.
        apply: False decides and logs everything and changes nothing.
        apply_to: whether merged weights go into the loss weights or onto the advantages.
        mask_scale: ``"kept"`` makes up for the share of the gradient that masks take away.
        keep_rules: the least that has to stay in the update, and what happens when less would.
        max_fill: the most by which a mini-batch with padding in place of dropped rows is scaled up.
        update_step: domain statistics are handed out every so many steps.
        resume: with a checkpoint of other plugins, ``"strict"`` is an error, ``"matching"`` gives state to the plugins
            that are the same, ``"fresh"`` starts all plugins afresh whatever the checkpoint has.
        on_starved: when too few of a domain's candidate prompts are admitted, ``"take"`` the best refused ones with a
            warning, or stop with an ``"error"``.
        log_decisions: whether the run keeps a decision log; ``"tokens"`` with the values of every token.
        log_dir: folder of the log; None is ``decisions`` below ``trainer.default_local_dir``.
        shared: ``normalize``, ``domain_key``, ``domains``, ``window``, as far as given; go to every plugin that takes
            them.
        usual: ``warmup_step``, ``on_error`` and ``slow_plugin_seconds`` of plugins that say nothing else.
    """

    plugins: tuple[PluginSettings, ...] = ()
    apply: bool = True
    apply_to: Literal["weights", "advantages"] = "weights"
    mask_scale: MaskScale = "none"
    keep_rules: KeepRules = KeepRules()
    max_fill: float = 4.0
    update_step: int = 1
    resume: Literal["strict", "matching", "fresh"] = "strict"
    on_starved: Literal["take", "error"] = "take"
    log_decisions: Literal[False, True, "tokens"] = False
    log_dir: str | None = None
    shared: Mapping[str, object] = field(default_factory=dict)
    usual: PluginSettings = PluginSettings("", "", "")


def parse(dataflex: Mapping[str, Any] | DictConfig | None) -> DataFlexConfig:
    """Validate the ``dataflex`` block.

    Args:
        dataflex: what stands under ``dataflex``; None (no such block) means no plugins.

    Raises:
        ConfigError: with every problem found.
    """
    config, problems = read(dataflex)
    if problems:
        raise ConfigError(problems)
    return config


def read(dataflex: Mapping[str, Any] | DictConfig | None) -> tuple[DataFlexConfig, list[Problem]]:
    """Read the block as far as it is readable, and say what is wrong with it."""
    if isinstance(dataflex, DictConfig):
        try:
            dataflex = OmegaConf.to_container(dataflex, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            key = str(getattr(error, "full_key", None) or "")
            setting = key if key.split(".")[0] == "dataflex" else f"dataflex.{key}".rstrip(".")
            text = Described(str(error).splitlines()[0])
            return DataFlexConfig(), [Problem(setting, text, "a value that can be resolved", cause=error)]
    if dataflex is None:
        return DataFlexConfig(), []
    if not isinstance(dataflex, Mapping):
        return DataFlexConfig(), [Problem("dataflex", dataflex, f"a mapping with keys out of {', '.join(_TOP)}")]
    return _Reader().block(dataflex)


class _Reader:
    """Reads one block, collecting problems."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def block(self, block: Mapping[str, Any]) -> tuple[DataFlexConfig, list[Problem]]:
        for key in block:
            if key not in _TOP:
                self._refuse(f"dataflex.{key}", block[key], one_of(_TOP), did_you_mean(key, _TOP))
        usual = self._calls(block, "dataflex", PluginSettings("", "", ""))
        short = [key for key in _SHORT if block.get(key) is not None]
        if short and block.get("plugins") is not None:
            given = Described(f"dataflex.plugins together with {', '.join(f'dataflex.{key}' for key in short)}")
            self._refuse(
                "dataflex", given, "the short form (mechanism, scorer, actuator) or the full form (plugins)", None
            )
            plugins: list[PluginSettings] = []
        elif short:
            plugins = self._short_form(block, usual)
        else:
            plugins = self._full_form(block.get("plugins"), usual)
        config = DataFlexConfig(
            plugins=tuple(plugins),
            apply=self._flag(block, "apply", True),
            apply_to=self._choice(block, "apply_to", "dataflex.apply_to", ("weights", "advantages")),
            mask_scale=self._choice(block, "mask_scale", "dataflex.mask_scale", ("none", "kept")),
            keep_rules=KeepRules(
                self._min_keep(block.get("min_keep")),
                self._choice(block, "fallback", "dataflex.fallback", FALLBACKS),
            ),
            max_fill=self._max_fill(block.get("max_fill", 4.0)),
            update_step=self._integer(block, "update_step", "dataflex.update_step", 1, least=1),
            resume=self._choice(block, "resume", "dataflex.resume", ("strict", "matching", "fresh")),
            on_starved=self._choice(block, "on_starved", "dataflex.on_starved", ("take", "error")),
            log_decisions=self._log_decisions(block.get("log_decisions", False)),
            log_dir=self._log_dir(block.get("log_dir")),
            shared=self._shared(block),
            usual=usual,
        )
        return config, self.problems

    def _calls(self, block: Mapping[str, Any], path: str, usual: PluginSettings) -> PluginSettings:
        """Read what concerns the calls of plugins, for one plugin or as the default of all."""
        choices = (usual.on_error, *{"raise", "disable"} - {usual.on_error})
        return replace(
            usual,
            warmup_step=self._integer(block, "warmup_step", f"{path}.warmup_step", usual.warmup_step, least=0),
            on_error=self._choice(block, "on_error", f"{path}.on_error", choices),
            slow_plugin_seconds=self._seconds(block, f"{path}.slow_plugin_seconds", usual.slow_plugin_seconds),
        )

    def _short_form(self, block: Mapping[str, Any], usual: PluginSettings) -> list[PluginSettings]:
        mechanism = self._plugin_name("dataflex.mechanism", block.get("mechanism"))
        if mechanism is None:
            return []
        keywords = {key: block[key] for key in ("scorer", "actuator") if block.get(key) is not None}
        return [replace(usual, label=mechanism, plugin=mechanism, path="dataflex", keywords=keywords)]

    def _full_form(self, plugins: Any, usual: PluginSettings) -> list[PluginSettings]:
        if plugins is None:
            return []
        if not isinstance(plugins, Mapping):
            self._refuse("dataflex.plugins", plugins, "a mapping of labels to plugin settings", None)
            return []
        return [built for label, given in plugins.items() if (built := self._plugin(label, given, usual))]

    def _plugin(self, label: Any, given: Any, usual: PluginSettings) -> PluginSettings | None:
        path = f"dataflex.plugins.{label}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", str(label)):
            self._refuse(path, label, "a label of letters, digits, _ and -", None)
            return None
        if not isinstance(given, Mapping):
            hint = f"to leave the plugin out, delete it with ~{path}"
            self._refuse(path, given, "a mapping of settings, {} for all defaults", hint)
            return None
        name = self._plugin_name(f"{path}.plugin", given.get("plugin", label))
        own = self._calls(given, path, usual)
        keywords = {str(key): value for key, value in given.items() if key not in ("plugin", "warmup_step", *_CALLS)}
        if name is None:
            return None
        return replace(own, label=str(label), plugin=name, path=path, keywords=keywords)

    def _plugin_name(self, path: str, name: Any) -> str | None:
        if not isinstance(name, str) or name in LATER:
            hint = LATER.get(name) if isinstance(name, str) else None
            accepted = "the name of an installed plugin (select, reweight, ...), or module:Class"
            self._refuse(path, NOTHING if name is None else name, accepted, hint)
            return None
        return name

    def _shared(self, block: Mapping[str, Any]) -> dict[str, object]:
        shared = {key: block[key] for key in _SHARED if block.get(key) is not None}
        if "window" in shared:
            self._integer(block, "window", "dataflex.window", 1, least=1)
        if "domain_key" in shared and not isinstance(shared["domain_key"], str):
            self._refuse("dataflex.domain_key", shared["domain_key"], "the name of a dataset column", None)
        domains = shared.get("domains", [])
        if not isinstance(domains, (list, tuple)) or not all(isinstance(name, str) for name in domains):
            self._refuse("dataflex.domains", domains, "a list of domain names", None)
        return shared

    def _seconds(self, block: Mapping[str, Any], path: str, default: float | None) -> float | None:
        given = block.get("slow_plugin_seconds", default)
        if given is None:
            return None
        if isinstance(given, (int, float)) and not isinstance(given, bool) and 0 < given < math.inf:
            return float(given)
        self._refuse(path, given, "a number of seconds > 0, or null for no limit", None)
        return default

    def _min_keep(self, given: Any) -> int | float | None:
        if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
            return given
        if isinstance(given, float) and 0 < given < 1:
            return given
        self._refuse("dataflex.min_keep", given, "a number of rollouts >= 1, or a share of them in (0, 1)", None)
        return None

    def _log_decisions(self, given: Any) -> Literal[False, True, "tokens"]:
        if given is True or given == "tokens":
            return "tokens" if given == "tokens" else True
        if given is False:
            return False
        hint = did_you_mean(given, ("true", "false", "tokens"))
        self._refuse("dataflex.log_decisions", given, "false, true or tokens", hint)
        return False

    def _log_dir(self, given: Any) -> str | None:
        if given is None or (isinstance(given, str) and given):
            return given
        self._refuse("dataflex.log_dir", given, "the path of a folder", None)
        return None

    def _max_fill(self, given: Any) -> float:
        if isinstance(given, (int, float)) and not isinstance(given, bool) and 1 <= given < math.inf:
            return float(given)
        self._refuse("dataflex.max_fill", given, "a number >= 1", None)
        return 4.0

    def _refuse(self, setting: str, given: object, accepted: str, hint: str | None) -> None:
        self.problems.append(Problem(setting, given, accepted, hint))

    def _integer(self, block: Mapping[str, Any], key: str, path: str, default: int, least: int) -> int:
        given = block.get(key, default)
        if isinstance(given, int) and not isinstance(given, bool) and given >= least:
            return given
        self._refuse(path, given, f"an integer >= {least}", None)
        return default

    def _flag(self, block: Mapping[str, Any], key: str, default: bool) -> bool:
        given = block.get(key, default)
        if not isinstance(given, bool):
            self._refuse(f"dataflex.{key}", given, "true or false", None)
            return default
        return given

    def _choice(self, block: Mapping[str, Any], key: str, path: str, choices: tuple[str, ...]) -> Any:
        given = block.get(key, choices[0])
        if given not in choices:
            self._refuse(path, given, one_of(choices), did_you_mean(given, choices))
            return choices[0]
        return given
