"""Batched generation with transformers: sampling parameters, stop conditions and reproducible noise.

A row's tokens do not depend on which other requests share its batch: the noise of a request is drawn from a seed of
its own, prompts are left-padded to a length that depends on that prompt alone, and a batch never has fewer rows than
``MIN_ROWS`` (below it the CPU's matrix product uses another kernel, whose last bits differ). Mixture-of-experts models
are the exception: how many rows reach an expert depends on the whole batch, so last bits may differ there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from dataflex_verl.local.logits import Draw, RowStop, processors

MIN_ROWS = 16
_MIN_BUCKET = 16


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters verl's agent loops send, under vLLM's names. ``temperature=0`` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = True
    seed: int | None = None

    @classmethod
    def from_request(cls, params: dict[str, Any]) -> SamplingParams:
        """Build from a request's dict; a parameter this rollout does not know is an error, never ignored.

        Raises:
            ValueError: naming the unknown parameters and the known ones.
        """
        known = set(cls.__dataclass_fields__)
        values = {name: value for name, value in params.items() if value is not None}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"The local rollout does not support the sampling parameter(s) {', '.join(unknown)}. "
                f"Supported: {', '.join(sorted(known | {'max_tokens', 'max_new_tokens'}))}."
            )
        stop = values.get("stop", ())
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        values["stop_token_ids"] = tuple(int(token) for token in values.get("stop_token_ids", ()))
        # 0 asks for the chosen token's log-probability and no alternatives.
        values["logprobs"] = values.get("logprobs", True) is not False
        for name, kind in (("temperature", float), ("top_p", float), ("min_p", float), ("repetition_penalty", float)):
            if name in values:
                values[name] = kind(values[name])
        result = cls(**values)
        result._check()
        return result

    def _check(self) -> None:
        ranges = {
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= -1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
            "min_tokens": self.min_tokens >= 0,
        }
        wrong = [f"{name}={getattr(self, name)}" for name, good in ranges.items() if not good]
        if wrong:
            raise ValueError(f"Sampling parameters out of range: {', '.join(wrong)}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass
class Request:
    """One prompt to continue. ``noise_seed`` fixes its random draws."""

    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    noise_seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    stop_reason: str | None = None

    @property
    def bucket(self) -> int:
        """The padded prompt length: the next power of two, a function of this prompt alone."""
        return max(_MIN_BUCKET, 1 << (len(self.prompt_ids) - 1).bit_length())


def noise_seed(base_seed: int, version: int, prompt_ids: Sequence[int], ordinal: int, params: SamplingParams) -> int:
    """A 63-bit seed for the ``ordinal``-th request for this prompt under one version of the weights.

    A seed in the request itself means what it means in vLLM: the same request gets the same noise again.
    """
    if params.seed is not None:
        base_seed, version, ordinal = params.seed, 0, 0
    text = f"{base_seed}|{version}|{ordinal}|{params}|{','.join(map(str, prompt_ids))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generate(
    model: Any, tokenizer: Any, requests: Sequence[Request], eos_ids: Sequence[int], aborted: Callable[[], bool]
) -> None:
    """Generate for requests of equal ``bucket`` and ``params`` and fill their results in place.

    Args:
        model: a transformers causal LM on the CPU, in eval mode.
        tokenizer: decodes for stop strings.
        requests: at least one; all with the same bucket and sampling parameters.
        eos_ids: the model's end tokens; a generated one is part of the response, as in vLLM.
        aborted: polled after every token; once true, requests end with what they have and reason ``aborted``.
    """
    params, length = requests[0].params, requests[0].bucket
    rows = max(MIN_ROWS, len(requests))
    pad = eos_ids[0] if eos_ids else 0
    input_ids = torch.full((rows, length), pad, dtype=torch.long)
    attention = torch.zeros((rows, length), dtype=torch.long)
    # Filler rows repeat the first request; they stop after one token and nobody reads them.
    for row in range(rows):
        prompt = requests[row if row < len(requests) else 0].prompt_ids
        input_ids[row, length - len(prompt) :] = torch.tensor(prompt)
        attention[row, length - len(prompt) :] = 1
    limits = torch.tensor([r.max_tokens for r in requests] + [1] * (rows - len(requests)))
    longest = int(limits.max())

    uniforms = None
    if not params.greedy:
        uniforms = torch.zeros((rows, longest), dtype=torch.float64)
        for row, request in enumerate(requests):
            generator = torch.Generator().manual_seed(request.noise_seed)
            uniforms[row] = torch.rand(longest, generator=generator, dtype=torch.float64)

    stop_ids = list(params.stop_token_ids) + ([] if params.ignore_eos else list(eos_ids))
    draw = Draw(uniforms, length)
    stopping = RowStop(
        limits,
        torch.tensor(stop_ids, dtype=torch.long),
        params.stop,
        params.min_tokens,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        length,
        aborted,
    )
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention,
            generation_config=GenerationConfig(
                max_new_tokens=longest, do_sample=False, pad_token_id=pad, eos_token_id=None, use_cache=True
            ),
            logits_processor=LogitsProcessorList([*processors(params, stop_ids, input_ids, attention), draw]),
            stopping_criteria=StoppingCriteriaList([stopping]),
        )
    _collect(requests, output[:, length:].tolist(), torch.stack(draw.log_probs, dim=1), set(stop_ids), stopping)


def _collect(
    requests: Sequence[Request],
    tokens: list[list[int]],
    log_probs: torch.Tensor,
    stop_ids: set[int],
    stopping: RowStop,
) -> None:
    """Cut each row at its own end. A row that ended early was padded while the others went on."""
    values = log_probs.tolist()
    for row, request in enumerate(requests):
        end = min(len(tokens[row]), request.max_tokens)
        complete = end == request.max_tokens
        for position, token in enumerate(tokens[row][:end]):
            if token in stop_ids or stopping.has_stop_string(tokens[row][: position + 1]):
                end, complete = position + 1, True
                break
        request.token_ids = tokens[row][:end]
        request.log_probs = values[row][:end]
        request.stop_reason = "completed" if complete else "aborted"
