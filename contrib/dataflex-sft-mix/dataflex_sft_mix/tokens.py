"""Demonstrations as token ids, checked for length."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataflex_hooks import ConfigError, Described, Problem
from dataflex_sft_mix.files import Demonstration, unusable

_log = logging.getLogger("dataflex_sft_mix")


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes tokens.

    Attributes:
        path: where the tokenizer lies, None where nobody said.
        remote_code: whether code that comes with it may run.
        end: whether the tokenizer's end of sequence follows a response given as text.
        template: keywords for its chat template.
    """

    path: str | None
    remote_code: bool
    end: bool
    template: Mapping[str, Any]


class Jagged:
    """Rows of token ids: row i is ``values[offsets[i]:offsets[i + 1]]``, int32."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self.offsets = np.concatenate([[0], self.lengths.cumsum()])
        self.values = np.fromiter((token for row in rows for token in row), np.int32, count=int(self.offsets[-1]))

    def row(self, number: int) -> list[int]:
        """Return the token ids of a row."""
        return self.values[self.offsets[number] : self.offsets[number + 1]].tolist()


@dataclass(frozen=True)
class Demonstrations:
    """Demonstrations ready to be added, and how many were left out for their length."""

    prompts: Jagged
    responses: Jagged
    domains: list[str | None]
    left_out: int

    def __len__(self) -> int:
        return len(self.domains)

    def fingerprint(self) -> str:
        """Return a hash of all tokens, to tell these demonstrations from others."""
        parts = (self.prompts.offsets, self.prompts.values, self.responses.offsets, self.responses.values)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def tokenize(
    rows: Sequence[Demonstration],
    how: Tokenizer,
    prompt_length: int | None,
    response_length: int | None,
    skip_long: bool,
) -> Demonstrations:
    """Bring rows to token ids and check their lengths.

    Args:
        rows: as read.
        how: only used where a row has text or messages.
        prompt_length, response_length: most tokens; None where nobody knows.
        skip_long: leave longer rows out instead of refusing them.

    Raises:
        ConfigError: no usable tokenizer, rows that are too long, or nothing left.
    """
    prompts, responses = [row.prompt for row in rows], [row.response for row in rows]
    if not all(isinstance(row[0], int) for row in (*prompts, *responses)):
        prompts, responses = _as_tokens(prompts, responses, how)
    limits = (("prompt", prompts, prompt_length), ("response", responses, response_length))
    long = {
        i: f"{rows[i].place}: the {part} has {len(tokens)} tokens, {'none' if not tokens else f'more than {most}'}"
        for part, given, most in limits
        for i, tokens in enumerate(given)
        if not tokens or (most is not None and len(tokens) > most)
    }
    if long and not skip_long:
        bad = [long[i] for i in sorted(long)]
        accepted = "rows that data.max_prompt_length and data.max_response_length leave room for"
        raise ConfigError(unusable(bad, accepted, "too_long: skip leaves them out"))
    kept = [i for i in range(len(rows)) if i not in long]
    if not kept:
        raise ConfigError([Problem("data", f"{len(rows)} rows, all of them too long", "files with at least one row")])
    if long:
        first = next(iter(long.values()))
        _log.warning("%d of %d demonstrations are left out, too long for this run: %s", len(long), len(rows), first)
    domains = [rows[i].domain for i in kept]
    return Demonstrations(Jagged([prompts[i] for i in kept]), Jagged([responses[i] for i in kept]), domains, len(long))


def _as_tokens(prompts: list[Any], responses: list[Any], how: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    tokenizer = _load(how)
    if how.end and tokenizer.eos_token_id is None:
        raise ConfigError([Problem("end", True, f"false, since the tokenizer {how.path} has no end of sequence")])
    prompts = [_rendered(tokenizer, prompt, how.template) if _is_chat(prompt) else prompt for prompt in prompts]
    end = tokenizer.eos_token_id if how.end else None
    encoded = _encoded(responses, tokenizer)
    ended = [
        [*tokens, end] if isinstance(given, str) and end is not None and tokens[-1:] != [end] else tokens
        for given, tokens in zip(responses, encoded, strict=True)
    ]
    return _encoded(prompts, tokenizer), ended


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], template: Mapping[str, Any]) -> str:
    # Parquet gives every message all keys that any message has.
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return str(tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False, **template))


def _encoded(given: list[Any], tokenizer: Any) -> list[list[int]]:
    texts = [text for text in given if isinstance(text, str)]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
    return [list(next(encoded)) if isinstance(row, str) else row for row in given]


def _load(how: Tokenizer) -> Any:
    if how.path is None:
        hint = "or give prompts and responses as token ids"
        accepted = "where the policy's tokenizer lies, '${actor_rollout_ref.model.path}'"
        raise ConfigError([Problem("tokenizer", Described("nothing"), accepted, hint)])
    try:
        make: Callable[..., Any] = _auto_tokenizer()
        return make(how.path, trust_remote_code=how.remote_code)
    except Exception as error:
        accepted = "a folder or name that transformers can load a tokenizer from"
        raise ConfigError(
            [Problem("tokenizer", how.path, accepted, f"{type(error).__name__}: {error}", error)]
        ) from error


def _auto_tokenizer() -> Callable[..., Any]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained
