"""What a checkpoint keeps of a run's plugins, and what a run that resumes makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dataflex_hooks.entries import Entry, failure
from dataflex_hooks.errors import Described, PluginError, Problem
from dataflex_hooks.state_values import Packed, StateValueError, pack, unpack

Resume = Literal["strict", "matching", "fresh"]
RESUME: tuple[Resume, ...] = ("strict", "matching", "fresh")
SETTING = "dataflex.resume"


@dataclass(frozen=True)
class SavedPlugin:
    """One plugin in a checkpoint.

    Attributes:
        plugin: entry point or ``module:Class``, as the configuration named it.
        scorer, actuator: names of its components, None without.
        source: distribution and version.
        disabled: it had failed under ``on_error: disable``; nobody knows what state it is in, so none is kept.
        state: None for a plugin without state.
    """

    plugin: str
    scorer: str | None = None
    actuator: str | None = None
    source: str = ""
    disabled: bool = False
    state: Packed | None = None

    @property
    def what(self) -> str:
        """What it is, to compare by and to show."""
        pair = f" {self.scorer} -> {self.actuator}" if self.scorer or self.actuator else ""
        return f"{self.plugin}{pair}"


@dataclass(frozen=True)
class Restored:
    """Labels by what became of them: state ``restored``, started ``fresh``, still ``disabled``, state ``lost``."""

    restored: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def is_stateful(plugin: object) -> bool:
    """Whether a plugin has state: a ``state_dict``, and no attribute ``stateful`` that says False."""
    return hasattr(plugin, "state_dict") and bool(getattr(plugin, "stateful", True))


def collect(entries: Iterable[Entry], disabled: set[str], step: int) -> dict[str, SavedPlugin]:
    """Ask every plugin for its state, by label.

    A plugin that fails here under ``on_error: disable`` is added to ``disabled``, and saved as such.

    Raises:
        PluginError: its ``state_dict`` failed, or returned something that cannot be stored, with the path to it.
    """
    saved: dict[str, SavedPlugin] = {}
    for entry in entries:
        try:
            saved[entry.label] = _saved(entry, entry.label in disabled, step)
        except PluginError as error:
            entry.disable_or_raise(error.origin, error, disabled)
            saved[entry.label] = described(entry, disabled=True)
    return saved


def described(entry: Entry, disabled: bool = False, state: Packed | None = None) -> SavedPlugin:
    """Return what a checkpoint says of a plugin."""
    row = entry.describe()
    return SavedPlugin(row["plugin"], row["scorer"], row["actuator"], entry.source, disabled, state)


def _saved(entry: Entry, disabled: bool, step: int) -> SavedPlugin:
    if disabled or not is_stateful(entry.plugin):
        return described(entry, disabled)
    origin = entry.origin("state_dict", step)
    try:
        return described(entry, state=pack(entry.plugin.state_dict()))
    except StateValueError as error:
        raise PluginError(origin, str(error)) from None
    except Exception as error:
        raise failure(origin, error) from error


def differences(entries: Iterable[Entry], saved: Mapping[str, SavedPlugin]) -> list[str]:
    """Say what differs between the plugins with state in a checkpoint and in this run; empty when nothing does.

    A plugin that was disabled has no state left to miss; it counts as there, and as gone without loss.
    """
    here = {entry.label: entry for entry in entries if is_stateful(entry.plugin)}
    kept = {label: plugin for label, plugin in saved.items() if plugin.state is not None or plugin.disabled}
    found = [
        f"{label!r} ({plugin.what}) is in the checkpoint only"
        for label, plugin in kept.items()
        if label not in here and plugin.state is not None
    ]
    for label, entry in here.items():
        now = described(entry).what
        if label not in kept:
            found.append(f"{label!r} ({now}) has state in this run only")
        elif kept[label].what != now:
            found.append(f"{label!r} is {kept[label].what} in the checkpoint and {now} in this run")
    return found


def problems(entries: Iterable[Entry], saved: Mapping[str, SavedPlugin], how: Resume, place: str) -> list[Problem]:
    """Say so if this run cannot take up the plugins of a checkpoint.

    Args:
        entries: the plugins of this run.
        saved: those of the checkpoint.
        how: ``"strict"`` wants the same plugins with state; the others take what comes.
        place: where the checkpoint stands.
    """
    found = differences(entries, saved) if how == "strict" else []
    if not found:
        return []
    accepted = "the plugins that the checkpoint was written with"
    hint = (
        f"+{SETTING}=matching gives state to the plugins that are the same and starts the others afresh, "
        f"+{SETTING}=fresh starts all afresh"
    )
    return [Problem(SETTING, Described(f"strict, and {place} has other plugins: {'; '.join(found)}"), accepted, hint)]


def restore(entries: Iterable[Entry], saved: Mapping[str, SavedPlugin], step: int) -> Restored:
    """Give every plugin the state that the checkpoint has for the same plugin under the same label.

    Under ``strict`` the host has refused differences before, with :func:`problems`.

    Raises:
        PluginError: a plugin could not take its state; its own exception is the cause.
    """
    by_label = {entry.label: entry for entry in entries}
    restored, fresh, disabled = [], [], []
    for label, entry in by_label.items():
        known = saved.get(label)
        same = known is not None and known.what == described(entry).what
        if known is not None and same and known.disabled:
            disabled.append(label)
        elif not is_stateful(entry.plugin):
            continue
        elif known is not None and same and known.state is not None:
            _give(entry, known.state, step)
            restored.append(label)
        else:
            fresh.append(label)
    lost = [label for label, plugin in saved.items() if plugin.state is not None and label not in restored]
    return Restored(tuple(restored), tuple(fresh), tuple(disabled), tuple(lost))


def _give(entry: Entry, state: Packed, step: int) -> None:
    origin = entry.origin("load_state_dict", step)
    try:
        entry.plugin.load_state_dict(unpack(state))
    except Exception as error:
        raise failure(origin, error, f"cannot take the state saved at step {step}: ") from error
