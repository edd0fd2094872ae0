"""Takes a plugin through the same steps several times and says what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflex_hooks.errors import ConfigError, PluginError
from dataflex_hooks.testing.compare import acts, difference, why_nothing
from dataflex_hooks.testing.outcome import Outcome
from dataflex_hooks.testing.resuming import WatchedRunner, same_state, through_files
from dataflex_hooks.testing.running import LONE, HookRunner
from dataflex_hooks.testing.scenario import Step, Variant, padded_otherwise, renamed, shuffled
from dataflex_hooks.testing.watch import Note, changes

_VARIANTS: tuple[tuple[str, str, Variant], ...] = (
    ("rows", "with rows and candidates in another order", shuffled),
    ("uids", "with other uids", renamed),
    ("padding", "with wider padding and other numbers outside response_mask", padded_otherwise),
)


@dataclass
class Check:
    """One plugin under its contract.

    Attributes:
        make: gives a new plugin each time.
        config, skip, rtol: as for :func:`~dataflex_hooks.testing.assert_plugin_contract`.
        name: of the plugin's class, once :meth:`declared` has made one.
    """

    make: Callable[[], object]
    config: Mapping[str, Any] | None
    skip: frozenset[str]
    rtol: float
    name: str = "the plugin"

    def declared(self) -> dict[str, tuple[str, ...]]:
        """Register one plugin; return the fields it declares by hook."""
        plugin = self.make()
        self.name = type(plugin).__name__
        runner = WatchedRunner(plugin, self.config)
        (entry,) = (entry for entry in runner.hooks._entries.values() if entry.plugin is plugin)
        described = entry.describe()
        pair = [described[role] for role in ("scorer", "actuator") if described[role]]
        self.name += f" ({' -> '.join(pair)})" if pair else ""
        return dict(entry.declared.requires)

    def find(self, steps: Sequence[Step]) -> dict[str, str]:
        """Return what is wrong by property."""
        plain = [step.copy() for step in steps]
        runner = self._runner()
        try:
            outcomes = _play(runner, plain)
        except PluginError as error:
            changed = _changed(runner, steps, plain)
            if changed:
                return {"mutation": f"{_noted(plain, 'changed', changed)} in place ({error})"}
            return {"decisions": f"{_where(plain, error.origin.step)}{error}"}
        except ConfigError as error:
            return {"registration": f"with the domains {', '.join(runner.domains)}, {error}"}
        changed = _changed(runner, steps, plain)
        if changed and "mutation" not in self.skip:
            return {"mutation": f"{_noted(plain, 'changed', changed)} in place"}
        if "determinism" not in self.skip and (text := self._repeated(steps, runner, outcomes)):
            return {"determinism": text}
        found: dict[str, str] = {}
        first = steps[: len(steps) // 2]
        if "acts" not in self.skip and not any(acts(step, out) for step, out in zip(plain, outcomes, strict=True)):
            found["acts"] = why_nothing(steps, outcomes, LONE)
        for name, how, variant in _VARIANTS:
            if name not in self.skip and (text := self._varied(first, outcomes, variant)):
                found[name] = f"{how}, {text}"
        if "state" not in self.skip and (text := self._resumed(steps, outcomes)):
            found["state"] = text
        return found

    def _runner(self) -> WatchedRunner:
        return WatchedRunner(self.make(), self.config)

    def _repeated(self, steps: Sequence[Step], first: WatchedRunner, outcomes: Sequence[Outcome]) -> str | None:
        if first.hooks.drew:
            return _noted(steps, "drew from the global generator of", first.hooks.drew)
        text = self._varied(steps, outcomes, Step.copy)
        return text and f"the second time, {text}"

    def _varied(self, steps: Sequence[Step], outcomes: Sequence[Outcome], variant: Variant) -> str | None:
        changed = [variant(step.copy()) for step in steps]
        runner = self._runner()
        try:
            others = _play(runner, changed)
        except PluginError as error:
            return f"it failed {_where(changed, error.origin.step)}{error}"
        return _first_difference(steps, outcomes[: len(steps)], changed, others, self.rtol)

    def _resumed(self, steps: Sequence[Step], outcomes: Sequence[Outcome]) -> str | None:
        half = len(steps) // 2
        before, after = self._runner(), self._runner()
        _play(before, [step.copy() for step in steps[:half]])
        last = steps[half - 1].ctx.step
        try:
            saved = through_files(before.hooks.state_dict(last))
            after.resume(before, saved, last)
            again = through_files(after.hooks.state_dict(last))
            others = _play(after, [step.copy() for step in steps[half:]])
        except PluginError as error:
            return f"after step {last}, {error}"
        stateful = saved["plugin"].state is not None
        if stateful and not same_state(saved["plugin"].state, again["plugin"].state):
            return f"after step {last}, state_dict gives something else once load_state_dict has taken it"
        text = _first_difference(steps[half:], outcomes[half:], steps[half:], others, self.rtol)
        why = "" if stateful else "; it has no state_dict and load_state_dict"
        return text and f"resumed after step {last}, {text}{why}"


def _play(runner: HookRunner, steps: Sequence[Step]) -> list[Outcome]:
    return [runner.step(step.batch, prompts=step.prompts, ctx=step.ctx) for step in steps]


def _first_difference(
    steps: Sequence[Step], outcomes: Sequence[Outcome], changed: Sequence[Step], others: Sequence[Outcome], rtol: float
) -> str | None:
    for step, one, variant, other in zip(steps, outcomes, changed, others, strict=True):
        if text := difference(step, one, variant, other, rtol):
            return f"{_where(steps, step.ctx.step)}{text}"
    return None


def _where(steps: Sequence[Step], number: int | None) -> str:
    return next((f"on step {number} ({step.name}): " for step in steps if step.ctx.step == number), "")


def _changed(runner: WatchedRunner, steps: Sequence[Step], played: Sequence[Step]) -> list[Note]:
    """What was changed in a hook, or else in ``observe``, which is no hook: ``played`` were copies of ``steps``."""
    pairs = zip(steps, played, strict=True)
    left = ((step.ctx.step, changes({"batch": step.batch}, {"batch": copy.batch})) for step, copy in pairs)
    return runner.hooks.changed or [("observe", number, names) for number, names in left if names]


def _noted(steps: Sequence[Step], what: str, notes: Sequence[Note]) -> str:
    hook, number, names = notes[0]
    return f"{_where(steps, number)}{hook} {what} {', '.join(names)}"
