"""A tiny Llama-type model for the demo tasks."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int, hidden: int = 64, layers: int = 2) -> LlamaForCausalLM:
    """Make a randomly initialised fp32 model of about 90 thousand parameters; torch's global generator is left alone.

    Args:
        tokenizer: gives the vocabulary, the special tokens and the longest sequence (``model_max_length``, tokens).
        seed: decides the initial weights.
        hidden: width of the residual stream, a multiple of 8.
        layers: number of transformer blocks.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # The default of 0.02 learns these tasks at half the speed.
        initializer_range=0.05,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
