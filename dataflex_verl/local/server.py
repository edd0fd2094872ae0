"""The rollout server: one Ray actor that batches requests and generates with transformers.

The module imports no verl, so that the process is up as soon as torch and transformers are.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dataflex_verl.local.sampling import Request, SamplingParams, generate, noise_seed

# Requests of one step arrive over some hundred milliseconds; a batch starts once none came for this long.
_QUIET_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.3


@dataclass
class GeneratedTokens:
    """The answer to one request, with the attributes of verl's ``TokenOutput``."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    extra_fields: dict[str, Any] = field(default_factory=dict)
    routed_experts: None = None
    num_preempted: int | None = None


@dataclass
class ServerSettings:
    """What the server needs of verl's rollout and model configuration."""

    model_path: str
    tokenizer_path: str
    dtype: str
    prompt_length: int
    response_length: int
    max_num_seqs: int
    ignore_eos: bool
    seed: int
    threads: int
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)


class RolloutServer:
    """Token-in-token-out generation with the weights last sent by the trainer.

    ``sleep`` and ``abort_all_requests`` close a gate: requests that arrive behind it wait for ``wake_up`` or
    ``resume_generation``. All methods run on the actor's event loop; generation has a thread of its own.
    """

    def __init__(self, settings: ServerSettings) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        config = AutoConfig.from_pretrained(
            settings.model_path, trust_remote_code=settings.trust_remote_code, **settings.override_config
        )
        self.model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, settings.dtype), trust_remote_code=settings.trust_remote_code
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(
            settings.tokenizer_path, trust_remote_code=settings.trust_remote_code
        )
        self.eos_ids = _end_tokens(settings.model_path, config, self.tokenizer)
        self.max_length = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.global_steps: int | None = None
        self.loaded = False
        self._ordinals: dict[tuple[int, ...] | str, int] = defaultdict(int)
        self._queue: deque[tuple[Request, asyncio.Future[None]]] = deque()
        self._last_arrival = 0.0
        self._condition = threading.Condition()
        self._asleep = False
        self._paused = False
        self._reject = False
        self._busy = False
        self._abort = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run, name="generation", daemon=True).start()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **media: Any
    ) -> GeneratedTokens:
        """Continue ``prompt_ids`` until a stop condition.

        Raises:
            ValueError: unknown sampling parameters, image, audio or video input, or no room left in the context.
            RuntimeError: no weights were received yet.
        """
        given = [name for name, value in media.items() if value is not None and name.endswith("_data")]
        if given:
            raise ValueError(f"The local rollout generates text only; got {', '.join(given)}.")
        if not self.loaded:
            raise RuntimeError("The local rollout has received no weights from the trainer yet.")
        self._loop = asyncio.get_running_loop()
        params = dict(sampling_params)
        params.setdefault("ignore_eos", self.settings.ignore_eos)
        max_tokens = self._max_tokens(len(prompt_ids), params)
        request = self._request(list(prompt_ids), SamplingParams.from_request(params), max_tokens)
        if self._paused and self._reject:
            request.stop_reason = "aborted"
        else:
            future: asyncio.Future[None] = self._loop.create_future()
            with self._condition:
                self._queue.append((request, future))
                self._last_arrival = time.monotonic()
                self._condition.notify()
            await future
        return GeneratedTokens(
            token_ids=request.token_ids,
            log_probs=request.log_probs if request.params.logprobs else None,
            stop_reason=request.stop_reason,
            extra_fields={"global_steps": self.global_steps},
        )

    def _max_tokens(self, prompt_length: int, params: dict[str, Any]) -> int:
        settings = self.settings
        limit = params.pop("max_tokens", None)
        limit = params.pop("max_new_tokens", limit) if limit is None else limit
        if limit is None:
            limit = min(settings.response_length, settings.prompt_length + settings.response_length - prompt_length)
        if self.max_length is not None:
            room = self.max_length - prompt_length
            if room < 1:
                raise ValueError(f"A prompt of {prompt_length} tokens fills the context of {self.max_length}.")
            limit = min(limit, room)
        return max(1, limit)

    def _request(self, prompt_ids: list[int], params: SamplingParams, max_tokens: int) -> Request:
        key = (*prompt_ids, hash(params))
        ordinal = self._ordinals[key]
        self._ordinals[key] += 1
        seed = noise_seed(self.settings.seed, self.global_steps or 0, prompt_ids, ordinal, params)
        return Request(prompt_ids, params, max_tokens, seed)

    async def load_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Replace all weights. Every parameter must be there and no other: a partial load would train one model
        and generate with another.

        Raises:
            RuntimeError: naming missing and unexpected parameters.
        """
        expected = set(self.model.state_dict())
        missing, unexpected = sorted(expected - set(weights)), sorted(set(weights) - expected)
        if missing or unexpected:
            hint = (
                " LoRA adapters need actor_rollout_ref.model.lora.merge=True with the local rollout."
                if any("lora" in name for name in unexpected)
                else ""
            )
            raise RuntimeError(
                f"The trainer's weights do not fit the rollout model: missing {missing[:5]} ({len(missing)}), "
                f"unexpected {unexpected[:5]} ({len(unexpected)}).{hint}"
            )
        self.model.load_state_dict(weights)
        self.loaded = True
        await self.set_global_steps(global_steps)

    async def set_global_steps(self, global_steps: int | None) -> None:
        if global_steps != self.global_steps:
            self._ordinals.clear()
        self.global_steps = global_steps

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._asleep = False
        with self._condition:
            self._condition.notify()

    async def sleep(self) -> None:
        """Start no further batch and return when the running one is done."""
        self._asleep = True
        await self.wait_for_requests_to_drain(running_only=True)

    async def abort_all_requests(self, reject_request: bool = False, **kwargs: Any) -> dict[str, Any]:
        """End queued and running requests with what they have, and hold later ones until resume_generation()."""
        self._paused, self._reject = True, reject_request
        self._abort.set()
        with self._condition:
            queued, self._queue = list(self._queue), deque()
        for request, future in queued:
            request.stop_reason = "aborted"
            if not future.done():
                future.set_result(None)
        await self.wait_for_requests_to_drain(running_only=True)
        return {"aborted_count": len(queued), "request_ids": []}

    async def resume_generation(self) -> None:
        self._paused, self._reject = False, False
        self._abort.clear()
        with self._condition:
            self._condition.notify()

    async def wait_for_requests_to_drain(self, running_only: bool = False) -> None:
        while self._busy or (self._queue and not running_only):
            await asyncio.sleep(0.002)

    # The CPU has no second memory to free, and the key-value cache ends with each batch.
    async def clear_kv_cache(self) -> None:
        return None

    async def release_kv_cache(self) -> None:
        return None

    async def resume_kv_cache(self) -> None:
        return None

    async def start_profile(self, **kwargs: Any) -> None:
        return None

    async def stop_profile(self) -> None:
        return None

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            error: BaseException | None = None
            try:
                groups: dict[tuple[int, SamplingParams], list[Request]] = defaultdict(list)
                for request, _ in batch:
                    groups[(request.bucket, request.params)].append(request)
                for requests in groups.values():
                    generate(self.model, self.tokenizer, requests, self.eos_ids, self._abort.is_set)
            except BaseException as exc:  # every waiting request gets the error; the thread must go on
                error = exc
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._finish, batch, error)

    def _next_batch(self) -> list[tuple[Request, asyncio.Future[None]]]:
        with self._condition:
            while True:
                if self._asleep or self._paused or not self._queue:
                    self._condition.wait()
                    continue
                first = time.monotonic()
                while (now := time.monotonic()) - first < _LONGEST_WAIT_SECONDS:
                    quiet = now - self._last_arrival
                    if quiet >= _QUIET_SECONDS:
                        break
                    self._condition.wait(_QUIET_SECONDS - quiet)
                if self._asleep or self._paused or not self._queue:
                    continue
                self._busy = True
                return [self._queue.popleft() for _ in range(min(len(self._queue), self.settings.max_num_seqs))]

    def _finish(self, batch: list[tuple[Request, asyncio.Future[None]]], error: BaseException | None) -> None:
        self._busy = False
        for _, future in batch:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def _end_tokens(model_path: str, config: Any, tokenizer: Any) -> list[int]:
    """The model's end tokens: from generation_config.json, else the model's config, else the tokenizer."""
    try:
        eos = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        eos = None
    if eos is None:
        eos = getattr(config.get_text_config(), "eos_token_id", None)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids = [*ids, tokenizer.eos_token_id]
    return ids
