"""The model of the rollout server: built from a Hugging Face directory, fed by the trainer, generating batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dataflex_verl.local.sampling import Request, SamplingParams, generate


@dataclass(frozen=True)
class ServerSettings:
    """What the server needs of verl's rollout and model configuration.

    Attributes:
        threads: torch's threads for one operation. Their number decides last bits of a sum.
        max_model_len: longest prompt and response together; None for the model's own limit.
        frees_cache: verl's ``free_cache_engine``: without it, ``sleep`` is not followed by ``wake_up``.
        override_config: changes to the model's ``config.json``.
    """

    model_path: str
    tokenizer_path: str
    dtype: str = "float32"
    prompt_length: int = 512
    response_length: int = 512
    max_num_seqs: int = 1024
    ignore_eos: bool = False
    seed: int = 0
    threads: int = 1
    max_model_len: int | None = None
    frees_cache: bool = True
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)


class Engine:
    """A causal language model whose weights the trainer sends.

    Attributes:
        eos_ids: the model's end tokens.
        max_length: longest prompt and response together, None without a limit.
        vocabulary: number of token ids.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        torch.set_num_threads(settings.threads)
        trust = settings.trust_remote_code
        config = AutoConfig.from_pretrained(settings.model_path, trust_remote_code=trust, **settings.override_config)
        self.model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, settings.dtype), trust_remote_code=trust
        ).eval()
        # Sampling is this package's; defaults that come with a model would act on top of it.
        self.model.generation_config = GenerationConfig()
        self.tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_path, trust_remote_code=trust)
        self.eos_ids = _end_tokens(settings.model_path, config, self.tokenizer)
        limits = (settings.max_model_len, getattr(config.get_text_config(), "max_position_embeddings", None))
        self.max_length = min((limit for limit in limits if limit), default=None)
        self.vocabulary: int = self.model.get_input_embeddings().weight.shape[0]

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights. Every one must be there and no other: a partial load would train one model and
        generate with another.

        Raises:
            RuntimeError: naming missing and unexpected weights.
        """
        own = self.model.state_dict()
        weights = _join_experts(weights, own)
        aliases: dict[tuple[int, int], set[str]] = defaultdict(set)
        for name, tensor in own.items():
            aliases[(tensor.data_ptr(), tensor.storage_offset())].add(name)
        # Of tied weights one is enough, under either name.
        missing = sorted(min(names) for names in aliases.values() if not names & set(weights))
        unexpected = sorted(set(weights) - set(own))
        if missing or unexpected:
            raise RuntimeError(
                f"The trainer's weights do not fit the rollout model: missing {_some(missing)}; "
                f"unexpected {_some(unexpected)}."
            )
        self.model.load_state_dict(weights, strict=False)

    def parse(self, prompt_ids: Any, sampling_params: Mapping[str, Any]) -> tuple[list[int], SamplingParams, int]:
        """Check a request and return its token ids, its parameters and the most tokens it may get.

        Without ``max_tokens`` that is verl's rule: ``response_length``, and no more than the prompt leaves of
        ``prompt_length + response_length``.

        Raises:
            ValueError: unknown or impossible parameters, ids that are no tokens, no room left in the context.
        """
        ids = [int(token) for token in (prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids)]
        wrong = [token for token in ids if not 0 <= token < self.vocabulary]
        if wrong or not ids:
            problem = f"token ids {wrong[:5]} outside 0..{self.vocabulary - 1}" if wrong else "an empty prompt"
            raise ValueError(f"The local rollout got {problem}.")
        if self.max_length is not None and len(ids) >= self.max_length:
            raise ValueError(f"A prompt of {len(ids)} tokens leaves no room in a context of {self.max_length}.")
        params = {name: value for name, value in sampling_params.items() if value is not None}
        params.setdefault("ignore_eos", self.settings.ignore_eos)
        room = self.settings.prompt_length + self.settings.response_length - len(ids)
        limit = params.pop("max_new_tokens", min(self.settings.response_length, room))
        limit = params.pop("max_tokens", limit)
        if self.max_length is not None:
            limit = min(limit, self.max_length - len(ids))
        return ids, SamplingParams.from_request(params), max(1, int(limit))

    def generate(self, requests: Iterable[Request], aborted: Callable[[], bool]) -> dict[int, BaseException]:
        """Generate for any mix of requests and fill their results in place.

        Returns:
            Errors by position of the request; requests of other sampling parameters are not touched by one.
        """
        groups: dict[tuple[int, SamplingParams], list[tuple[int, Request]]] = defaultdict(list)
        for position, request in enumerate(requests):
            groups[(request.bucket, request.params)].append((position, request))
        errors: dict[int, BaseException] = {}
        for group in groups.values():
            members = [request for _, request in group]
            if aborted():
                for request in members:
                    request.stop_reason = "aborted"
                continue
            try:
                generate(self.model, self.tokenizer, members, self.eos_ids, aborted)
            except Exception as error:
                errors.update((position, error) for position, _ in group)
        return errors


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''} ({len(names)})" if names else "none"


def _join_experts(weights: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo verl's ``unfuse_moe_params``, which sends packed experts one by one, under vLLM's names."""
    weights = dict(weights)
    for name in own:
        base, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if (
            name in weights
            or parts is None
            or not base.endswith(".experts")
            or f"{base}.0.{parts[0]}.weight" not in weights
        ):
            continue
        experts = range(own[name].shape[0])
        names = [[f"{base}.{expert}.{part}.weight" for part in parts] for expert in experts]
        if all(one in weights for group in names for one in group):
            weights[name] = torch.stack([torch.cat([weights.pop(one) for one in group]) for group in names])
    return weights


def _end_tokens(model_path: str, config: Any, tokenizer: Any) -> list[int]:
    """From generation_config.json, else the model's config; the tokenizer's is one in any case."""
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
