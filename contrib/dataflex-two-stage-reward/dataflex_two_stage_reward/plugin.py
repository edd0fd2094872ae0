"""The plugin ``two_stage_reward``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataflex_hooks import ConfigError, ParameterChecks, RewardDecision, RolloutBatch, StepContext, hookimpl
from dataflex_two_stage_reward.cache import Key, ScoreCache, hashed, written
from dataflex_two_stage_reward.calls import Call, Caller, Limits
from dataflex_two_stage_reward.function import FIELDS, TEXT, load
from dataflex_two_stage_reward.groups import Ranking
from dataflex_two_stage_reward.text import Decoder

_log = logging.getLogger("dataflex_two_stage_reward")
_NEEDED = ("prompts", "responses", "rm_scores")


class TwoStageReward:
    """Scores the ``k`` best of each group, by verl's own reward, with a second function; the others leave the batch.

    Groups of at most k responses are scored whole and lose none. Advantages are computed over scored responses alone.
    A response that was not scored leaves before any log-prob pass; to other plugins its reward is the mean of the
    scored ones of its group, so that the cheap reward is in no baseline and no statistic.

    Args:
        function: ``module:function`` or ``path/to/file.py:function``, a coroutine function or a plain one, as verl's
            ``custom_reward_function``. It gets those of ``data_source``, ``solution_str``, ``ground_truth``,
            ``extra_info`` and ``prompt_str`` (the decoded prompt) that it takes, and returns a number or a mapping with
            ``score``.
        k: responses of each group to score, at least 2: one alone has no baseline.
        params: further keywords for every call.
        concurrency: calls under way at a time.
        timeout: seconds that an attempt may take; None for no limit.
        retries: further attempts after one that failed.
        retry_wait: seconds before the first of them, doubled before each that follows.
        on_failure: of the last attempt: ``raise`` stops the run; ``drop`` takes the response out as if it had not been
            chosen, and its whole group where fewer than 2 scored ones are left of it.
        cache: scores kept, by prompt, response and what else the function is given; 0 keeps none. They are part of the
            plugin's state.
        tokenizer: where the tokenizer lies, or an object with ``decode``; None takes the policy's own.
        trust_remote_code: whether code that comes with the tokenizer may run.
        tokenizer_path: fact of the run, from the host.

    Raises:
        ConfigError: everything wrong with the parameters.
    """

    provides = frozenset({"rewards", "keep"})
    host_keywords = frozenset({"tokenizer_path"})
    needs_groups = True
    # What the host checks at start and the plan says.
    effect = "drop"
    advantages = "kept"

    def __init__(
        self,
        function: str,
        k: int = 4,
        params: Mapping[str, Any] | None = None,
        concurrency: int = 16,
        timeout: float | None = 60.0,
        retries: int = 2,
        retry_wait: float = 1.0,
        on_failure: str = "raise",
        cache: int = 10_000,
        tokenizer: Any = None,
        trust_remote_code: bool = False,
        tokenizer_path: str | None = None,
    ) -> None:
        checks = ParameterChecks()
        self.k = checks.integer("k", k, at_least=2)
        limits = Limits(
            concurrency=checks.integer("concurrency", concurrency, at_least=1),
            timeout=None if timeout is None else checks.number("timeout", timeout, above=0),
            retries=checks.integer("retries", retries, at_least=0),
            retry_wait=checks.number("retry_wait", retry_wait, at_least=0),
        )
        self.on_failure = checks.choice("on_failure", on_failure, ("raise", "drop"))
        self.cache = ScoreCache(checks.integer("cache", cache, at_least=0))
        remote = checks.flag("trust_remote_code", trust_remote_code)
        if params is not None and not isinstance(params, Mapping):
            checks.refuse("params", params, "null, or a mapping of keywords")
            params = None
        try:
            self.function = load(function, params or {})
        except ConfigError as error:
            checks.add(error.problems)
            checks.finish()
        decodes = any(keyword in TEXT for keyword in self.function.takes)
        self.text = Decoder(tokenizer if tokenizer is not None else tokenizer_path, remote)
        if decodes and self.text.source is None:
            checks.refuse("tokenizer", tokenizer, "where a tokenizer lies: nothing tells the policy's own here")
        checks.finish()
        self.requires = {"post_reward": tuple(sorted({*_NEEDED, *(FIELDS[name] for name in self.function.takes)}))}
        self.caller = Caller(self.function, limits)

    @hookimpl
    def post_reward(self, batch: RolloutBatch, ctx: StepContext) -> RewardDecision:
        """Return the rewards, and the rows that stay: (bs,) bool, True where the row's session was scored."""
        ranking = Ranking(batch)
        chosen = ranking.best(self.k)
        rows = np.empty(batch.n_sessions, dtype=np.int64)
        final = batch.is_final.cpu().numpy()
        rows[batch.session.cpu().numpy()[final]] = np.flatnonzero(final)
        cheap = batch.session_rewards.cpu().numpy().astype(np.float64)
        rewards = cheap.copy()
        rewards[chosen], counts = self._scores(batch, rows[chosen])
        scored = chosen & np.isfinite(rewards)
        rewards = ranking.filled(np.where(np.isfinite(rewards), rewards, cheap), scored)
        kept = ranking.enough(scored)
        return RewardDecision(
            rewards=batch.expand_sessions(torch.from_numpy(rewards).to(batch.offsets.device, torch.float32)),
            keep=batch.expand_sessions(torch.from_numpy(kept).to(batch.offsets.device)),
            reason="unscored",
            advantages="kept",
            metrics={
                **counts,
                "saved_calls_total": float(batch.n_sessions - counts["calls_total"]),
                "scored_frac": float(scored.sum()) / max(1, batch.n_sessions),
                "cheap_mean": _mean(cheap[scored]),
                "expensive_mean": _mean(rewards[scored]),
            },
        )

    def _scores(self, batch: RolloutBatch, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Scores of rows, NaN where the function failed, and what they cost."""
        columns = (batch.prompt_hash[rows].tolist(), batch.response_hash[rows].tolist(), self._given(batch, rows))
        keys: list[Key] = list(zip(*columns, strict=True))
        known = {key: score for key in dict.fromkeys(keys) if (score := self.cache.get(key)) is not None}
        hits = sum(key in known for key in keys)
        ask = {key: row for key, row in zip(keys, rows.tolist(), strict=True) if key not in known}
        answers = self.caller.score(self._calls(batch, list(ask.values())), self.on_failure == "raise")
        if answers.errors:
            _log.warning("%d responses leave the batch unscored; the first: %s", len(answers.errors), answers.errors[0])
        for key, score in zip(ask, answers.scores, strict=True):
            if score is not None:
                known[key] = score
                self.cache.put(key, score)
        scores = np.array([known.get(key, np.nan) for key in keys], dtype=np.float64)
        return scores, {
            "calls_total": float(len(ask)),
            "cache_hits_total": float(hits),
            "retries_total": float(answers.retries),
            "failed_total": float(np.isnan(scores).sum()),
        }

    def _given(self, batch: RolloutBatch, rows: NDArray[np.int64]) -> list[int]:
        """A hash of what the function is given beside prompt and response: equal prompts may have other answers."""
        names = [FIELDS[name] for name in self.function.takes if name not in TEXT]
        columns = [batch.column(name) for name in names]
        return [hashed([column[row] for column in columns]) for row in rows.tolist()]

    def _calls(self, batch: RolloutBatch, rows: Sequence[int]) -> list[Call]:
        """What to call the function with for each of the rows."""
        tokens = {"solution_str": (batch.values("responses"), batch.offsets), "prompt_str": batch.prompts}
        columns = {name: batch.column(FIELDS[name]) for name in self.function.takes if name not in TEXT}

        def ids(of: str, row: int) -> list[int]:
            values, offsets = tokens[of]
            return [int(token) for token in values[offsets[row] : offsets[row + 1]]]

        def value(keyword: str, row: int) -> Any:
            if keyword in TEXT:
                return self.text(ids(keyword, row))
            given = columns[keyword][row]
            if keyword == "ground_truth" and isinstance(given, Mapping):
                return given.get("ground_truth")
            return dict(given) if isinstance(given, Mapping) else given

        def about(row: int) -> str:
            prompt: object = ids("prompt_str", row)
            if self.text.is_loaded:
                prompt = self.text(ids("prompt_str", row))
            return f"the prompt {_short(prompt)} (uid {batch.uid[row]!r}, response {int(batch.session_number[row])})"

        return [Call({name: value(name, row) for name in self.function.takes}, partial(about, row)) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the scores that are kept, and the function that gave them."""
        function = {"function": self.function.name, "params": written(self.function.params)}
        return {**function, "cache": self.cache.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with those scores; with another function or other params, without them."""
        then, now = (state["function"], state["params"]), (self.function.name, written(self.function.params))
        if then == now:
            self.cache.load_state_dict(state["cache"])
        else:
            _log.warning("the scores of %s with %s are forgotten: now it is %s with %s", *then, *now)


def _short(prompt: object) -> str:
    shown = repr(prompt)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0
