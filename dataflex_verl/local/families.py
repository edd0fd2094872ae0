"""Hooks after which verl trains any causal language model of transformers, not only those of its own recipes."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def add_plain_chat_template(module: ModuleType) -> None:
    """verl renders every prompt with a chat template, also for a model that comes without one."""
    # Called by verl for every tokenizer it loads; hf_tokenizer itself has been imported by name in many places.
    original = module.set_pad_token_id

    @functools.wraps(original)
    def set_pad_token_id(tokenizer: Any) -> None:
        original(tokenizer)
        if not tokenizer.chat_template:
            tokenizer.chat_template = PLAIN_TEMPLATE
            logger.warning(
                "The tokenizer in %s has no chat template: the local backend joins the messages' contents. "
                "actor_rollout_ref.model.custom_chat_template sets another.",
                tokenizer.name_or_path,
            )

    module.set_pad_token_id = set_pad_token_id


def find_language_model_heads(module: ModuleType) -> None:
    """verl knows a language model by "ForCausalLM" in its name, and takes GPT2LMHeadModel for a model without head."""
    original = module.get_hf_auto_model_class

    @functools.wraps(original)
    def get_hf_auto_model_class(hf_config: Any) -> Any:
        from transformers import AutoModel, AutoModelForCausalLM

        found = original(hf_config)
        if found is AutoModel and type(hf_config) in AutoModelForCausalLM._model_mapping:
            if AutoModelForCausalLM._model_mapping[type(hf_config)].__name__ in hf_config.architectures:
                return AutoModelForCausalLM
        return found

    module.get_hf_auto_model_class = get_hf_auto_model_class


def accept_ungrouped_heads(module: ModuleType) -> None:
    """verl reads num_key_value_heads of every model. Families that never share key-value heads, such as GPT-2 and
    GPT-NeoX, have no such setting."""
    original = module.apply_monkey_patch

    @functools.wraps(original)
    def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
        config = model.config.get_text_config()
        if hasattr(config, "num_key_value_heads"):
            return original(model, *args, **kwargs)
        config.num_key_value_heads = config.num_attention_heads
        try:
            return original(model, *args, **kwargs)
        finally:
            del config.num_key_value_heads

    module.apply_monkey_patch = apply


def load_value_head_without_flash_attention(module: ModuleType) -> None:
    """verl hard-codes attn_implementation="flash_attention_2" for the critic."""

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    module.load_valuehead_model = load_valuehead_model
