"""Two costs per rollout that verl pays in its agent loop, a third of that worker's time with a tiny model.

What is generated, scored and stored does not change.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any


def instantiate_plainly(module: ModuleType) -> None:
    """Make an agent loop by calling its class: Hydra copies and merges all arguments for every single rollout.

    A configuration that holds more than the class's name goes the ordinary way.
    """
    hydra = module.hydra

    def instantiate(config: Mapping[str, Any], **arguments: Any) -> Any:
        if set(config) == {"_target_"}:
            return hydra.utils.get_class(config["_target_"])(**arguments)
        return hydra.utils.instantiate(config=config, **arguments)

    module.hydra = SimpleNamespace(utils=SimpleNamespace(instantiate=instantiate))


def ask_balancer_once(module: ModuleType) -> None:
    """Keep the server that the load balancer named: the replicas of a worker group answer through one server.

    verl's client for asynchronous modes goes on asking, because servers join and leave there.
    """
    client = module.LLMServerClient
    acquire_each, release_each = client._acquire_server, client._release_server

    @functools.wraps(acquire_each)
    async def acquire(self: Any, request_id: str, **extra: Any) -> Any:
        if isinstance(self, module.FullyAsyncLLMServerClient):
            return await acquire_each(self, request_id, **extra)
        known = getattr(self, "_local_server", None)
        if known is None:
            known = self._local_server = await acquire_each(self, request_id, **extra)
        return known

    @functools.wraps(release_each)
    def release(self: Any, server_id: str, request_id: str | None = None) -> None:
        # Of the other clients only the first request is in the balancer's count.
        if isinstance(self, module.FullyAsyncLLMServerClient):
            release_each(self, server_id, request_id)

    client._acquire_server = acquire
    client._release_server = release
