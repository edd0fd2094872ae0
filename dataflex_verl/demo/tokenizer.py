"""A character-level tokenizer in Hugging Face's format, with a chat template of three marker tokens."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK, USER, ASSISTANT = "<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK, USER, ASSISTANT)
CHARACTERS = string.digits + string.ascii_lowercase + " +-*%=<>?,.()"

# A user turn is `<user>...`, an assistant turn `<assistant>...<eos>`: a one-turn prompt costs three tokens beyond its
# characters, and the token that ends a turn is the one that the model has to emit.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + eos_token }}"
    "{% else %}{{ '<user>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def make_tokenizer(max_length: int = 64) -> PreTrainedTokenizerFast:
    """Build the tokenizer; one token a character, ids in the order of ``SPECIAL_TOKENS + CHARACTERS``.

    Args:
        max_length: longest sequence that the model supports, in tokens.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    # BPE without merges leaves single characters.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
