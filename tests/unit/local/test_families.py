"""verl's handling of model families on the local backend."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from dataflex_verl.local import families


def test_families_without_grouped_heads_pass_and_keep_their_configuration(model_dir):
    seen = []
    module = SimpleNamespace(apply_monkey_patch=lambda model, **kwargs: seen.append(model.config.num_key_value_heads))
    families.accept_ungrouped_heads(module)
    for family in ("gpt2", "llama"):
        config = AutoConfig.from_pretrained(model_dir(family))
        before = config.to_dict()
        module.apply_monkey_patch(SimpleNamespace(config=config), use_remove_padding=False)
        assert config.to_dict() == before
    assert seen == [4, 2]


@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_a_tokenizer_without_chat_template_gets_a_plain_one(model_dir, tmp_path, template, caplog):
    from verl.utils import hf_tokenizer

    source = AutoTokenizer.from_pretrained(model_dir("llama"))
    source.chat_template = template
    source.save_pretrained(tmp_path)
    loaded = hf_tokenizer(str(tmp_path))
    if template is None:
        rendered = loaded.apply_chat_template([{"content": "1+"}, {"content": "2"}], tokenize=False)
        assert rendered == "1+2" and f"{tmp_path} has no chat template" in caplog.text
    else:
        assert loaded.chat_template == template and "no chat template" not in caplog.text


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2", "qwen3_moe"])
def test_verl_finds_the_language_model_of_every_family(model_dir, family):
    from verl.utils.model import get_hf_auto_model_class

    assert get_hf_auto_model_class(AutoConfig.from_pretrained(model_dir(family))) is AutoModelForCausalLM


def test_a_model_without_head_stays_one(model_dir):
    from verl.utils.model import get_hf_auto_model_class

    config = AutoConfig.from_pretrained(model_dir("gpt2"), architectures=["GPT2Model"])
    assert get_hf_auto_model_class(config) is AutoModel


def test_a_value_head_loads_without_flash_attention(model_dir):
    module = ModuleType("model")
    families.load_value_head_without_flash_attention(module)
    directory = str(model_dir("llama"))
    config = AutoConfig.from_pretrained(directory, num_labels=1)
    critic = module.load_valuehead_model(directory, torch.float32, config, False)
    assert critic(torch.tensor([[4, 5, 6]])).logits.shape == (1, 3, 1)
