"""Shortcuts in verl's agent loop: the same objects and servers, by fewer steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dataflex_verl.local.agent_loop import ask_balancer_once, instantiate_plainly


class Loop:
    def __init__(self, **arguments):
        self.arguments = arguments


@pytest.fixture
def instantiate(monkeypatch):
    import hydra

    calls = []
    original = hydra.utils.instantiate
    monkeypatch.setattr(
        hydra.utils, "instantiate", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    )
    module = SimpleNamespace(hydra=hydra)
    instantiate_plainly(module)
    return module.hydra.utils.instantiate, calls


def test_a_class_is_called_with_the_arguments_themselves(instantiate):
    make, hydra_calls = instantiate
    marker = object()
    made = make({"_target_": f"{__name__}.Loop"}, tokenizer=marker)
    assert type(made).__name__ == "Loop" and made.arguments == {"tokenizer": marker}
    assert hydra_calls == []


def test_a_configuration_with_settings_goes_through_hydra(instantiate):
    make, hydra_calls = instantiate
    made = make({"_target_": f"{__name__}.Loop", "turns": 3}, limit=2)
    assert made.arguments == {"turns": 3, "limit": 2}
    assert hydra_calls == [1]


@pytest.mark.parametrize(
    ("kind", "asked", "released"), [("LLMServerClient", 1, 0), ("FullyAsyncLLMServerClient", 3, 3)]
)
def test_only_the_synchronous_client_keeps_its_server(kind, asked, released):
    counts = {"asked": 0, "released": 0}

    class LLMServerClient:
        async def _acquire_server(self, request_id, **extra):
            counts["asked"] += 1
            return "server", "handle"

        def _release_server(self, server_id, request_id=None):
            counts["released"] += 1

    class FullyAsyncLLMServerClient(LLMServerClient):
        async def _acquire_server(self, request_id, **extra):
            return await super()._acquire_server(request_id, **extra)

    module = SimpleNamespace(LLMServerClient=LLMServerClient, FullyAsyncLLMServerClient=FullyAsyncLLMServerClient)
    ask_balancer_once(module)
    client = getattr(module, kind)()

    async def three_requests():
        for number in range(3):
            assert await client._acquire_server(str(number), prompt_ids=[1]) == ("server", "handle")
            client._release_server("server", request_id=str(number))

    asyncio.run(three_requests())
    assert counts == {"asked": asked, "released": released}
