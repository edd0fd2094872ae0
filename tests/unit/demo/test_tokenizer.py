"""Demo tokenizer: one token a character, a short chat template, and a round trip through its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dataflex_verl.demo.tasks import DOMAINS
from dataflex_verl.demo.tokenizer import CHARACTERS, SPECIAL_TOKENS, UNK, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_special_tokens_survive_saving(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(len(SPECIAL_TOKENS)))
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == ids[:4]
    assert len(tokenizer) == len(SPECIAL_TOKENS) + len(CHARACTERS)


@pytest.mark.parametrize("text", ["12+7", "sort 385", "", CHARACTERS])
def test_text_round_trips_one_token_a_character(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_decoding_leaves_special_tokens_out(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("<bos><user>1<assistant>2<eos><pad>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"


def test_unknown_characters_become_the_unknown_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("É", add_special_tokens=False)["input_ids"] == [tokenizer.convert_tokens_to_ids(UNK)]


def test_chat_template_adds_three_tokens_to_a_question(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_ids_to_tokens(prompt_ids(tokenizer, "1+2")) == [
        "<bos>",
        "<user>",
        "1",
        "+",
        "2",
        "<assistant>",
    ]


def test_chat_template_ends_an_answer_with_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids == prompt_ids(tokenizer, "1+2") + tokenizer.convert_tokens_to_ids(["3", "<eos>"])


def test_every_task_fits_the_recommended_lengths(tokenizer: PreTrainedTokenizerBase) -> None:
    for domain in DOMAINS.values():
        for task in domain.tasks():
            assert len(prompt_ids(tokenizer, task.question)) <= 12
            assert len(task.answer) + 1 <= 4
            assert tokenizer.unk_token_id not in prompt_ids(tokenizer, task.question + task.answer)
