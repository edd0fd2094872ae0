"""What a comparison runs: arms, seeds and the overrides that each arm adds to what all have in common."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflex_verl.commands.demo_plan import NO_STRATEGY, BadOption
from dataflex_verl.local.settings import override_key
from dataflex_verl.modes import MODE

OWN_TASK = "data.train_files"
"""Overrides with this setting are a task of the user's own; without it they change the demo's."""

_OURS = {"sync": "dataflex_sync", "colocate_async": "dataflex_colocate_async"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison.

    Attributes:
        name: of its folder and in all results.
        given: as written on the command line, without the name.
        overrides: what it adds to the overrides that all arms have.
    """

    name: str
    given: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Design:
    """What is compared.

    Attributes:
        arms: the baseline first.
        seeds: each arm runs once under each.
        steps: training steps of every run.
        common: the user's own overrides, for all arms.
        local: whether an own task runs on this machine's CPU; the demo always does.
        learning_rate: of the demo's actor, or None for its default.
        metric: a metric to compare instead of validation, or None.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    steps: int
    common: tuple[str, ...] = ()
    local: bool = False
    learning_rate: float | None = None
    metric: str | None = None

    @property
    def own_task(self) -> bool:
        return any(override_key(text) == OWN_TASK for text in self.common)


def choose_arms(given: Sequence[str], baseline: str | None, common: Sequence[str] = ()) -> tuple[Arm, ...]:
    """Read ``--arm`` and ``--baseline``.

    Args:
        given: each ``[NAME=]WHAT``; WHAT is ``none``, a preset, presets joined by ``+``, or a file of overrides.
        baseline: name of the arm that the others are compared with; without it ``none``, else the first.
        common: overrides that all arms have; they may choose the trainer mode.

    Raises:
        BadOption: with what is accepted.
    """
    arms = [_arm(text, common) for text in given]
    names = [arm.name for arm in arms]
    if len(arms) < 2:
        raise BadOption(f"--arm: got {len(arms)}; accepted: two or more, one of them the baseline, as --arm none")
    for name in names:
        if names.count(name) > 1:
            raise BadOption(f"--arm: got {name!r} twice; accepted: names of their own, as --arm again={name}")
    if baseline is None:
        baseline = NO_STRATEGY if NO_STRATEGY in names else names[0]
    if baseline not in names:
        raise BadOption(_message("--baseline", baseline, names))
    return tuple(sorted(arms, key=lambda arm: arm.name != baseline))


def choose_seeds(given: str) -> tuple[int, ...]:
    """Read ``--seeds``: a number of seeds (``3`` is 0, 1, 2) or a list of them (``4,5,9``).

    Raises:
        BadOption: with what is accepted.
    """
    words = [word.strip() for word in given.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words) or (len(words) == 1 and int(words[0]) < 1):
        raise BadOption(f"--seeds: got {given!r}; accepted: how many, as 3, or which, as 0,1,2")
    seeds = tuple(map(int, words)) if len(words) > 1 or given.strip().endswith(",") else tuple(range(int(words[0])))
    if len(set(seeds)) < len(seeds):
        raise BadOption(f"--seeds: got {given!r}; accepted: each seed once")
    return seeds


def merged(base: Sequence[str], added: Sequence[str]) -> list[str]:
    """``base`` without what ``added`` sets, and ``added``."""
    keys = {override_key(text) for text in added}
    return [*(text for text in base if override_key(text) not in keys), *added]


def _arm(text: str, common: Sequence[str]) -> Arm:
    name, equals, what = text.partition("=")
    # An override instead of an arm's name.
    if equals and not _NAME.fullmatch(name):
        raise BadOption(f"--arm: got {text!r}; accepted: NAME=WHAT with letters, digits and ._+- in the name")
    what = what if equals else text
    path = Path(what).expanduser()
    if path.is_file():
        overrides = _read(path)
        name = name if equals else path.stem
    elif what == NO_STRATEGY:
        overrides = []
    else:
        overrides = [f"+dataflex=[{','.join(_presets(what))}]"]
    if not _NAME.fullmatch(name):
        raise BadOption(f"--arm: got {name!r}; accepted: a name of letters, digits and ._+-, as --arm mine={what}")
    return Arm(name, what, tuple(_with_mode(overrides, common)))


def _presets(what: str) -> list[str]:
    from dataflex_verl.presets.providers import all_presets

    known = [preset.name for preset in all_presets()[0]]
    names = [word.strip() for word in what.split("+")]
    for name in names:
        if name not in known:
            raise BadOption(_message("--arm", name, [*known, NO_STRATEGY], ", or a file of overrides"))
        if names.count(name) > 1:
            raise BadOption(f"--arm: got {name!r} twice in {what!r}; accepted: each preset once")
    return names


def _read(path: Path) -> list[str]:
    """One override a line; empty lines and those with # in front say nothing. Quotes of a shell may stand."""
    overrides = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip().removesuffix("\\").strip()
        if not text or text.startswith("#"):
            continue
        words = shlex.split(text) if text[0] in "'\"" else [text]
        if len(words) != 1 or "=" not in words[0].lstrip("~"):
            raise BadOption(f"{path}, line {number}: got {text!r}; accepted: one Hydra override, key=value")
        overrides += words
    return overrides


def _with_mode(overrides: Sequence[str], common: Sequence[str]) -> list[str]:
    """Name our trainer mode where an arm has something of ours and names none itself."""
    keys = [override_key(text) for text in overrides]
    if MODE in keys or not any(key == "dataflex" or key.startswith("dataflex.") for key in keys):
        return list(overrides)
    chosen = next((text.partition("=")[2] for text in common if override_key(text) == MODE), "sync")
    return [f"{MODE}={_OURS.get(chosen, chosen)}", *overrides]


def _message(option: str, given: str, known: Sequence[str], otherwise: str = "") -> str:
    # Torch comes with it, and is wanted only here.
    from dataflex_hooks.errors import did_you_mean, one_of

    hint = did_you_mean(given, known)
    return f"{option}: got {given!r}; accepted: {one_of(known)}{otherwise}" + (f"; {hint}" if hint else "")
