"""State of the hooks in verl's checkpoints: ``global_step_N/dataflex/``, beside verl's own ``data.pt``.

It is written before verl saves its own part, and so before verl's tracker file names the step. verl never looks into
the folder: its own trainer resumes the checkpoint, and a run without plugins writes none.

Like ``data.pt`` the folder is written by the trainer's process on its own machine, below
``trainer.default_local_dir``; verl copies neither to ``trainer.default_hdfs_dir``.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dataflex_hooks import HookManager, Problem
from dataflex_hooks.errors import Described
from dataflex_verl import state_files
from dataflex_verl.state_files import CheckpointError

DATA = "data.pt"
TRACKER = "latest_checkpointed_iteration.txt"

_log = logging.getLogger("dataflex_verl")


def step_folder(config: DictConfig, step: int) -> Path:
    """Where verl writes the checkpoint of ``step``."""
    return Path(config.trainer.default_local_dir) / f"global_step_{step}"


def resume_folder(config: DictConfig) -> Path | None:
    """The checkpoint folder that verl will resume from, None when it starts from scratch."""
    mode = OmegaConf.select(config, "trainer.resume_mode")
    if mode == "resume_path":
        path = OmegaConf.select(config, "trainer.resume_from_path")
        return Path(path).absolute() if isinstance(path, str) else None
    root = OmegaConf.select(config, "trainer.default_local_dir")
    if mode != "auto" or not isinstance(root, str):
        return None
    try:
        step = int((Path(root) / TRACKER).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    folder = step_folder(config, step).absolute()
    return folder if folder.is_dir() else None


def problems(config: DictConfig, hooks: HookManager) -> list[Problem]:
    """What keeps a run from taking up the state of the checkpoint it resumes from; to be asked before it starts."""
    checkpoint = resume_folder(config)
    if checkpoint is None:
        return []
    prompts = _prompt_problems(checkpoint, hooks)
    if hooks.config.resume == "fresh":
        return prompts
    try:
        saved = state_files.read(checkpoint, with_tensors=False)
    except CheckpointError as error:
        hint = "+dataflex.resume=fresh starts all plugins afresh"
        accepted = f"a checkpoint that can be read: {error}"
        return [*prompts, Problem("dataflex.resume", hooks.config.resume, accepted, hint)]
    return [*prompts, *([] if saved is None else hooks.state_problems(saved.plugins, str(checkpoint)))]


def _prompt_problems(checkpoint: Path, hooks: HookManager) -> list[Problem]:
    """Say so if the domains' streams cannot go on where they were: verl only warns, and begins the data anew."""
    ours = state_files.is_domain_state(checkpoint / DATA)
    if not (hooks.mixes or hooks.draws):
        if not ours:
            return []
        accepted = (
            "a run with a plugin that mixes domains or chooses prompts: verl's own data loader cannot go on there"
        )
        return [Problem("trainer.resume_mode", Described(f"{checkpoint / DATA} of the domain sampler"), accepted)]
    if ours or hooks.config.resume == "fresh":
        return []
    found = "which is not there" if ours is None else "which another data loader wrote"
    given = Described(f"a checkpoint whose prompts come from {checkpoint / DATA}, {found}")
    hint = "+dataflex.resume=fresh begins every domain with its first prompts"
    return [Problem("trainer.resume_mode", given, "a checkpoint of the domain sampler", hint)]


def restore(checkpoint: Path, hooks: HookManager) -> dict[str, Any]:
    """Give the plugins their state and return ``ctx.last_metrics`` of the checkpoint's step.

    A checkpoint without our folder (verl's own, or of a run without plugins) is adopted with a warning.

    Raises:
        CheckpointError: the state cannot be read.
        ConfigError: ``dataflex.resume`` is strict and the plugins with state are others.
        PluginError: a plugin could not take its state.
    """
    saved = state_files.read(checkpoint) if hooks.config.resume != "fresh" else None
    if saved is None:
        why = (
            "dataflex.resume=fresh"
            if hooks.config.resume == "fresh"
            else f"{checkpoint} has no {state_files.FOLDER} folder"
        )
        if hooks.labels:
            _log.warning("%s: all plugins start afresh at this point of the run", why)
        return {}
    found = hooks.load_state_dict(saved.plugins, saved.step, str(checkpoint))
    if found.restored:
        _log.info("state of %s restored from %s", ", ".join(found.restored), saved.folder)
    for labels, what in (
        (found.fresh, "start afresh: the checkpoint has no state of them"),
        (found.lost, "are in the checkpoint and not in this run: their state is left out"),
        (found.disabled, "had failed and stay disabled (on_error: disable)"),
    ):
        if labels:
            _log.warning("plugins %s %s", ", ".join(labels), what)
    return dict(saved.metrics)


@dataclass
class Kept:
    """The folders of this process's checkpoints: ours go with verl's when verl keeps only the latest few."""

    folders: list[Path] = field(default_factory=list)

    def add(self, folder: Path, config: DictConfig, use_critic: bool) -> None:
        """Note a folder just written, and remove those whose model verl has removed."""
        self.folders = [*(known for known in self.folders if known != folder), folder]
        limit = _limit(config, use_critic)
        if limit is None:
            return
        for old in self.folders[:-limit]:
            shutil.rmtree(old, ignore_errors=True)
        self.folders = self.folders[-limit:]


def _limit(config: DictConfig, use_critic: bool) -> int | None:
    trainer = config.trainer
    if trainer.get("remove_previous_ckpt_in_save", False):
        return 1
    limits = [trainer.get("max_actor_ckpt_to_keep", None)]
    limits += [trainer.get("max_critic_ckpt_to_keep", None)] if use_critic else []
    # verl takes anything that is not a positive integer for no limit.
    return max(limits) if all(isinstance(limit, int) and limit > 0 for limit in limits) else None
