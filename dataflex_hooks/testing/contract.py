"""The contract of a plugin as one check: what a run relies on, and what would otherwise show late or never."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from dataflex_hooks.batch import PromptBatch, RolloutBatch, stored_names
from dataflex_hooks.config import read
from dataflex_hooks.context import StepContext
from dataflex_hooks.errors import ConfigError, Described, ParameterError, did_you_mean, one_of
from dataflex_hooks.hookspecs import HOOKS
from dataflex_hooks.loader import build_plugin
from dataflex_hooks.testing.checking import Check
from dataflex_hooks.testing.running import LONE, by_author
from dataflex_hooks.testing.scenario import MADE_UP, Pools, Step, make_steps

PROPERTIES: Mapping[str, str] = MappingProxyType(
    {
        "registration": "a run accepts the plugin",
        "decisions": "every decision has the types, shapes, dtypes, values, parts and fields that a run accepts",
        "mutation": "what a hook is given is read-only; work on a copy (tensor.clone(), array.copy())",
        "acts": "it changes something on at least one step; give parameters, batches or contexts on which it does",
        "determinism": "equal inputs give equal decisions; draw from a generator made of ctx.seed and ctx.step",
        "rows": "decisions follow the rows, wherever they stand; break ties by batch.tie_rank, never by position",
        "uids": "uids are random names: they tell groups apart and order nothing",
        "padding": "neither padding nor tokens outside response_mask are looked at (batch.mean_over_tokens, n_valid)",
        "state": "a resumed run decides as one that went on: state_dict holds everything that decisions depend on",
    }
)
"""What is checked, in this order; a property that is broken leaves out those that would break with it."""


class ContractError(AssertionError):
    """A plugin breaks its contract. ``broken`` has the names of the properties, out of :data:`PROPERTIES`."""

    def __init__(self, plugin: str, found: Mapping[str, str]) -> None:
        self.plugin = plugin
        self.found = dict(found)
        self.broken = tuple(found)
        lines = [f"  {name}: {text}\n    {PROPERTIES[name]}" for name, text in found.items()]
        super().__init__("\n".join([f"{plugin} breaks the contract of a plugin:", *lines]))

    def __reduce__(self) -> tuple[Any, ...]:
        return ContractError, (self.plugin, self.found)


def assert_plugin_contract(
    plugin: object,
    *,
    batches: Sequence[RolloutBatch] | None = None,
    prompts: PromptBatch | None = None,
    contexts: Sequence[StepContext] | None = None,
    domains: Sequence[str] = ("math", "code"),
    columns: Pools | None = None,
    row_columns: Pools | None = None,
    config: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
    rtol: float = 1e-5,
) -> None:
    """Take a plugin through steps as a run would, several times, and compare what it decides.

    Every hook it implements is called. :data:`PROPERTIES` says what has to hold.

    Args:
        plugin: a class that needs no arguments, a function that makes the plugin, or a plugin, of which deep copies are
            used: each time through begins with a new one. Or settings, as they stand under a label of a configuration:
            ``{"plugin": "select", "scorer": "mine", "actuator": "threshold_band"}``.
        batches: those of the steps; each comes twice. None makes some up: several outputs a rollout, tool tokens, ties,
            equal rewards, a group of two.
        prompts: candidates; None makes some up.
        contexts: two for each batch; None has ``last_metrics`` with the usual names of verl's.
        domains: of what is made up.
        columns: columns of the dataset that the plugin reads: values to draw from, one a prompt.
        row_columns: columns of which every row has its own: values to draw from.
        config: a ``dataflex`` block with rules of the run; a failure counts as one whatever its ``on_error`` says, and
            its ``warmup_step`` is left out.
        skip: properties that are not looked at.
        rtol: relative tolerance of weights, rewards, priorities and proportions.

    Raises:
        ContractError: an AssertionError that says which properties are broken, on which step, and how.
        ParameterError: an argument cannot be used; a field that the plugin declares is in none of the batches.
    """
    __tracebackhide__ = True
    _check_skip(skip)
    _check_lists(batches, contexts, domains)
    check = Check(maker(plugin), config, frozenset(skip), rtol)
    try:
        declared = check.declared()
    except ConfigError as error:
        refused = "\n".join(str(problem) for problem in error.problems)
        raise ContractError(check.name, {"registration": _indented(refused)}) from error
    steps = make_steps(batches, prompts, contexts, domains, columns or {}, row_columns or {})
    _check_fields(declared, steps)
    found = check.find(steps)
    if found:
        raise ContractError(check.name, found)


def maker(plugin: object) -> Callable[[], object]:
    """Return a function that gives a new plugin each time."""
    if isinstance(plugin, Mapping):
        return partial(_configured, dict(plugin))
    if inspect.isclass(plugin) or inspect.isroutine(plugin):
        return plugin
    if callable(plugin) and not any(hasattr(plugin, hook) for hook in HOOKS):
        return plugin
    try:
        first = copy.deepcopy(plugin)
    except Exception as error:
        accepted = f"a class, or a function that makes the plugin, as this one cannot be copied ({error})"
        raise ParameterError("plugin", plugin, accepted) from error
    return lambda: copy.deepcopy(first)


def _configured(settings: dict[str, Any]) -> object:
    config, problems = read({"plugins": {LONE: settings}})
    try:
        if problems:
            raise ConfigError(problems)
        return build_plugin(config.plugins[0], {}).plugin
    except ConfigError as error:
        raise by_author(error, "plugin") from error.__cause__


def _check_skip(skip: Collection[str]) -> None:
    for name in [skip] if isinstance(skip, str) else skip:
        if name not in PROPERTIES or isinstance(skip, str):
            hint = did_you_mean(name, PROPERTIES)
            raise ParameterError("skip", skip, f"a tuple of {one_of(PROPERTIES)}" + (f"; {hint}" if hint else ""))


def _check_lists(
    batches: Sequence[RolloutBatch] | None, contexts: Sequence[StepContext] | None, domains: Sequence[str]
) -> None:
    if batches is not None and not batches:
        raise ParameterError("batches", batches, "at least one batch, or None")
    if not domains or isinstance(domains, str):
        raise ParameterError("domains", domains, "a list of names, at least one")
    if contexts is None:
        return
    wanted = 2 * (MADE_UP if batches is None else len(batches))
    if len(contexts) != wanted:
        text = f"{wanted} contexts, two for each batch"
        raise ParameterError("contexts", Described(f"{len(contexts)} contexts"), text)


def _check_fields(declared: Mapping[str, tuple[str, ...]], steps: Sequence[Step]) -> None:
    for hook, names in declared.items():
        for step in steps:
            there = set(step.prompts.columns) if hook == "pre_rollout" else set(step.batch.field_names)
            missing = sorted(stored_names(names) - there)
            if missing:
                example = f"columns={{{missing[0]!r}: [...]}} or row_columns={{{missing[0]!r}: [...]}}"
                accepted = (
                    f"the fields that the plugin declares for {hook}, for example {example}, or batches with them"
                )
                raise ParameterError("batches", Described(f"{step.name}, without {', '.join(missing)}"), accepted)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
