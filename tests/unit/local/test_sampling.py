"""Tokens and log-probabilities of the local rollout, against plain forward passes and transformers' own processors."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dataflex_verl.local.sampling import SamplingParams, noise_seed

DENSE = ["llama", "gpt2", "gpt_neox", "qwen2"]
FAMILIES = [*DENSE, "qwen3_moe"]
PROMPT = [4, 7, 9, 12, 5]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6, 40) for _ in range(rng.randrange(1, 24))] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_fresh_forward(client, family):
    local = client(family)
    requests = [(prompt, {"temperature": 1.0}) for prompt in prompts(12)]
    for (prompt, _), answer in zip(requests, local.ask_all(*requests), strict=True):
        expected = local.log_probs(prompt, answer.token_ids)
        assert torch.allclose(torch.tensor(answer.log_probs), expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_generate(client, family):
    local = client(family)
    requests = [(prompt, {"temperature": 0, "ignore_eos": True, "max_tokens": 8}) for prompt in prompts(6)]
    for (prompt, _), answer in zip(requests, local.ask_all(*requests), strict=True):
        config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        local.model.generation_config = GenerationConfig()
        expected = local.model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :]
        assert answer.token_ids == expected.tolist()


@pytest.mark.parametrize("family", DENSE)
def test_a_request_gets_the_same_tokens_alone_and_among_others(client, family):
    local = client(family)
    request = (PROMPT, {"temperature": 1.0, "max_tokens": 10})
    alone = local.ask_all(request)[0]
    for count in (1, 14, 15, 16, 31, 70):
        others = [(prompt, request[1]) for prompt in prompts(count, seed=count) if prompt != PROMPT]
        among = local.ask_all(*others[: count // 2], request, *others[count // 2 :])[count // 2]
        assert (among.token_ids, among.log_probs) == (alone.token_ids, alone.log_probs), count


def test_noise_differs_by_repetition_version_and_seed_and_repeats_otherwise():
    params = SamplingParams()
    seeds = [noise_seed(*case, params) for case in ((0, 0, PROMPT, 0), (0, 0, PROMPT, 1), (0, 1, PROMPT, 0))]
    seeds += [noise_seed(1, 0, PROMPT, 0, params), noise_seed(0, 0, PROMPT[:-1], 0, params)]
    assert len(set(seeds)) == 5
    assert noise_seed(0, 0, PROMPT, 0, params) == seeds[0]


def test_a_request_with_a_seed_of_its_own_is_repeatable(client):
    local = client()
    request = (PROMPT, {"seed": 5, "max_tokens": 12})
    first, second, other = local.ask_all(request, request, (PROMPT, {"seed": 6, "max_tokens": 12}))
    assert first.token_ids == second.token_ids != other.token_ids
    assert local.ask_all(request, version=3)[0].token_ids == first.token_ids


def test_repeated_requests_differ_and_a_version_of_the_weights_starts_anew(client):
    local = client()
    requests = [(PROMPT, {"max_tokens": 12})] * 4
    first, again = local.ask_all(*requests), local.ask_all(*requests)
    assert len({tuple(answer.token_ids) for answer in first}) > 1
    assert [a.token_ids for a in first] == [a.token_ids for a in again]
    assert [a.token_ids for a in local.ask_all(*requests, version=1)] != [a.token_ids for a in first]


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        ({"temperature": 0.7}, TemperatureLogitsWarper(0.7)),
        ({"top_k": 3}, TopKLogitsWarper(3)),
        ({"top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
        ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sampling_parameters_act_as_transformers_processors(client, params, processor):
    local = client("llama")
    params = {"ignore_eos": True, "max_tokens": 6, **params}
    for prompt, answer in zip(prompts(8), local.ask_all(*((prompt, params) for prompt in prompts(8))), strict=True):
        ids = torch.tensor([prompt])
        for token, log_prob in zip(answer.token_ids, answer.log_probs, strict=True):
            with torch.inference_mode():
                logits = local.model(ids).logits[:, -1].float()
            expected = torch.log_softmax(LogitsProcessorList([processor])(ids, logits), -1)[0, token]
            assert log_prob == pytest.approx(float(expected), abs=1e-4)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_repetition_penalty_does_not_punish_padding(client):
    local = client()
    params = {"repetition_penalty": 4.0, "temperature": 0, "max_tokens": 1}
    pad = local.server.engine.eos_ids[0]
    assert pad not in PROMPT
    with torch.inference_mode():
        logits = local.model(torch.tensor([PROMPT])).logits[:, -1].float()
    expected = RepetitionPenaltyLogitsProcessor(4.0)(torch.tensor([PROMPT]), logits)
    answer = local.ask_all((PROMPT, params))[0]
    assert answer.log_probs[0] == pytest.approx(float(torch.log_softmax(expected, -1).max()), abs=1e-4)


def test_sampled_frequencies_follow_the_distribution(client):
    local = client()
    answers = local.ask_all(*[(PROMPT, {"max_tokens": 1})] * 2000)
    counts = Counter(answer.token_ids[0] for answer in answers)
    with torch.inference_mode():
        expected = torch.softmax(local.model(torch.tensor([PROMPT])).logits[0, -1].double(), -1)
    observed = torch.tensor([counts[i] / 2000 for i in range(len(expected))], dtype=torch.float64)
    assert (observed - expected).abs().sum() / 2 < 0.06


def test_stop_tokens_end_a_row_and_stay_in_the_response(client):
    local = client()
    free = local.ask_all((PROMPT, {"temperature": 0, "ignore_eos": True, "max_tokens": 8}))[0].token_ids
    stop = free[3]
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
    first = free.index(stop)
    answer, longer, both = local.ask_all(
        (PROMPT, {**params, "stop_token_ids": [stop]}),
        (PROMPT, {**params, "stop_token_ids": [stop], "min_tokens": first + 2}),
        (PROMPT, {**params, "stop_token_ids": [stop, free[0]]}),
    )
    assert (answer.token_ids, answer.stop_reason) == (free[: first + 1], "completed")
    assert len(longer.token_ids) >= first + 2
    assert both.token_ids == free[:1]


def test_end_token_ends_a_row_unless_ignored(model_dir, client):
    local = client()
    free = local.ask_all((PROMPT, {"temperature": 0, "ignore_eos": True, "max_tokens": 8}))[0].token_ids
    kept = local.server.engine.eos_ids
    local.server.engine.eos_ids = [free[2]]
    try:
        params = {"temperature": 0, "max_tokens": 8}
        ended, ignored, late = local.ask_all(
            (PROMPT, params), (PROMPT, {**params, "ignore_eos": True}), (PROMPT, {**params, "min_tokens": 6})
        )
    finally:
        local.server.engine.eos_ids = kept
    assert ended.token_ids == free[: free.index(free[2]) + 1]
    assert ignored.token_ids == free
    assert free[2] not in late.token_ids[:6] and len(late.token_ids) >= 6


def test_stop_strings_end_a_row_with_the_token_that_completes_them(client, tokenizer):
    local = client()
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 10}
    free = local.ask_all((PROMPT, params))[0].token_ids
    text = tokenizer.decode(free[1:3], skip_special_tokens=True)
    assert len(text) == 2
    end = tokenizer.decode(free, skip_special_tokens=True).index(text) + 2
    answer, other, late = local.ask_all(
        (PROMPT, {**params, "stop": text}),
        (PROMPT, {**params, "stop": ["###", text]}),
        (PROMPT, {**params, "stop": [text], "min_tokens": 9}),
    )
    assert len(tokenizer.decode(answer.token_ids, skip_special_tokens=True)) == end
    assert answer.token_ids == other.token_ids == free[: len(answer.token_ids)]
    assert len(late.token_ids) >= 9


def test_rows_of_one_batch_end_each_at_its_own_length(client):
    local = client()
    requests = [(prompt, {"ignore_eos": True, "max_tokens": 1 + i}) for i, prompt in enumerate(prompts(9))]
    answers = local.ask_all(*requests)
    assert [len(answer.token_ids) for answer in answers] == list(range(1, 10))
    assert all(len(answer.log_probs) == len(answer.token_ids) for answer in answers)
    assert {answer.stop_reason for answer in answers} == {"completed"}


def test_one_batch_holds_different_sampling_parameters(client):
    local = client()
    kinds = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 4}, {"top_p": 0.9}]
    requests = [(PROMPT, {**kinds[i % 4], "max_tokens": 6, "ignore_eos": True}) for i in range(12)]
    together = local.ask_all(*requests)
    apart = [answer for kind in range(4) for answer in local.ask_all(*requests[kind::4])]
    assert [answer.token_ids for kind in range(4) for answer in together[kind::4]] == [a.token_ids for a in apart]


def test_a_second_turn_continues_the_first(client):
    local = client()
    first = local.ask_all((PROMPT, {"max_tokens": 4, "ignore_eos": True}))[0].token_ids
    second_prompt = [*PROMPT, *first, 5, 8]
    second = local.ask_all((second_prompt, {"max_tokens": 4}))[0]
    expected = local.log_probs(second_prompt, second.token_ids)
    assert torch.allclose(torch.tensor(second.log_probs), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"best_of": 2}, "does not support the sampling parameter.*best_of.*temperature"),
        ({"temperature": -1}, "out of range: temperature=-1"),
        ({"top_p": 0}, "out of range: top_p=0"),
        ({"top_k": -2}, "out of range: top_k=-2"),
        ({"repetition_penalty": 0}, "out of range: repetition_penalty=0"),
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_request(params)


def test_parameters_are_equal_whatever_number_type_they_came_in():
    assert SamplingParams.from_request({"temperature": 1, "top_p": 1}) == SamplingParams()
    assert repr(SamplingParams.from_request({"temperature": 1})) == repr(SamplingParams())
    assert SamplingParams.from_request({"logprobs": 0}).logprobs
    assert not SamplingParams.from_request({"logprobs": False}).logprobs
