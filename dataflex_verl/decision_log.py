"""What the trainer tells a decision log, step by step; files are written beside the step's path, in a thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from dataflex_hooks import ConfigError, HookManager, LossCoefficients, MergedReward, MergedUpdate, Problem
from dataflex_hooks.decision_log.files import FOLDER, state_folder
from dataflex_hooks.decision_log.schema import Facts
from dataflex_hooks.domain_stats import DOMAIN_COLUMN, ROW_COLUMN
from dataflex_verl.estimators import why_no_group_advantages

if TYPE_CHECKING:
    from dataflex_hooks import RolloutBatch, StepContext
    from dataflex_hooks.decision_log.columns import UpdateRecord
    from dataflex_verl.mixing import DomainMixing

SETTING = "dataflex.log_decisions"
_AT_REWARD = frozenset({"rm_scores", "prompts", "responses", "extra_fields", ROW_COLUMN})
_AT_UPDATE = frozenset({"advantages"})
_TOKENS = frozenset({"old_log_probs", "entropy"})
_DOMAINS = (DOMAIN_COLUMN, "domain", "data_source")
_log = logging.getLogger("dataflex_verl")


def problems(hooks: HookManager) -> list[Problem]:
    """What keeps this process from writing the log that the configuration asks for."""
    given = hooks.config.log_decisions
    if not given or find_spec("pyarrow") is not None:
        return []
    accepted = "false in this environment: pyarrow, which writes the files, is not installed"
    return [Problem(SETTING, given, accepted, "pip install 'dataflex-verl[analysis]'")]


def log_folder(config: DictConfig, hooks: HookManager) -> Path:
    """Where the log of a run is: ``dataflex.log_dir``, or ``decisions`` beside the run's checkpoints."""
    return Path(hooks.config.log_dir or Path(config.trainer.default_local_dir) / FOLDER)


def open_log(config: DictConfig, hooks: HookManager, coefficients: LossCoefficients, plan: list[str]) -> RunLog | None:
    """Return the log of a run, None where it keeps none.

    Raises:
        ConfigError: its folder cannot be made.
    """
    # What builds plugins also asks this module whether a log can be written.
    from dataflex_verl.startup import run_facts

    if not hooks.config.log_decisions:
        return None
    folder = log_folder(config, hooks)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        accepted = f"a folder that can be written: {error}"
        raise ConfigError([Problem("dataflex.log_dir", str(folder), accepted, cause=error)]) from error
    block = OmegaConf.select(config, "dataflex")
    facts = Facts(
        plan=tuple(plan),
        dataflex="" if block is None else OmegaConf.to_yaml(block, resolve=True),
        estimator=str(config.algorithm.adv_estimator),
        mode=str(config.trainer.v1.trainer_mode),
        seed=config.data.get("seed") or 0,
        rollouts=OmegaConf.select(config, "actor_rollout_ref.rollout.n"),
        response_length=OmegaConf.select(config, "actor_rollout_ref.rollout.response_length"),
        coefficients={
            "kind": coefficients.kind,
            "per_token": coefficients.per_token,
            "divides_by_rows": coefficients.divides_by_rows,
            "source": coefficients.source,
        },
        tokens=hooks.config.log_decisions == "tokens",
        settings={"group_advantages": why_no_group_advantages(config) is None, "facts": run_facts(config)},
    )
    return RunLog(folder, hooks, facts)


@contextmanager
def written_to_the_end(log: RunLog | None) -> Iterator[None]:
    """Leave only once every whole step is on the disk, however the training inside ends.

    Raises:
        OSError: the last step cannot be written; where training has failed anyway, that is logged instead.
    """
    try:
        yield
    except BaseException:
        try:
            if log is not None:
                log.wait()
        except Exception:
            _log.exception("the decision log lacks its last step, which could not be written")
        raise
    if log is not None:
        log.wait()


class RunLog:
    """The decision log of a run.

    Args:
        folder: of the log.
        hooks: the run's plugins.
        facts: for the metadata of every file.
    """

    def __init__(self, folder: Path, hooks: HookManager, facts: Facts) -> None:
        self.folder, self.hooks, self.facts = folder, hooks, facts
        key = hooks.config.shared.get("domain_key")
        self._domains = (DOMAIN_COLUMN, str(key)) if key else _DOMAINS
        self._records: list[UpdateRecord] = []
        self._evicted: list[RolloutBatch] = []
        self._mixing: DomainMixing | None = None
        self._writer: Any = None
        self._labels: Any = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dataflex-log")
        self._pending: Future[Any] | None = None

    def fields(self, hook: str) -> frozenset[str]:
        """Return what the log reads at a hook, as far as it is there."""
        if hook == "post_reward":
            return _AT_REWARD | set(self._domains)
        return _AT_UPDATE | (_TOKENS if self.facts.tokens else frozenset())

    def watch(self, mixing: DomainMixing) -> None:
        """Take note of a run's domains, and of the groups that verl's filter evicts."""
        self._mixing = mixing
        mixing.on_evicted = self._evicted.append

    def resumed(self, step: int) -> None:
        """Keep the plugins' state with which a run goes on after ``step``, for a replay that begins there."""
        from dataflex_verl import state_files

        if step > 0 and self.hooks.labels:
            state_files.write(state_folder(self.folder, step), self.hooks, step, {})

    def rewarded(self, batch: RolloutBatch, merged: MergedReward, ctx: StepContext) -> None:
        """Note all rows of a rollout and what was decided about them."""
        from dataflex_hooks.decision_log.columns import UpdateRecord

        applied = self.hooks.config.apply
        evicted, self._evicted[:] = list(self._evicted), []
        record = UpdateRecord(ctx.step, ctx.local_update, applied, batch, merged, evicted=evicted)
        self._records.append(record)

    def advantaged(
        self, batch: RolloutBatch, merged: MergedUpdate, skip_update: bool, fill: Mapping[str, float] | None
    ) -> None:
        """Note the rows that are left when advantages are known, and what was decided about those."""
        record = self._records[-1]
        record.advantaged, record.decided = batch, merged
        record.skip_update, record.fill = skip_update, fill

    def end_of_step(self) -> None:
        """Write the step in the background, once that of the step before is on the disk."""
        self.wait()
        records, self._records = self._records, []
        if not records:
            return
        info = {} if self._mixing is None else self._mixing.described(self.hooks.scorer_means(records[-1].step))
        self._pending = self._pool.submit(self._write, records, info)

    def wait(self) -> None:
        """Wait until what was handed over is on the disk; raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, records: list[UpdateRecord], info: dict[str, Any]) -> None:
        from dataclasses import replace

        from dataflex_hooks.decision_log.columns import signal_keys, table
        from dataflex_hooks.decision_log.schema import Labels
        from dataflex_hooks.decision_log.writer import LogWriter

        if self._writer is None:
            labels = Labels.of(self.hooks.plan(), self.facts.tokens)
            self._labels = replace(labels, signals=signal_keys(records[0].rewarded))
            facts = self.facts
            if self._mixing is not None:
                dataset = self._mixing.sampler.dataset
                facts = replace(facts, domains=self._mixing.domains, fingerprint=dataset.fingerprint)
            self._writer = LogWriter(self.folder, facts)
        shares = dict(zip(self._mixing.domains, info["proportions"], strict=True)) if self._mixing else None
        tables = [table(record, self._labels, self._domains, shares) for record in records]
        self._writer.write(records[-1].step, tables, info)
