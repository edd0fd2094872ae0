"""Batched generation with transformers: sampling parameters, stop conditions and reproducible noise.

A row's tokens do not depend on which other requests share its batch: the noise of a request is drawn from a seed of
its own, prompts are left-padded to a length that depends on that prompt alone, and a batch never has fewer rows than
``MIN_ROWS`` (below it the CPU's matrix product uses another kernel, whose last bits differ).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

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
        values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
        values["logprobs"] = bool(values.get("logprobs", True))
        return cls(**values)

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
    """A 63-bit seed for the ``ordinal``-th request for this prompt under one version of the weights."""
    if params.seed is not None:
        base_seed, version = params.seed, 0
    text = f"{base_seed}|{version}|{ordinal}|{params}|{','.join(map(str, prompt_ids))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class _Draw(LogitsProcessor):
    """Chooses each row's token by inverse transform sampling from its own uniforms and keeps the log-probability.

    It runs last, after temperature and the filters, so the recorded value is that of the distribution sampled from
    (verl's ``logprobs_mode=processed_logprobs``). The scores it returns leave one finite entry, so that generate()'s
    argmax takes the chosen token.
    """

    def __init__(self, uniforms: torch.Tensor | None, prompt_length: int) -> None:
        self.uniforms = uniforms
        self.prompt_length = prompt_length
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float()
        log_probs = torch.log_softmax(scores, dim=-1)
        if self.uniforms is None:
            chosen = scores.argmax(dim=-1, keepdim=True)
        else:
            step = input_ids.shape[1] - self.prompt_length
            cumulative = log_probs.double().exp().cumsum(dim=-1)
            threshold = self.uniforms[:, step : step + 1] * cumulative[:, -1:]
            # The first entry strictly above the threshold has positive probability: filtered tokens add nothing.
            chosen = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.shape[1] - 1)
        self.log_probs.append(log_probs.gather(1, chosen).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)


class _MinTokens(LogitsProcessor):
    """Forbids the stop tokens until ``min_tokens`` tokens are generated."""

    def __init__(self, min_tokens: int, stop_ids: list[int], prompt_length: int) -> None:
        self.min_tokens, self.stop_ids, self.prompt_length = min_tokens, stop_ids, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] - self.prompt_length < self.min_tokens:
            scores[:, self.stop_ids] = -torch.inf
        return scores


class _RowStop(StoppingCriteria):
    """Per-row token limits, stop tokens and stop strings, and the shared abort flag."""

    def __init__(
        self,
        limits: torch.Tensor,
        stop_ids: torch.Tensor,
        stop_strings: tuple[str, ...],
        decode: Callable[[list[int]], str],
        prompt_length: int,
        aborted: Callable[[], bool],
    ) -> None:
        self.limits, self.stop_ids, self.stop_strings = limits, stop_ids, stop_strings
        self.decode, self.prompt_length, self.aborted = decode, prompt_length, aborted

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        generated = input_ids.shape[1] - self.prompt_length
        if self.aborted():
            return torch.ones(input_ids.shape[0], dtype=torch.bool)
        done = (self.limits <= generated) | torch.isin(input_ids[:, -1], self.stop_ids)
        if self.stop_strings:
            texts = (self.decode(row) for row in input_ids[:, self.prompt_length :].tolist())
            done |= torch.tensor([any(stop in text for stop in self.stop_strings) for text in texts])
        return done


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
    draw = _Draw(uniforms, length)
    stopping = _RowStop(
        limits,
        torch.tensor(stop_ids, dtype=torch.long),
        params.stop,
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
            logits_processor=LogitsProcessorList([*_processors(params, stop_ids, length), draw]),
            stopping_criteria=StoppingCriteriaList([stopping]),
        )
    _collect(requests, output[:, length:].tolist(), torch.stack(draw.log_probs, dim=1), set(stop_ids), stopping)


def _processors(params: SamplingParams, stop_ids: list[int], prompt_length: int) -> list[LogitsProcessor]:
    processors: list[LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens > 0 and stop_ids:
        processors.append(_MinTokens(params.min_tokens, stop_ids, prompt_length))
    if params.greedy:
        return processors
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors


def _collect(
    requests: Sequence[Request],
    tokens: list[list[int]],
    log_probs: torch.Tensor,
    stop_ids: set[int],
    stopping: _RowStop,
) -> None:
    """Cut each row at its own end. A row that ended early was padded while the others went on."""
    values = log_probs.tolist()
    for row, request in enumerate(requests):
        end = min(len(tokens[row]), request.max_tokens)
        complete = end == request.max_tokens
        for position, token in enumerate(tokens[row][:end]):
            text_stop = stopping.stop_strings and any(
                stop in stopping.decode(tokens[row][: position + 1]) for stop in stopping.stop_strings
            )
            if token in stop_ids or text_stop:
                end, complete = position + 1, True
                break
        request.token_ids = tokens[row][:end]
        request.log_probs = values[row][:end]
        request.stop_reason = "completed" if complete else "aborted"
