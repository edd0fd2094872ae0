"""The rollout server's gates, weights and errors, in process and without Ray."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from dataflex_verl.local.engine import Engine, ServerSettings
from dataflex_verl.local.server import RolloutServer

PROMPT = [4, 7, 9, 12, 5]


class Slow:
    """Makes a server's model take a moment for every token, so that a test can act in the middle of a batch."""

    def __init__(self, monkeypatch, server, seconds=0.03):
        self.steps = 0
        forward = server.engine.model.forward

        def slow(*args, **kwargs):
            self.steps += 1
            time.sleep(seconds)
            return forward(*args, **kwargs)

        slow.__signature__ = __import__("inspect").signature(forward)
        monkeypatch.setattr(server.engine.model, "forward", slow)

    async def reach(self, steps):
        while self.steps < steps:
            await asyncio.sleep(0.005)


def test_requests_before_the_first_weights_are_refused(model_dir):
    server = RolloutServer(ServerSettings(str(model_dir("llama")), str(model_dir("llama"))))
    with pytest.raises(RuntimeError, match="no weights"):
        asyncio.run(server.generate(PROMPT, {}, "r"))


def test_answers_carry_the_version_of_the_weights(client):
    local = client()
    assert local.ask_all((PROMPT, {}), version=4)[0].extra_fields == {"global_steps": 4}


def test_log_probs_are_left_out_when_not_asked_for(client):
    answer = client().ask_all((PROMPT, {"logprobs": False}))[0]
    assert answer.log_probs is None and answer.token_ids


def test_new_weights_change_what_is_generated(client):
    local = client()
    request = (PROMPT, {"temperature": 0, "ignore_eos": True, "max_tokens": 8})
    before = local.ask_all(request)[0].token_ids
    generator = torch.Generator().manual_seed(3)
    kept = dict(local.weights)
    local.weights = {k: v + 0.3 * torch.randn(v.shape, generator=generator) for k, v in kept.items()}
    try:
        changed = local.ask_all(request)[0]
        local.model.load_state_dict(local.weights)
        expected = local.log_probs(PROMPT, changed.token_ids)
    finally:
        local.weights = kept
        local.model.load_state_dict(kept)
    assert changed.token_ids != before
    assert torch.allclose(torch.tensor(changed.log_probs), expected, atol=1e-4)
    assert local.ask_all(request)[0].token_ids == before


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen2", "qwen3_moe"])
def test_weights_under_the_names_of_verls_engine_are_loaded(model_dir, family):
    from verl.utils.model import convert_weight_keys
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    directory = str(model_dir(family))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    sent = dict(unfuse_moe_params(convert_weight_keys(model.state_dict(), model).items(), model.config.model_type))
    engine = Engine(ServerSettings(directory, directory))
    engine.load(sent)
    assert all(torch.equal(value, engine.model.state_dict()[name]) for name, value in model.state_dict().items())


def test_of_tied_weights_one_is_enough(model_dir):
    directory = str(model_dir("qwen2"))
    weights = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        engine = Engine(ServerSettings(directory, directory))
        engine.load({key: value for key, value in weights.items() if key != name})
        assert torch.equal(engine.model.state_dict()["lm_head.weight"], weights["lm_head.weight"])


def test_missing_and_unexpected_weights_are_named(client):
    local = client()
    weights = dict(local.weights)
    weights["model.layers.0.self_attn.q_proj.lora_A.weight"] = weights.pop("model.norm.weight")

    async def load():
        await local.server.load_weights(weights, 1)

    with pytest.raises(RuntimeError, match=r"missing model\.norm\.weight \(1\); unexpected .*lora_A\.weight \(1\)"):
        local.run(load)


def test_a_wrong_request_fails_alone(client):
    local = client()

    async def story():
        return await asyncio.gather(
            local.ask(PROMPT),
            local.ask([4, 10_000]),
            local.ask([]),
            local.ask(PROMPT, best_of=3),
            local.server.generate(PROMPT, {}, "r", image_data=[1]),
            local.ask([5] * 64),
            local.ask(PROMPT),
            return_exceptions=True,
        )

    answers = local.run(story)
    assert answers[0].token_ids and answers[6].token_ids
    messages = [str(answer) for answer in answers[1:6]]
    assert all(isinstance(answer, ValueError) for answer in answers[1:6]), answers
    for message, part in zip(
        messages,
        ("token ids [10000]", "an empty prompt", "best_of", "text only; got image_data", "no room"),
        strict=True,
    ):
        assert part in message


