"""Token ids become text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Decoder:
    """Decodes as verl's reward managers do, without special tokens.

    Args:
        source: where the tokenizer lies, an object with ``decode``, or None.
        remote_code: whether code that comes with the tokenizer may run.
    """

    def __init__(self, source: Any, remote_code: bool) -> None:
        self.source, self.remote_code = source, remote_code
        self._tokenizer: Any = None

    @property
    def is_loaded(self) -> bool:
        """Whether it has decoded something already."""
        return self._tokenizer is not None

    def __call__(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; the tokenizer is loaded at the first call."""
        if self._tokenizer is None:
            self._tokenizer = self.source if hasattr(self.source, "decode") else self._load()
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.source, trust_remote_code=self.remote_code)
