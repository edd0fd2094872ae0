"""Between a model's logits and a chosen token, and when a row stops: pieces for transformers' generate()."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

if TYPE_CHECKING:
    from dataflex_verl.local.sampling import SamplingParams


def processors(
    params: SamplingParams, stop_ids: list[int], prompts: torch.Tensor, attention: torch.Tensor
) -> list[LogitsProcessor]:
    """The processors for ``params`` in vLLM's order, without the draw itself.

    Args:
        params: sampling parameters of the batch.
        stop_ids: tokens that end a response.
        prompts: (rows, length), left-padded.
        attention: (rows, length), 0 on padding.
    """
    chain: list[LogitsProcessor] = []
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenalty(params.repetition_penalty, prompts, attention))
    if params.min_tokens > 0 and stop_ids:
        chain.append(MinTokens(params.min_tokens, stop_ids, prompts.shape[1]))
    if params.greedy:
        return chain
    if params.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain


class Draw(LogitsProcessor):
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


class MinTokens(LogitsProcessor):
    """Forbids the stop tokens until ``min_tokens`` tokens are generated."""

    def __init__(self, min_tokens: int, stop_ids: list[int], prompt_length: int) -> None:
        self.min_tokens, self.stop_ids, self.prompt_length = min_tokens, stop_ids, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] - self.prompt_length < self.min_tokens:
            scores[:, self.stop_ids] = -torch.inf
        return scores


class RepetitionPenalty(LogitsProcessor):
    """Transformers' repetition penalty, blind to the padding before a prompt."""

    def __init__(self, penalty: float, prompts: torch.Tensor, attention: torch.Tensor) -> None:
        self.processor = RepetitionPenaltyLogitsProcessor(penalty)
        # A repeated token is penalised once, so the prompt's last one can stand where padding is.
        self.prompts = torch.where(attention.bool(), prompts, prompts[:, -1:])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen = torch.cat([self.prompts, input_ids[:, self.prompts.shape[1] :]], dim=1)
        return self.processor(seen, scores)


class RowStop(StoppingCriteria):
    """Per-row token limits, stop tokens and stop strings, and the shared abort flag."""

    def __init__(
        self,
        limits: torch.Tensor,
        stop_ids: torch.Tensor,
        stop_strings: tuple[str, ...],
        min_tokens: int,
        decode: Callable[[list[int]], str],
        prompt_length: int,
        aborted: Callable[[], bool],
    ) -> None:
        self.limits, self.stop_ids, self.stop_strings, self.min_tokens = limits, stop_ids, stop_strings, min_tokens
        self.decode, self.prompt_length, self.aborted = decode, prompt_length, aborted

    def has_stop_string(self, generated: list[int]) -> bool:
        """Whether one of the stop strings is in the text of ``generated``."""
        if not self.stop_strings or len(generated) < self.min_tokens:
            return False
        text = self.decode(generated)
        return any(stop in text for stop in self.stop_strings)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        generated = input_ids.shape[1] - self.prompt_length
        if self.aborted():
            return torch.ones(input_ids.shape[0], dtype=torch.bool)
        done = (self.limits <= generated) | torch.isin(input_ids[:, -1], self.stop_ids)
        if self.stop_strings:
            done |= torch.tensor([self.has_stop_string(row) for row in input_ids[:, self.prompt_length :].tolist()])
        return done