def test_an_error_of_the_model_reaches_its_callers_and_no_others(client, monkeypatch):
    local = client()
    from dataflex_verl.local import engine

    original = engine.generate

    def failing(model, tokenizer, requests, eos_ids, aborted):
        if requests[0].params.greedy:
            raise ArithmeticError("no such number")
        original(model, tokenizer, requests, eos_ids, aborted)

    monkeypatch.setattr(engine, "generate", failing)

    async def story():
        asks = (local.ask(PROMPT, temperature=t) for t in (0, 1.0, 0))
        return await asyncio.gather(*asks, return_exceptions=True)

    first, second, third = local.run(story)
    assert isinstance(first, ArithmeticError) and isinstance(third, ArithmeticError)
    assert second.token_ids
    monkeypatch.undo()
    assert local.ask_all((PROMPT, {"temperature": 0}))[0].token_ids


def test_default_length_follows_verls_rule(client):
    local = client(response_length=6, prompt_length=8)
    requests = [([5] * n, {"ignore_eos": True}) for n in (4, 8, 11, 20)]
    assert [len(answer.token_ids) for answer in local.ask_all(*requests)] == [6, 6, 3, 1]


def test_lengths_end_at_the_context_and_max_tokens_is_at_least_one(client):
    local = client()
    requests = [
        ([5] * 60, {"ignore_eos": True, "max_tokens": 50}),
        (PROMPT, {"ignore_eos": True, "max_new_tokens": 3}),
        (PROMPT, {"ignore_eos": True, "max_tokens": 0}),
        (PROMPT, {"ignore_eos": True, "max_tokens": None, "max_new_tokens": None}),
    ]
    assert [len(answer.token_ids) for answer in local.ask_all(*requests)] == [4, 3, 1, 12]
    short = client(max_model_len=10)
    assert len(short.ask_all((PROMPT, {"ignore_eos": True, "max_tokens": 50}))[0].token_ids) == 5


def test_prompt_may_be_a_tensor(client):
    local = client()
    params = {"temperature": 0}
    as_list, as_tensor = local.ask_all((PROMPT, params), (torch.tensor(PROMPT), params))
    assert as_list.token_ids == as_tensor.token_ids


def test_requests_wait_while_asleep_and_until_the_weights_are_followed_by_the_cache(client):
    local = client()

    async def story():
        await local.server.sleep()
        waiting = asyncio.create_task(local.ask(PROMPT, max_tokens=2))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await local.server.wake_up(tags=["weights"])
        await local.load(5)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await local.server.wake_up(tags=["kv_cache"])
        return await waiting

    assert local.run(story).extra_fields == {"global_steps": 5}


def test_sleep_returns_when_the_running_batch_is_done(client, monkeypatch):
    local = client()
    slow = Slow(monkeypatch, local.server)

    async def story():
        running = asyncio.create_task(local.ask(PROMPT, ignore_eos=True, max_tokens=6))
        await slow.reach(2)
        await local.server.sleep()
        await asyncio.sleep(0)
        assert running.done() and len(running.result().token_ids) == 6
        late = asyncio.create_task(local.ask(PROMPT))
        await asyncio.sleep(0.1)
        assert not late.done()
        late.cancel()

    local.run(story)


def test_without_free_cache_engine_sleep_does_nothing(client):
    local = client(frees_cache=False)

    async def story():
        await local.server.sleep()
        return await local.ask(PROMPT)

    assert local.run(story).token_ids


def test_abort_returns_partial_tokens_and_a_retry_completes_them(client, monkeypatch):
    local = client()
    slow = Slow(monkeypatch, local.server)
    limit = 10

    async def retry():
        """As verl's FullyAsyncLLMServerClient does."""
        tokens, log_probs, reasons = [], [], []
        while True:
            answer = await local.ask(PROMPT + tokens, ignore_eos=True, max_tokens=limit - len(tokens))
            tokens += answer.token_ids
            log_probs += answer.log_probs
            reasons.append(answer.stop_reason)
            if len(tokens) >= limit or answer.stop_reason != "aborted":
                return tokens, log_probs, reasons

    async def story():
        running = asyncio.create_task(retry())
        short = asyncio.create_task(local.ask(PROMPT, ignore_eos=True, max_tokens=1))
        await slow.reach(3)
        result = await local.server.abort_all_requests()
        assert result["aborted_count"] == 2
        assert (await short).stop_reason == "completed"
        await asyncio.sleep(0.1)
        assert not running.done()
        await local.server.resume_generation()
        return await running

    tokens, log_probs, reasons = local.run(story)
    assert reasons == ["aborted", "completed"]
    assert len(tokens) == len(log_probs) == limit
    monkeypatch.undo()
    expected = local.log_probs(PROMPT, tokens)
    assert torch.allclose(torch.tensor(log_probs), expected, atol=1e-4)


