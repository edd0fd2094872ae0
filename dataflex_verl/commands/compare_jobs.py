"""The runs of a comparison: their overrides, their folders, and a key that says whether two runs are the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflex_verl.commands.compare_design import Arm, Design, merged
from dataflex_verl.commands.demo_plan import LEARNING_RATE, BadOption, DemoPlan
from dataflex_verl.local.settings import override_key
from dataflex_verl.versions import package_versions

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dataflex_verl.demo.build import DemoFiles

SEEDS = ("data.seed", "actor_rollout_ref.rollout.seed")
"""Settings that pair the runs of a seed."""

_MODEL = "actor_rollout_ref.model.path"
_NOT_TRAINING = ("analysis", "commands", "catalogue")
_HASHED_BYTES = 64 * 2**20
SHORT = 12


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        arm: its arm.
        seed: of data order and sampling noise; on the demo task, of tasks and model too.
        overrides: everything that the trainer gets, without what depends on the run's folder.
        folder: where it writes.
        versions: of the packages, of Python, and of this package's code.
        inputs: contents of the files that it reads, in short.
    """

    arm: Arm
    seed: int
    overrides: tuple[str, ...]
    folder: Path
    versions: Mapping[str, str] = field(repr=False)
    inputs: Mapping[str, str] = field(repr=False)

    def identity(self) -> dict[str, Any]:
        """Everything that the results of the run depend on, in plain values."""
        return {"overrides": list(self.overrides), "versions": dict(self.versions), "inputs": dict(self.inputs)}

    @property
    def key(self) -> str:
        """A hash of :meth:`identity`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


def make_jobs(design: Design, out: Path, files_of: Mapping[int, DemoFiles]) -> list[Job]:
    """The runs, all arms of a seed before the next seed, so that what was finished is whole pairs.

    Args:
        design: what is compared.
        out: directory of the comparison.
        files_of: the demo's files by seed; nothing for a task of the user's own.
    """
    versions, seen = run_versions(), {}
    jobs = []
    for seed in design.seeds:
        for arm in design.arms:
            overrides = tuple(_overrides(design, arm, seed, files_of))
            if overrides not in seen:
                seen[overrides] = dict(_inputs(overrides))
            jobs.append(Job(arm, seed, overrides, out / arm.name / f"seed-{seed}", versions, seen[overrides]))
    return jobs


def _overrides(design: Design, arm: Arm, seed: int, files_of: Mapping[int, DemoFiles]) -> list[str]:
    if not design.own_task:
        rate = LEARNING_RATE if design.learning_rate is None else design.learning_rate
        plan = DemoPlan(files_of[seed], design.steps, seed, (), rate)
        return merged(merged(plan.overrides(), design.common), arm.overrides)
    ours = [
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.total_training_steps={design.steps}",
        f"trainer.total_epochs={design.steps}",
        # A run that found another's checkpoint would go on from there.
        "trainer.resume_mode=disable",
    ]
    return merged(merged(_defaults(design), merged(design.common, ours)), arm.overrides)


def _defaults(design: Design) -> list[str]:
    """What the user's overrides may change: validate at the end, save nothing, log what we read."""
    given = {override_key(text): text.partition("=")[2] for text in design.common}
    defaults = [f"trainer.test_freq={design.steps}", "trainer.save_freq=-1"]
    defaults = [text for text in defaults if override_key(text) not in given]
    if "file" not in given.get("trainer.logger", ""):
        defaults.append("trainer.logger=[console,file]")
    return defaults


def run_versions() -> dict[str, str]:
    """Versions of what a run depends on; ``code`` is a hash of this package's modules and presets."""
    return {**package_versions(), "code": _code()}


def _code() -> str:
    """Hash of the modules that take part in a training."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("dataflex_hooks", "dataflex_verl"):
        for path in sorted((root / package).rglob("*")):
            parts = path.relative_to(root / package).parts
            if path.suffix in (".py", ".yaml") and not parts[0].startswith(_NOT_TRAINING):
                digest.update(f"{package}/{'/'.join(parts)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:SHORT]


def _inputs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Contents of the files that overrides name, and of the model's directory."""
    for text in overrides:
        key, value = override_key(text), text.partition("=")[2]
        for name in value.strip("[]").split(","):
            path = Path(os.path.expanduser(name.strip("'\" ")))
            try:
                parts = sorted(path.rglob("*")) if key == _MODEL and path.is_dir() else [path]
                found = [part for part in parts if part.is_file()]
            except (OSError, ValueError):
                # A value that no path can be, such as one that is too long.
                continue
            for part in found:
                yield f"{key}:{part.relative_to(path.parent)}", _content(part)


def _content(path: Path) -> str:
    """A hash of a small file; size and time of a large one."""
    status = path.stat()
    if status.st_size > _HASHED_BYTES:
        return f"{status.st_size} bytes of {status.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:SHORT]


def refuse_seeds(design: Design) -> None:
    """Refuse seeds of an arm's own: its runs would be no pairs with the baseline's, or one run under several names.

    Raises:
        BadOption: naming the setting.
    """
    # Those in a task of the user's own are replaced by ours; in the demo's they would replace ours.
    common = () if design.own_task else design.common
    for option, overrides in (*((f"--arm {arm.name}", arm.overrides) for arm in design.arms), ("after --", common)):
        for text in overrides:
            if override_key(text) in SEEDS:
                raise BadOption(f"{option}: got {text}; accepted: nothing of it: --seeds gives every run its seed")


def rollouts_of(config: DictConfig, steps: int) -> int | None:
    """How many rollouts a run generates for training; None where that depends on what is filtered out."""
    from omegaconf import OmegaConf

    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        return None
    return steps * int(config.data.train_batch_size) * int(config.actor_rollout_ref.rollout.n)
