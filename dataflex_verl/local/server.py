"""The rollout server: one Ray actor that batches requests and generates with transformers.

The module imports no verl, so that the process is up as soon as torch and transformers are.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dataflex_verl.local.engine import Engine, ServerSettings
from dataflex_verl.local.sampling import Request, SamplingParams, noise_seed

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


class RolloutServer:
    """Token-in-token-out generation with the weights last sent by the trainer.

    ``sleep`` and ``abort_all_requests`` close a gate: requests that arrive behind it wait for ``wake_up`` or
    ``resume_generation``. All methods run on the actor's event loop; generation has a thread of its own.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.engine = Engine(settings)
        self.global_steps: int | None = None
        self.loaded = False
        self._ordinals: dict[tuple[tuple[int, ...], SamplingParams], int] = defaultdict(int)
        self._queue: deque[tuple[Request, asyncio.Future[None]]] = deque()
        self._last_arrival = 0.0
        # Guards the queue and the flags below; whoever sees a closed gate under it starts no batch.
        self._condition = threading.Condition()
        self._asleep = False
        self._paused = False
        self._reject = False
        self._running = 0
        self._abort = threading.Event()
        self._weights = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._run, name="generation", daemon=True).start()

    async def generate(
        self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **media: Any
    ) -> GeneratedTokens:
        """Continue ``prompt_ids`` until a stop condition.

        Args:
            prompt_ids: token ids, as a list or a tensor.
            sampling_params: under vLLM's names; ``max_tokens`` among them.
            request_id: not used; noise comes from prompt and order.
            media: must be empty.

        Raises:
            ValueError: unknown sampling parameters, image, audio or video input, ids that are no tokens, or no room
                left in the context.
            RuntimeError: no weights were received yet.
        """
        given = [name for name, value in media.items() if value is not None and name.endswith("_data")]
        if given:
            raise ValueError(f"The local rollout generates text only; got {', '.join(given)}.")
        if not self.loaded:
            raise RuntimeError("The local rollout has received no weights from the trainer yet.")
        self._loop = asyncio.get_running_loop()
        request = self._request(prompt_ids, sampling_params)
        if self._paused and self._reject:
            request.stop_reason = "aborted"
        else:
            future: asyncio.Future[None] = self._loop.create_future()
            with self._condition:
                self._queue.append((request, future))
                self._last_arrival = time.monotonic()
                self._condition.notify()
            try:
                await future
            except asyncio.CancelledError:
                with self._condition, contextlib.suppress(ValueError):
                    self._queue.remove((request, future))
                raise
        return GeneratedTokens(
            token_ids=request.token_ids,
            log_probs=request.log_probs if request.params.logprobs else None,
            stop_reason=request.stop_reason,
            extra_fields={"global_steps": self.global_steps},
        )

    def _request(self, prompt_ids: Any, sampling_params: Mapping[str, Any]) -> Request:
        ids, params, max_tokens = self.engine.parse(prompt_ids, sampling_params)
        ordinal = self._ordinals[(tuple(ids), params)]
        self._ordinals[(tuple(ids), params)] += 1
        seed = noise_seed(self.settings.seed, self.global_steps or 0, ids, ordinal, params)
        return Request(ids, params, max_tokens, seed)

    async def load_weights(self, weights: Mapping[str, torch.Tensor], global_steps: int | None) -> None:
        """Replace all weights, between two batches.

        Raises:
            RuntimeError: naming missing and unexpected weights.
        """

        def load() -> None:
            with self._weights:
                self.engine.load(weights)

        await asyncio.to_thread(load)
        self.loaded = True
        await self.set_global_steps(global_steps)

    async def set_global_steps(self, global_steps: int | None) -> None:
        """Name the version of the weights; noise starts anew with each."""
        if global_steps != self.global_steps:
            self._ordinals.clear()
        self.global_steps = global_steps

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Open the gate. verl wakes ``weights`` first, sends them, and ``kv_cache`` then: only that means generate."""
        if tags is None or "kv_cache" in tags:
            with self._condition:
                self._asleep = False
                self._condition.notify()

    async def sleep(self) -> None:
        """Start no further batch and return when the running one is done."""
        if not self.settings.frees_cache:
            return
        with self._condition:
            self._asleep = True
        await self._until(lambda: not self._running)

    async def abort_all_requests(self, reject_request: bool = False, **kwargs: Any) -> dict[str, Any]:
        """End queued and running requests with what they have, and hold later ones until resume_generation().

        Args:
            reject_request: answer later ones as aborted instead of holding them.
        """
        with self._condition:
            self._paused, self._reject = True, reject_request
            self._abort.set()
            queued, self._queue = list(self._queue), deque()
            count = len(queued) + self._running
        for request, future in queued:
            request.stop_reason = "aborted"
            if not future.done():
                future.set_result(None)
        await self._until(lambda: not self._running)
        return {"aborted_count": count, "request_ids": []}

    async def resume_generation(self) -> None:
        """Open the gate that abort_all_requests() closed."""
        with self._condition:
            self._paused, self._reject = False, False
            self._abort.clear()
            self._condition.notify()

    async def wait_for_requests_to_drain(self) -> None:
        """Return when all requests are answered."""
        await self._until(lambda: not self._running and not self._queue)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
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
            errors: dict[int, BaseException] = {}
            try:
                with self._weights:
                    errors = self.engine.generate([request for request, _ in batch], self._abort.is_set)
            except BaseException as error:  # every waiting request gets it; the thread must go on
                errors = dict.fromkeys(range(len(batch)), error)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._finish, batch, errors)

    def _next_batch(self) -> list[tuple[Request, asyncio.Future[None]]]:
        with self._condition:
            while True:
                if self._closed_or_empty():
                    self._condition.wait()
                    continue
                first = time.monotonic()
                while (now := time.monotonic()) - first < _LONGEST_WAIT_SECONDS:
                    quiet = now - self._last_arrival
                    if quiet >= _QUIET_SECONDS:
                        break
                    self._condition.wait(_QUIET_SECONDS - quiet)
                if self._closed_or_empty():
                    continue
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self.settings.max_num_seqs))]
                self._running += len(batch)
                return batch

    def _closed_or_empty(self) -> bool:
        return self._asleep or self._paused or not self._queue

    def _finish(self, batch: list[tuple[Request, asyncio.Future[None]]], errors: Mapping[int, BaseException]) -> None:
        with self._condition:
            self._running -= len(batch)
        for position, (_, future) in enumerate(batch):
            if future.done():
                continue
            if position in errors:
                future.set_exception(errors[position])
            else:
                future.set_result(None)
