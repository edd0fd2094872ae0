"""Tiny model directories of several families, and a rollout server without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from dataflex_verl.demo.tokenizer import make_tokenizer
from dataflex_verl.local.engine import ServerSettings
from dataflex_verl.local.server import RolloutServer

SMALL = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
GROUPED = dict(SMALL, num_key_value_heads=2, max_position_embeddings=64)
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **ids: LlamaConfig(**GROUPED, tie_word_embeddings=False, **ids),
    "gpt2": lambda **ids: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **ids),
    "gpt_neox": lambda **ids: GPTNeoXConfig(**SMALL, max_position_embeddings=64, **ids),
    "qwen2": lambda **ids: Qwen2Config(**GROUPED, tie_word_embeddings=True, **ids),
    "qwen3_moe": lambda **ids: Qwen3MoeConfig(
        **GROUPED, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, **ids
    ),
}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Callable[[str], Path]:
    """The directory of a family's model, made on the first call. Weights are wide, so that logits differ."""

    @lru_cache
    def make(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        config = CONFIGS[family](
            vocab_size=len(tokenizer),
            initializer_range=0.3,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return directory

    return make


class Client:
    """A server with the weights of its directory, driven from a test."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        settings = {"prompt_length": 24, "response_length": 12, "seed": 7, **settings}
        self.server = RolloutServer(ServerSettings(str(directory), str(directory), **settings))
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    async def load(self, version: int = 0) -> None:
        await self.server.load_weights(self.weights, version)

    async def ask(self, prompt: list[int], **params: Any) -> Any:
        return await self.server.generate(prompt, params, "request")

    def ask_all(self, *requests: tuple[list[int], dict[str, Any]], version: int = 0) -> list[Any]:
        """Answers to requests sent at once to a server whose noise starts anew."""

        async def go() -> list[Any]:
            await self.server.set_global_steps(None)
            await self.load(version)
            return await asyncio.gather(*(self.ask(prompt, **params) for prompt, params in requests))

        return asyncio.run(go())

    def run(self, story: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine function on a server with weights, gates open."""

        async def go() -> Any:
            await self.server.set_global_steps(None)
            await self.load()
            await self.server.resume_generation()
            await self.server.wake_up()
            return await asyncio.wait_for(story(), timeout=30)

        return asyncio.run(go())

    def log_probs(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Of the response, by one forward pass without padding or cache."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.fixture(scope="session")
def client(model_dir: Callable[[str], Path]) -> Callable[..., Client]:
    """A client of a server of this family; servers are shared by tests that ask for the same settings."""

    @lru_cache
    def make(family: str = "llama", **settings: Any) -> Client:
        return Client(model_dir(family), **settings)

    return make
