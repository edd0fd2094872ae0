"""A demo run as a verl command line: which settings, which strategies, and how to do the same without this command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataflex_hooks.errors import Problem, did_you_mean
from dataflex_verl import presets
from dataflex_verl.commands.train import VERL_MAIN, add_local_overrides
from dataflex_verl.local.settings import local_environment
from dataflex_verl.presets.providers import BadPreset, all_presets

if TYPE_CHECKING:
    from dataflex_verl.demo.build import DemoFiles

METRICS_VARIABLE = "VERL_FILE_LOGGER_PATH"
NO_STRATEGY = "none"
DEFAULT_STRATEGIES = ("difffilter",)
LEARNING_RATE = 5e-4
# One pass over the 360 training prompts takes 30 steps, so of 40 steps the first and the last ten see the same ones.
STEPS = 40
PROMPTS_PER_STEP = 12
ROLLOUTS_PER_PROMPT = 8
VALIDATION_SAMPLES = 2


class BadOption(ValueError):
    """An option of the command that cannot be used."""


@dataclass(frozen=True)
class DemoPlan:
    """What one demo run trains with.

    Attributes:
        files: model, data and reward function.
        steps: training steps.
        seed: of the data order and of the sampling noise.
        strategies: presets in call order; none means verl's own sync trainer.
        learning_rate: of the actor.
    """

    files: DemoFiles
    steps: int
    seed: int
    strategies: tuple[str, ...]
    learning_rate: float = LEARNING_RATE

    def overrides(self) -> list[str]:
        """The run's own Hydra overrides, without those of the local backend."""
        mode = "dataflex_sync" if self.strategies else "sync"
        return [
            f"data.train_files={self.files.train_parquet}",
            f"data.val_files={self.files.val_parquet}",
            f"data.train_batch_size={PROMPTS_PER_STEP}",
            "data.shuffle=False",
            f"data.seed={self.seed}",
            "data.max_prompt_length=16",
            "data.max_response_length=6",
            f"actor_rollout_ref.model.path={self.files.model_dir}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS_PER_STEP}",
            f"actor_rollout_ref.actor.optim.lr={self.learning_rate:g}",
            "actor_rollout_ref.actor.optim.weight_decay=0.01",
            "actor_rollout_ref.actor.grad_clip=1.0",
            f"actor_rollout_ref.rollout.n={ROLLOUTS_PER_PROMPT}",
            f"actor_rollout_ref.rollout.seed={self.seed}",
            "actor_rollout_ref.rollout.temperature=1.0",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            f"actor_rollout_ref.rollout.val_kwargs.n={VALIDATION_SAMPLES}",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            f"reward.custom_reward_function.path={self.files.reward_path}",
            "algorithm.adv_estimator=grpo",
            "trainer.logger=[console,file]",
            "trainer.val_before_train=True",
            f"trainer.test_freq={self.steps}",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.total_epochs={self.steps}",
            f"trainer.v1.trainer_mode={mode}",
            *presets.overrides(self.strategies),
        ]

    def stock_command(self) -> str:
        """A shell command that does the same run with verl's own entry point, logging to ``metrics.jsonl``."""
        environment = {**local_environment(), METRICS_VARIABLE: "metrics.jsonl"}
        lines = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        lines += [f"python -m {VERL_MAIN}", *(f"  {shlex.quote(text)}" for text in self.all_overrides())]
        return " \\\n".join(lines)

    def all_overrides(self) -> list[str]:
        """Everything that verl gets: the local backend's overrides, then the run's own."""
        return add_local_overrides(self.overrides())


def choose_strategies(given: Sequence[str]) -> tuple[str, ...]:
    """Check the names given with ``--strategy``.

    Raises:
        BadOption: an unknown name, one that two packages bring, a name given twice, or ``none`` beside another.
    """
    chosen = tuple(given) or DEFAULT_STRATEGIES
    known = [*(preset.name for preset in all_presets()[0]), NO_STRATEGY]
    for name in chosen:
        if name not in known:
            accepted = f"one of {', '.join(known)}"
            raise BadOption(str(Problem("--strategy", name, accepted, did_you_mean(name, known))))
        if name != NO_STRATEGY:
            try:
                presets.block(name)
            except BadPreset as error:
                raise BadOption(f"--strategy: {error}") from error
        if chosen.count(name) > 1:
            raise BadOption(f"--strategy: got {name!r} twice; accepted: each strategy once")
    if chosen == (NO_STRATEGY,):
        return ()
    if NO_STRATEGY in chosen:
        raise BadOption(f"--strategy: got {NO_STRATEGY!r} beside others; accepted: {NO_STRATEGY} alone")
    return chosen
