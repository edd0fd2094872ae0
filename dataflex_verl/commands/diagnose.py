"""Everything that Hydra has against a command line, at once; Hydra itself stops at the first.

Each override is applied to what the ones before it gave. One that Hydra refuses is reported, and then applied as it was
probably meant, so that the rest can be judged and its own value as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException, SearchPathException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from dataflex_verl.commands.hydra_config import CommandLine, Composed, composed, hydra_for
from dataflex_verl.presets.providers import FOLDER, all_presets

if TYPE_CHECKING:
    from dataflex_hooks import Problem

ACCEPTED = "an override that Hydra can apply"


def diagnose(line: CommandLine) -> tuple[Composed | None, list[Problem]]:
    """Compose ``line`` as far as it can be composed.

    Returns:
        The configuration as it was probably meant, None if there is none; and what is wrong with the overrides.
    """
    return _Diagnosis(line).run()


class _Diagnosis:
    def __init__(self, line: CommandLine) -> None:
        self.line = line
        self.problems: list[Problem] = []

    def run(self) -> tuple[Composed | None, list[Problem]]:
        try:
            with hydra_for(self.line):
                return self._run(), self.problems
        except SearchPathException as error:
            self._refuse("--config-dir", self.line.parsed.config_dir, "a directory", _first_line(error))
            return None, self.problems

    def _run(self) -> Composed | None:
        self.parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = [override for text in self.line.overrides for override in self._parse(text)]
        presets = [override for override in parsed if _is_preset(override)]
        groups = [override for override in parsed if not _is_preset(override) and self._is_group(override)]
        values = [override for override in parsed if override not in presets and override not in groups]
        hydra = [str(override.input_line) for override in values if override.is_hydra_override()]
        base = self._compose_groups([str(group.input_line) for group in groups], hydra, self._presets(presets))
        if base is not None:
            for override in values:
                if not override.is_hydra_override():
                    self._apply(base.config, override)
        return base

    def _parse(self, text: str) -> list[Override]:
        try:
            return list(self.parser.parse_overrides([text]))
        except OverrideParseException as error:
            key = text.partition("=")[0].lstrip("+~").strip()
            self._refuse(key or text, text, "an override key=value that Hydra can read", _first_line(error))
            return []

    def _is_group(self, override: Override) -> bool:
        loader = GlobalHydra.instance().config_loader()
        return not isinstance(override.value(), dict) and bool(loader.get_group_options(override.key_or_group))

    # ------------------------------------------------------------------ presets

    def _presets(self, overrides: Sequence[Override]) -> list[str]:
        """Check the overrides of the group of presets; return the one override that was meant."""
        known = sorted({preset.name for preset in all_presets()[0]})
        names: list[str] = []
        for position, override in enumerate(overrides):
            if override.is_delete():
                self._refuse(FOLDER, str(override.input_line), "+dataflex=<preset>: there is nothing to delete", None)
                continue
            if override.is_sweep_override():
                names += self._swept(override, known)
                continue
            value = override.value()
            chosen = [value] if isinstance(value, str) else value
            if not isinstance(chosen, list) or not all(isinstance(name, str) and name for name in chosen):
                self._refuse(FOLDER, value, f"a preset or a list of presets, {', '.join(known)}", None)
                continue
            if position > 0:
                stacked = ",".join([*names, *map(str, chosen)])
                hint = f"stack them in one list: +dataflex=[{stacked}]"
                self._refuse(FOLDER, str(override.input_line), "one override that names presets", hint)
            elif not override.is_add():
                hint = f"write +dataflex={str(override.input_line).partition('=')[2]}"
                self._refuse(FOLDER, str(override.input_line), "presets, added with one +", hint)
            names += [meant for name in chosen if (meant := self._meant(str(name), known)) is not None]
        return [f"+{FOLDER}=[{','.join(dict.fromkeys(names))}]"] if names else []

    def _swept(self, override: Override, known: Sequence[str]) -> list[str]:
        """A list without its brackets is a sweep to Hydra: a run for each."""
        text = str(override.input_line).partition("=")[2]
        self._refuse(FOLDER, str(override.input_line), "one list of presets", f"stack them: +{FOLDER}=[{text}]")
        names = [name.strip() for name in text.split(",")]
        return [meant for name in names if (meant := self._meant(name, known)) is not None]

    def _meant(self, name: str, known: Sequence[str]) -> str | None:
        from dataflex_hooks.errors import nearest, one_of

        if name in known:
            return name
        meant = nearest(name, known)
        self._refuse(FOLDER, name, f"the name of a preset, {one_of(known)}", meant and f"did you mean {meant!r}?")
        return meant

    # ------------------------------------------------------------------ groups and values

    def _compose_groups(self, groups: list[str], hydra: list[str], presets: list[str]) -> Composed | None:
        """Compose what files give; a group's override that names no file is reported and left out."""
        while True:
            try:
                return composed(self.line, [*groups, *hydra, *presets])
            except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
                message = _first_line(error)
                culprit = next((text for text in groups if text.lstrip("+~").replace("=", "/", 1) in message), None)
                if culprit is None:
                    self._refuse("hydra", _described("this configuration"), "files that Hydra can compose", message)
                    return None
                key, _, value = culprit.lstrip("+~").partition("=")
                options = GlobalHydra.instance().config_loader().get_group_options(key)
                self._refuse(key, value, _one_of(options), None)
                groups = [text for text in groups if text != culprit]

    def _apply(self, config: DictConfig, override: Override) -> None:
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], config)
        except (HydraException, OmegaConfBaseException) as error:
            self._explain(config, override, _first_line(error))

    def _explain(self, config: DictConfig, override: Override, message: str) -> None:
        key, value, text = override.key_or_group, override.value(), str(override.input_line)
        if override.is_add():
            now = OmegaConf.select(config, key, throw_on_missing=False)
            accepted = f"a single + only where there is no value yet; here it is {now!r}"
            self._refuse(key, _described(text), accepted, f"to change it, write +{text}")
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        elif override.is_delete() or override.is_force_add():
            self._refuse(key, _described(text), ACCEPTED, message)
        else:
            self._refuse_unknown(config, key, value, text)

    def _refuse_unknown(self, config: DictConfig, key: str, value: Any, text: str) -> None:
        from dataflex_hooks.errors import did_you_mean

        parent, _, last = key.rpartition(".")
        siblings = OmegaConf.select(config, parent, throw_on_resolution_failure=False) if parent else config
        known = [str(name) for name in siblings] if isinstance(siblings, DictConfig) else []
        hint = did_you_mean(last, known)
        if key.split(".")[0] == FOLDER and hint is None:
            accepted = "keys of the dataflex block, added with +: verl's own configuration has none"
            self._refuse(key, _described(text), accepted, f"write +{text}")
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        elif key.split(".")[0] == FOLDER:
            self._refuse(key, value, _one_of(known), hint)
        else:
            self._refuse(key, value, "a setting of verl's configuration", hint or f"to add a new one, write +{text}")

    def _refuse(self, setting: str, given: object, accepted: str, hint: str | None) -> None:
        from dataflex_hooks import Problem

        self.problems.append(Problem(setting, given, accepted, hint))


def _is_preset(override: Override) -> bool:
    return override.key_or_group == FOLDER and not isinstance(override.value(), dict)


def _described(text: str) -> str:
    from dataflex_hooks.errors import Described

    return Described(text)


def _one_of(names: Sequence[str]) -> str:
    from dataflex_hooks.errors import one_of

    return one_of(names)


def _first_line(error: BaseException) -> str:
    """What the error says, in one line."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
