"""Checks of the rows that plugins add, which become token ids and numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig

from dataflex_hooks import AddedRow, DecisionError, Origin


@dataclass(frozen=True)
class Limits:
    """What rows have to keep to.

    Attributes:
        prompt, response: most tokens.
        vocabulary: token ids are below this.
        log_probs: whether rows of the run have the log-probs of the policy that wrote them.
        bypass: verl takes these for its old log-probs (``rollout_correction.bypass_mode``) and computes none.
    """

    prompt: int
    response: int
    vocabulary: int
    log_probs: bool
    bypass: bool

    @classmethod
    def of(cls, config: DictConfig, tokenizer: Any) -> Limits:
        """Read them from verl's configuration."""
        correction = config.algorithm.get("rollout_correction", None)
        return cls(
            prompt=config.data.max_prompt_length,
            response=config.data.max_response_length,
            vocabulary=len(tokenizer),
            log_probs=bool(config.actor_rollout_ref.rollout.calculate_log_probs),
            bypass=bool(correction and correction.get("bypass_mode", False)),
        )


@dataclass(frozen=True)
class TokenRow:
    """A checked row: token ids, an advantage for every response token or the estimator's, log-probs if given."""

    prompt: list[int]
    response: list[int]
    advantages: list[float] | None
    reward: float
    domain: str | None
    log_probs: list[float] | None
    uid: str | None


def resolve(
    add: Iterable[AddedRow], origin: Origin, limits: Limits, tokenizer: Any, groups: Collection[str]
) -> list[TokenRow]:
    """Check the rows of one plugin and bring them to token ids.

    Text is tokenised as it stands: no chat template, no special tokens but those written in it, no end of sequence.

    Args:
        add: rows.
        origin: what an error says about the plugin.
        limits: of the run.
        tokenizer: the policy's.
        groups: uids of the step's groups, those that are about to be dropped among them.

    Raises:
        DecisionError: a row is unusable; names the plugin, the number of the row among the plugin's, and the value.
    """
    rows: list[TokenRow] = []
    for number, given in enumerate(add):
        try:
            rows.append(_resolve(given, limits, tokenizer, groups))
        except ValueError as error:
            raise DecisionError(origin, f"add[{number}]: {error}") from None
    return rows


def _resolve(given: AddedRow, limits: Limits, tokenizer: Any, groups: Collection[str]) -> TokenRow:
    prompt = _tokens("prompt", given.prompt, limits.prompt, "data.max_prompt_length", limits, tokenizer)
    response = _tokens("response", given.response, limits.response, "data.max_response_length", limits, tokenizer)
    if given.advantage is None and given.uid is None:
        raise ValueError(
            "advantage is None; accepted: a number, or one for every response token, or with a uid None for what "
            "verl's estimator makes of it in that group"
        )
    advantages = None if given.advantage is None else _numbers("advantage", given.advantage, len(response))
    (reward,) = _numbers("reward", given.reward, 1)
    log_probs = None if given.log_probs is None else _numbers("log_probs", list(given.log_probs), len(response))
    if log_probs is None and limits.bypass:
        raise ValueError(
            "log_probs is None; accepted: one for every response token, since "
            "algorithm.rollout_correction.bypass_mode=True makes them the old log-probs of the loss"
        )
    if log_probs is not None and not limits.log_probs:
        raise ValueError(
            "log_probs are given, and with actor_rollout_ref.rollout.calculate_log_probs=False verl has no use for "
            "them: set it True, or leave log_probs out"
        )
    if log_probs is not None and max(log_probs) > 0:
        raise ValueError(f"log_probs holds {max(log_probs)!r}; accepted: log-probabilities, at most 0")
    if given.domain is not None and not isinstance(given.domain, str):
        raise ValueError(f"domain is {given.domain!r}; accepted: a name or None")
    if given.uid is not None and given.uid not in groups:
        raise ValueError(f"uid is {given.uid!r}; accepted: None, or the uid of a group that is in the batch")
    return TokenRow(prompt, response, advantages, reward, given.domain, log_probs, given.uid)


def _tokens(
    part: str, given: str | Sequence[int], most: int, setting: str, limits: Limits, tokenizer: Any
) -> list[int]:
    if isinstance(given, str):
        tokens = list(tokenizer.encode(given, add_special_tokens=False))
    else:
        try:
            tokens = [int(token) for token in given]
            exact = all(int(token) == token for token in given)
        except (TypeError, ValueError, OverflowError):
            exact = False
        if not exact:
            raise ValueError(f"{part} is {given!r}; accepted: text, or token ids as integers")
    if not tokens:
        raise ValueError(f"{part} is empty; accepted: at least one token")
    if len(tokens) > most:
        raise ValueError(f"{part} has {len(tokens)} tokens; accepted: at most {setting}={most}")
    wrong = [token for token in tokens if not 0 <= token < limits.vocabulary]
    if wrong:
        raise ValueError(f"{part} holds token id {wrong[0]}; accepted: 0 to {limits.vocabulary - 1}, the vocabulary")
    return tokens


def _numbers(part: str, given: Any, length: int) -> list[float]:
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    try:
        values = [float(value) for value in given] if hasattr(given, "__len__") else [float(given)] * length
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{part} is {given!r}; accepted: numbers") from None
    if len(values) != length:
        raise ValueError(f"{part} has {len(values)} values; accepted: {length}, one for every response token")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"{part} holds NaN or an infinity; accepted: finite numbers")
    for value in values:
        if abs(value) > torch.finfo(torch.float32).max:
            raise ValueError(f"{part} holds {value!r}, beyond float32; accepted: finite numbers that it can hold")
    return values
