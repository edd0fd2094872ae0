"""Checks of rows that a plugin adds: one clear error each, naming the plugin and the row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dataflex_hooks import AddedRow, DecisionError, Origin

pytest.importorskip("transfer_queue", reason="needs verl: pip install 'dataflex-verl[local]'")

from dataflex_verl.added_checks import Limits, resolve  # noqa: E402


class Letters:
    """A tokenizer of 26 letters."""

    def __len__(self):
        return 26

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        return [ord(letter) - ord("a") for letter in text]


LIMITS = Limits(prompt=4, response=3, vocabulary=26, log_probs=True, bypass=False)
FINE = AddedRow(prompt="ab", response=[2, 3], advantage=0.5)


def resolved(*rows, limits=LIMITS):
    origin = Origin("demos", "post_reward", 7, "acme", "1.2")
    return resolve(rows, origin, limits, Letters(), {"group"})


def test_text_and_token_ids_become_token_ids_with_an_advantage_each():
    first, second = resolved(
        FINE, AddedRow(torch.tensor([1]), "xyz", [1.0, -1.0, 0.0], "math", 2.5, torch.tensor([-0.5, -1.0, 0.0]))
    )
    assert (first.prompt, first.response, first.advantages) == ([0, 1], [2, 3], [0.5, 0.5])
    assert (first.reward, first.domain, first.log_probs) == (0.0, None, None)
    assert (second.prompt, second.response, second.advantages) == ([1], [23, 24, 25], [1.0, -1.0, 0.0])
    assert (second.reward, second.domain, second.log_probs) == (2.5, "math", [-0.5, -1.0, 0.0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ""}, "prompt is empty; accepted: at least one token"),
        ({"response": []}, "response is empty"),
        ({"prompt": "abcde"}, "prompt has 5 tokens; accepted: at most data.max_prompt_length=4"),
        ({"response": [1] * 4}, "response has 4 tokens; accepted: at most data.max_response_length=3"),
        ({"response": [1, 26]}, "response holds token id 26; accepted: 0 to 25"),
        ({"prompt": [-1]}, "prompt holds token id -1"),
        ({"prompt": [0.5]}, r"prompt is \[0.5\]; accepted: text, or token ids as integers"),
        ({"prompt": 3}, "prompt is 3; accepted: text"),
        ({"advantage": None}, "advantage is None; accepted: a number, or one for every response token, or with a uid"),
        ({"advantage": [1.0]}, "advantage has 1 values; accepted: 2"),
        ({"advantage": -1e39}, r"advantage holds -1e\+39, beyond float32; accepted: finite numbers that it can hold"),
        ({"reward": 1e39}, r"reward holds 1e\+39, beyond float32"),
        ({"reward": 10**400}, "reward is 10+; accepted: numbers"),
        ({"log_probs": [0.0, -1e39]}, r"log_probs holds -1e\+39, beyond float32"),
        ({"advantage": float("nan")}, "advantage holds NaN or an infinity"),
        ({"advantage": "high"}, "advantage .*accepted: numbers"),
        ({"reward": float("inf")}, "reward holds NaN or an infinity"),
        ({"log_probs": [-0.5]}, "log_probs has 1 values; accepted: 2"),
        ({"log_probs": [-0.5, 0.1]}, "log_probs holds 0.1; accepted: log-probabilities, at most 0"),
        ({"domain": 3}, "domain is 3; accepted: a name or None"),
        ({"uid": "gone"}, "uid is 'gone'; accepted: None, or the uid of a group that is in the batch"),
    ],
)
def test_an_unusable_row_is_named_with_what_is_accepted(change, says):
    with pytest.raises(DecisionError, match=rf"plugin 'demos' \(acme 1.2\) in post_reward at step 7: add\[1\]: {says}"):
        resolved(FINE, replace(FINE, **change))


def test_log_probs_are_wanted_where_verl_takes_them_for_its_own_and_refused_where_it_has_no_use_for_them():
    with_log_probs = replace(FINE, log_probs=[-1.0, -2.0])
    bypass = replace(LIMITS, bypass=True)
    assert resolved(with_log_probs, limits=bypass)[0].log_probs == [-1.0, -2.0]
    with pytest.raises(DecisionError, match="log_probs is None.*bypass_mode=True"):
        resolved(FINE, limits=bypass)
    without = replace(LIMITS, log_probs=False)
    assert resolved(FINE, limits=without)[0].log_probs is None
    with pytest.raises(DecisionError, match="calculate_log_probs=False verl has no use"):
        resolved(with_log_probs, limits=without)


def test_an_error_has_the_number_of_the_row():
    with pytest.raises(DecisionError, match=r"plugin 'demos'.*add\[1\]: prompt is empty"):
        resolved(FINE, replace(FINE, prompt=""))
