"""The expensive reward function: found by name, and called with the keywords it takes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflex_hooks import ParameterError

FIELDS: Mapping[str, str] = {
    "data_source": "data_source",
    "solution_str": "responses",
    "ground_truth": "reward_model",
    "extra_info": "extra_info",
    "prompt_str": "prompts",
}
"""What a function may take, and the batch field that it comes from."""
TEXT = ("solution_str", "prompt_str")
"""What has to be decoded."""
_ACCEPTED = "module:function or path/to/file.py:function, a function as verl's custom_reward_function takes"


@dataclass(frozen=True)
class RewardFunction:
    """A reward function.

    Attributes:
        name: as configured.
        call: the function, a coroutine function or a plain one.
        takes: which of :data:`FIELDS` it takes.
        params: keywords that are the same in every call.
    """

    name: str
    call: Callable[..., Any]
    takes: tuple[str, ...]
    params: Mapping[str, Any]

    @property
    def is_async(self) -> bool:
        """Whether it is a coroutine function."""
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)


def load(name: object, params: Mapping[str, Any]) -> RewardFunction:
    """Find a function and read which keywords it takes.

    Args:
        name: ``module:function``, ``path/to/file.py:function``, or a function.
        params: further keywords for every call.

    Raises:
        ParameterError: there is no such function, or it asks for keywords that nobody gives.
    """
    call = name if callable(name) else _found(name)
    shown = name if isinstance(name, str) else getattr(call, "__qualname__", type(call).__qualname__)
    parameters = inspect.signature(call).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needed = {p.name for p in parameters if p.name in named and p.default is p.empty}
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if missing := sorted(needed - FIELDS.keys() - params.keys()) + positional:
        accepted = f"a function that needs no keywords but {', '.join(FIELDS)} and those in params"
        raise ParameterError("function", f"{shown}, which needs {', '.join(missing)}", accepted)
    if unknown := sorted(params.keys() - named) if not takes_any else []:
        accepted = f"keywords that {shown} takes: {', '.join(sorted(named - FIELDS.keys())) or 'none'}"
        raise ParameterError(f"params.{unknown[0]}", params[unknown[0]], accepted)
    if taken := sorted(params.keys() & FIELDS.keys()):
        raise ParameterError(f"params.{taken[0]}", params[taken[0]], "no keyword that every response brings itself")
    takes = tuple(keyword for keyword in FIELDS if takes_any or keyword in named)
    return RewardFunction(shown, call, takes, dict(params))


def _found(name: object) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    if not place or not attribute:
        raise ParameterError("function", name, _ACCEPTED)
    try:
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, attribute)
    except Exception as error:
        raise ParameterError("function", name, f"{_ACCEPTED}; {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ParameterError("function", name, f"{_ACCEPTED}; {attribute} is a {type(found).__name__}")
    return found


def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"dataflex_two_stage_reward_file_{path.stem}", path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path} below {Path.cwd()}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