def test_abort_answers_queued_requests_and_rejects_later_ones_if_told_to(client):
    local = client()

    async def story():
        await local.server.sleep()
        queued = asyncio.create_task(local.ask(PROMPT))
        await asyncio.sleep(0.02)
        await local.server.abort_all_requests(reject_request=True)
        rejected = await local.ask(PROMPT)
        await local.server.abort_all_requests()
        held = asyncio.create_task(local.ask(PROMPT))
        await asyncio.sleep(0.05)
        assert not held.done()
        await local.server.wake_up()
        await local.server.resume_generation()
        return await queued, rejected, await held

    queued, rejected, held = local.run(story)
    assert (queued.token_ids, queued.stop_reason) == ([], "aborted")
    assert (rejected.token_ids, rejected.stop_reason) == ([], "aborted")
    assert held.token_ids and held.stop_reason == "completed"


def test_weights_are_replaced_between_two_batches_only(client, monkeypatch):
    local = client()
    slow = Slow(monkeypatch, local.server)

    async def story():
        running = asyncio.create_task(local.ask(PROMPT, ignore_eos=True, max_tokens=6))
        await slow.reach(2)
        loading = asyncio.create_task(local.load(9))
        answer = await running
        await loading
        return answer

    answer = local.run(story)
    monkeypatch.undo()
    assert torch.allclose(torch.tensor(answer.log_probs), local.log_probs(PROMPT, answer.token_ids), atol=1e-4)


def test_drain_waits_for_all_answers(client, monkeypatch):
    local = client()
    Slow(monkeypatch, local.server, seconds=0.01)

    async def story():
        asks = [asyncio.create_task(local.ask(PROMPT, max_tokens=3)) for _ in range(3)]
        await asyncio.sleep(0)
        await local.server.wait_for_requests_to_drain()
        await asyncio.sleep(0)
        assert all(ask.done() for ask in asks)

    local.run(story)


def test_many_batches_in_a_row_leave_nothing_running(client):
    local = client(max_num_seqs=2)

    async def story():
        answers = await asyncio.gather(*(local.ask(PROMPT, max_tokens=1 + i % 3) for i in range(11)))
        await local.server.sleep()
        return answers

    assert len(local.run(story)) == 11
    assert local.server._running == 0


def test_calls_without_an_accelerators_meaning_answer(client):
    local = client()

    async def story():
        server = local.server
        calls = (server.clear_kv_cache, server.release_kv_cache, server.resume_kv_cache)
        profile = (server.start_profile, server.stop_profile)
        return [await call() for call in (*calls, *profile)]

    assert local.run(story) == [None] * 5


def test_end_tokens_come_from_generation_config_else_model_else_tokenizer(model_dir, tokenizer, tmp_path):
    import json
    import shutil

    directory = tmp_path / "model"
    shutil.copytree(model_dir("llama"), directory)
    settings = ServerSettings(str(directory), str(directory))
    GenerationConfig(eos_token_id=[7, 8]).save_pretrained(directory)
    assert Engine(settings).eos_ids == [7, 8, tokenizer.eos_token_id]
    (directory / "generation_config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    assert Engine(settings).eos_ids == [9, tokenizer.eos_token_id]
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    assert Engine(settings).eos_ids == [tokenizer.eos_token_id]


def test_sampling_defaults_that_come_with_a_model_do_not_act(model_dir, client, tmp_path):
    import shutil

    directory = tmp_path / "model"
    shutil.copytree(model_dir("llama"), directory)
    GenerationConfig(repetition_penalty=5.0, max_length=7, do_sample=True, top_k=1).save_pretrained(directory)
    plain = client()
    other = type(plain)(directory)
    requests = [(PROMPT, {"ignore_eos": True, "max_tokens": 10})] * 3
    assert [a.token_ids for a in other.ask_all(*requests)] == [a.token_ids for a in plain.ask_all(*requests)]
