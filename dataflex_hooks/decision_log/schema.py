"""What a decision log holds: columns, their types and meanings. ``docs/decision_log.md`` shows these tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
"""Of the format. A reader refuses a newer one; columns that are added do not make a new version."""

FACTS_KEY = b"dataflex_log"
"""Key of a file's metadata: JSON with the version, the plan and what a replay has to know."""
STEPS_KEY = b"dataflex_steps"
"""Key of a file's metadata: JSON, a list of what is known of each step as a whole."""

STATES = ("trained", "masked", "dropped", "evicted", "added")


@dataclass(frozen=True)
class Column:
    """One column: its name, where ``<label>`` and ``<key>`` stand for several; Arrow type; meaning."""

    name: str
    type: str
    meaning: str


COLUMNS = (
    Column("step", "int32", "global training step, from 1"),
    Column("update", "int32", "update within the step, from 0; more than one in asynchronous modes only"),
    Column("uid", "string", "the prompt's id in this step; rows with one uid are rollouts of one prompt"),
    Column("session", "int32", "number of the rollout among those of its prompt"),
    Column("output", "int32", "number of the output within the rollout; several with multi-output agents"),
    Column("dataset_row", "int64", "row of the prompt in the training data; null where the run does not know it"),
    Column("prompt_hash", "int64", "hash of the prompt's tokens: the same prompt in every step, run and machine"),
    Column("response_hash", "int64", "hash of the response's tokens; ties are broken by it"),
    Column("domain", "string", "domain of the prompt; null without a domain column"),
    Column("reward", "float32", "raw reward, before a plugin replaced it and before any KL penalty"),
    Column("new_reward", "float32", "the reward that a plugin put in its place; null where none did"),
    Column("advantage", "float32", "mean over valid tokens; null where none was computed (dropped before)"),
    Column("abs_advantage", "float32", "mean of its absolute value over valid tokens; null likewise"),
    Column("prompt_tokens", "int32", "tokens of the prompt"),
    Column("response_tokens", "int32", "tokens of the response, those of tools included"),
    Column("valid_tokens", "int32", "tokens of it that the model wrote, when rewards were known"),
    Column("loss_tokens", "int32", "the same at the update, after verl's rejection mask; null if dropped before"),
    Column("state", "string", "`trained`, `masked` (in the batch with weight 0), `dropped`, `evicted` or `added`"),
    Column("why", "string", "labels that did not keep the rollout, each with its reason; null where all did"),
    Column("weight", "float32", "merged weight, a mean where tokens differ; null if not updated on"),
    Column("fill", "float32", "factor that made up for an uneven mini-batch after a drop; null is 1"),
    Column("proportion", "float64", "share of the domain that was in force; null without a mixer"),
    Column("skip_update", "bool", "whether the whole update was skipped"),
)
LABEL_COLUMNS = (
    Column(
        "score_<label>",
        "float32",
        "what the plugin ranks by, higher is better; 0 in a band, minus the distance outside",
    ),
    Column("keep_<label>", "bool", "what the plugin alone would keep; only for plugins that mask or drop"),
    Column("factor_<label>", "float32", "the plugin's own weight, before normalising; only for plugins that weigh"),
)
SIGNAL_COLUMNS = (
    Column(
        "signal_<key>", "float32", "a number that the reward function returned beside the reward; NaN where it was none"
    ),
)
TOKEN_COLUMNS = (
    Column("response_mask", "list<uint8>", "1 at tokens that the loss counts"),
    Column("advantages", "list<float32>", "one a token"),
    Column("old_log_probs", "list<float32>", "of the policy before the update; null where there are none"),
    Column("entropy", "list<float32>", "of the policy before the update, in nats; null where there is none"),
)


@dataclass(frozen=True)
class Labels:
    """Which columns the plugins of a run have.

    Attributes:
        scoring: labels that decide about rollouts.
        keeping: those that mask or drop.
        weighing: those that give weights.
        signals: keys of what the reward function returned.
        tokens: whether values of tokens are kept.
    """

    scoring: tuple[str, ...] = ()
    keeping: tuple[str, ...] = ()
    weighing: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    tokens: bool = False

    @classmethod
    def of(cls, plan: Sequence[dict[str, Any]], tokens: bool) -> Labels:
        """Read them off a plan, ``HookManager.plan()``."""
        rows = [row for row in plan if {"post_reward", "post_advantage"}.intersection(row["hooks"])]

        def providing(*parts: str) -> tuple[str, ...]:
            return tuple(row["label"] for row in rows if set(parts).intersection(row["provides"]))

        return cls(tuple(row["label"] for row in rows), providing("mask", "keep"), providing("weights"), (), tokens)

    def columns(self) -> Iterator[Column]:
        """All columns of the log, in order."""
        yield from COLUMNS
        score, keep, factor = LABEL_COLUMNS
        for column, labels in ((score, self.scoring), (keep, self.keeping), (factor, self.weighing)):
            yield from (_named(column, label) for label in labels)
        yield from (_named(SIGNAL_COLUMNS[0], key) for key in self.signals)
        if self.tokens:
            yield from TOKEN_COLUMNS


def _named(column: Column, name: str) -> Column:
    stem = column.name.split("<")[0]
    return Column(f"{stem}{name}", column.type, column.meaning)


@dataclass(frozen=True)
class Facts:
    """What a replay has to know of the run; stands in the metadata of every file.

    Attributes:
        plan: the lines that the run printed.
        dataflex: the run's ``dataflex`` block as YAML, which keeps the keys of schedules as numbers.
        estimator, mode, seed: of the run.
        rollouts: rollouts of a prompt, None where unknown.
        response_length: length limit in tokens, None where unknown.
        coefficients: of the loss: kind, per_token, divides_by_rows, source.
        domains: names, in order; empty without a mixer.
        fingerprint: what the training data is recognised by, empty where unknown.
        tokens: whether values of tokens are in the log.
        settings: other settings of the run that matter to a reader.
    """

    plan: tuple[str, ...] = ()
    dataflex: str = ""
    estimator: str = "grpo"
    mode: str = "sync"
    seed: int = 0
    rollouts: int | None = None
    response_length: int | None = None
    coefficients: dict[str, Any] = field(default_factory=lambda: {"kind": "token"})
    domains: tuple[str, ...] = ()
    fingerprint: str = ""
    tokens: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def tables() -> str:
    """The columns as Markdown, for the documents."""
    parts = []
    for title, columns in (
        ("Every log", COLUMNS),
        ("For every plugin that decides about rollouts, by its label", LABEL_COLUMNS),
        ("For every number that the reward function returns beside the reward", SIGNAL_COLUMNS),
        ("With `log_decisions=tokens`", TOKEN_COLUMNS),
    ):
        rows = [f"| `{column.name}` | {column.type} | {column.meaning} |" for column in columns]
        parts.append("\n".join([f"**{title}**", "", "| column | type | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"
