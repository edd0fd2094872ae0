"""Demonstrations come in the amounts and the order asked for, and a file that cannot be used is refused by line."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataflex_sft_mix import SftMix
from dataflex_sft_mix.amount import Share, whole
from dataflex_sft_mix.order import permutation

from dataflex_hooks import ConfigError, ParameterChecks
from dataflex_hooks.testing import assert_plugin_contract, make_context, make_groups, run_hooks

TOKENS = [{"prompt": [1, 2], "response": [10 + i, 3], "domain": "ab"[i % 2]} for i in range(5)]


@pytest.fixture
def write(tmp_path):
    """Write records as JSONL, or lines as they are."""

    def write(records, name="demos.jsonl"):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return write


def rollouts(count):
    return make_groups([1.0] * (count // 2), [0.0] * (count - count // 2))


def added(plugin, step, count=8, seed=0):
    outcome = run_hooks(plugin, rollouts(count), ctx=make_context(step=step, seed=seed))
    rows = [row.response[0] - 10 for _, row in outcome.added]
    assert outcome.metrics.get("dataflex/plugin/demonstrations_total", 0.0) == len(rows)
    return rows


def problems(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        SftMix(*args, **kwargs)
    return [str(problem) for problem in caught.value.problems]


# ---------------------------------------------------------------- amounts


def test_shares_add_up_exactly_and_the_fraction_is_carried(write):
    plugin = SftMix(write(TOKENS), share=0.1)
    counts = [len(added(plugin, step, 12)) for step in range(1, 101)]
    assert sum(counts) == 120 and set(counts) == {1, 2}
    assert [sum(counts[:k]) for k in range(1, 101)] == [12 * k // 10 for k in range(1, 101)]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (1, 8), (0.5, 4)])
def test_a_share_is_of_the_rollouts(write, share, expected):
    assert len(added(SftMix(write(TOKENS), share=share), 1)) == expected


def test_only_every_nth_step_mixes(write):
    plugin = SftMix(write(TOKENS), share=0.25, every=3)
    assert [len(added(plugin, step)) for step in range(1, 8)] == [0, 0, 2, 0, 0, 2, 0]


def test_a_share_falls_as_its_decay_says():
    def share(decay, steps, least):
        checks = ParameterChecks()
        made = Share(0.4, decay, steps, least, checks)
        checks.finish()
        return made

    linear, halving = share("linear", 10, 0.1), share("exponential", 10, 0.1)
    assert [float(linear.at(step)) for step in (0, 5, 10, 99)] == pytest.approx([0.4, 0.25, 0.1, 0.1])
    assert [float(halving.at(step)) for step in (0, 10, 20, 1000)] == pytest.approx([0.4, 0.25, 0.175, 0.1])
    assert share("none", None, 0.0).at(50) == Fraction(2, 5)


def test_a_share_may_be_a_schedule(write):
    plugin = SftMix(write(TOKENS), share={0: 0.5, 4: 0.0})
    assert [len(added(plugin, step)) for step in (0, 2, 4, 6)] == [4, 2, 0, 0]


def test_whole_numbers_come_out_of_exact_fractions():
    assert whole(Fraction(1, 10), 30, Fraction(0)) == (3, Fraction(0))
    assert whole(Fraction(3, 10), 5, Fraction(1, 2)) == (2, Fraction(0))


def test_a_third_is_a_third_and_fractions_stay_short(write):
    plugin = SftMix(write(TOKENS), share=1 / 3)
    assert [len(added(plugin, step, 6)) for step in range(1, 6)] == [2] * 5
    decaying = SftMix(write(TOKENS), share=1 / 3, decay="exponential", decay_steps=7)
    counts = [len(added(decaying, step, 6)) for step in range(1, 200)]
    assert sum(counts) == int(sum(2 * 2 ** (-step / 7) for step in range(1, 200)))
    assert len(decaying.state_dict()["carried"]) < 40


# ---------------------------------------------------------------- order


def test_every_pass_takes_each_once_in_an_order_of_its_own(write):
    plugin = SftMix(write(TOKENS), share=0.5)
    taken = [row for step in range(1, 11) for row in added(plugin, step, 10)]
    passes = [taken[i : i + 5] for i in range(0, 50, 5)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in passes)
    assert len({tuple(one) for one in passes}) > 3


def test_orders_are_permutations_that_favour_no_place():
    first = np.array([permutation(5, seed, epoch) for seed in range(40) for epoch in range(50)])
    assert (np.sort(first, axis=1) == np.arange(5)).all()
    # 2000 draws: each row stands 400 times at each place, give or take five standard deviations of 18.
    counts = np.stack([(first == row).sum(axis=0) for row in range(5)])
    assert abs(counts - 400).max() < 90
    assert permutation(6, 3, 1).tolist() == [5, 2, 4, 0, 3, 1]


def test_the_seed_decides_the_order(write):
    path = write(TOKENS)

    def order(run_seed, seed=None):
        return added(SftMix(path, share=1, seed=seed), 1, 20, run_seed)

    assert order(0) == order(0) != order(1)
    assert order(0, seed=7) == order(1, seed=7) != order(1)


def test_a_restored_run_goes_on_with_the_next_demonstration(write):
    path = write(TOKENS)
    whole_run, first = SftMix(path, share=0.3), SftMix(path, share=0.3)
    expected = [added(whole_run, step, 7) for step in range(1, 20)]
    assert [added(first, step, 7) for step in range(1, 9)] == expected[:8]
    second = SftMix(path, share=0.3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [added(second, step, 7) for step in range(9, 20)] == expected[8:]
    # Without the state the same steps begin anew.
    assert [added(SftMix(path, share=0.3), step, 7) for step in range(9, 20)] != expected[8:]


def test_the_state_of_other_demonstrations_is_refused(write):
    state = SftMix(write(TOKENS)).state_dict()
    with pytest.raises(ValueError, match="of other demonstrations .*dataflex.resume=fresh"):
        SftMix(write(TOKENS[:4])).load_state_dict(state)


# ---------------------------------------------------------------- files


def test_parquet_and_jsonl_say_the_same(write, tmp_path):
    pq.write_table(pa.Table.from_pylist(TOKENS), tmp_path / "demos.parquet")
    one, other = SftMix(write(TOKENS), share=1), SftMix([str(tmp_path / "demos.parquet")], share=1)
    first, second = (p.post_reward(rollouts(6), make_context(step=1)).add for p in (one, other))
    assert first == second
    assert {(row.domain, row.advantage, row.uid, row.log_probs) for row in first} == {
        ("a", 1.0, None, None),
        ("b", 1.0, None, None),
    }


def test_columns_and_domains_are_chosen_by_name(write):
    records = [{"question": row["prompt"], "answer": row["response"], "kind": row["domain"]} for row in TOKENS]
    names = {"prompt_key": "question", "response_key": "answer", "domain_key": "kind"}
    plugin = SftMix(write(records), **names, domains=["b"], share=1, advantage=0.5)
    rows = plugin.post_reward(rollouts(4), make_context(step=1)).add
    assert {row.response[0] for row in rows} == {11, 13}
    assert {(row.domain, row.advantage) for row in rows} == {("b", 0.5)}
    (text,) = problems(write(records), **names, domains=["c"])
    assert text.startswith("domains: got 'c'; accepted: domains of column 'kind': a, b")


def test_rows_that_cannot_be_used_are_named_by_line(write):
    lines = [
        TOKENS[0],
        "{not json",
        "[1, 2]",
        {"promt": "a", "response": "b"},
        {"prompt": "", "response": [1]},
        {"prompt": [1, -2], "response": [1]},
        "",
        {"prompt": [1], "response": []},
        {"prompt": [{"role": "user"}], "response": [1]},
    ]
    found = problems(write(lines))
    assert len(found) == 6 and found[5].startswith("data: got 2 more such rows")
    for text, words in zip(
        found,
        [
            ("line 2", "no JSON ("),
            ("line 3", "no JSON object but list"),
            ("line 4", "no 'prompt'", "did you mean 'promt'?"),
            ("line 5", "prompt is empty"),
            ("line 6", "prompt is [1, -2]"),
        ],
        strict=False,
    ):
        assert text.startswith("data: got demos.jsonl ") and all(word in text for word in words), text


def test_parquet_rows_are_named_by_number(tmp_path):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "demos.parquet")
    (text,) = problems(str(tmp_path / "demos.parquet"))
    assert "demos.parquet row 2: response is empty" in text


def test_files_that_are_not_there_or_hold_nothing_are_refused(write, tmp_path):
    (text,) = problems(str(tmp_path / "gone.jsonl"))
    assert "gone.jsonl" in text and "FileNotFoundError" in text
    (text,) = problems(write([], "demos.csv"))
    assert "the name ends in .csv" in text
    (text,) = problems(write([""]))
    assert "files with at least one row" in text


def test_wrong_parameters_are_all_named_at_once(write):
    found = problems(
        write(TOKENS), share=1.5, every=0, decay="linar", advantage=0, too_long="drop", end="yes", domains="a"
    )
    assert [text.split(":")[0] for text in found] == [
        "domains",
        "decay",
        "share",
        "decay_steps",
        "every",
        "advantage",
        "too_long",
        "end",
    ]
    assert "did you mean 'linear'?" in found[1]
    assert "decay_steps: got nothing" in problems(write(TOKENS), decay="linear")[0]
    assert "the share is a schedule" in problems(write(TOKENS), share={0: 0.5}, decay="linear", decay_steps=3)[0]
    assert "at step 9" in problems(write(TOKENS), share={0: 0.5, 9: 2.0})[0]


# ---------------------------------------------------------------- tokens


def test_rows_that_are_too_long_are_refused_or_left_out(write, caplog):
    lengths = {"prompt_length": 2, "response_length": 3}
    path = write([*TOKENS, {"prompt": [1, 2, 3], "response": [4]}, {"prompt": [1], "response": [4] * 4}])
    found = problems(path, **lengths)
    assert "line 6: the prompt has 3 tokens, more than 2" in found[0]
    assert "line 7: the response has 4 tokens, more than 3" in found[1] and "too_long: skip" in found[1]
    plugin = SftMix(path, **lengths, too_long="skip")
    assert len(plugin.demonstrations) == 5 and plugin.demonstrations.left_out == 2
    assert "2 of 7 demonstrations are left out" in caplog.text
    assert SftMix(path).demonstrations.left_out == 0


def test_text_needs_a_tokenizer_and_token_ids_do_not(write):
    (text,) = problems(write([{"prompt": "what?", "response": "that"}]))
    assert text.startswith("tokenizer: got nothing") and "${actor_rollout_ref.model.path}" in text
    (text,) = problems(write([{"prompt": "what?", "response": "that"}]), tokenizer="/nowhere/at/all")
    assert text.startswith("tokenizer: got '/nowhere/at/all'")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer of single letters with a chat template, in a folder."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, which verl requires")
    from tokenizers import Tokenizer, models

    letters = ["<end>", "<user>", *"abcdefgh "]
    plain = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=[], unk_token="<end>"))
    folder = tmp_path_factory.mktemp("tokenizer")
    template = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}{{ tail }}"
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<end>", additional_special_tokens=["<user>"], chat_template=template
    ).save_pretrained(folder)
    return str(folder)


def test_text_and_messages_become_the_tokens_of_the_policy(write, tokenizer):
    path = write(
        [
            {"prompt": "ab", "response": "c"},
            {"prompt": [{"role": "user", "content": "ab"}], "response": "c<end>"},
            {"prompt": [2], "response": [4]},
        ]
    )

    def rows(**kwargs):
        data = SftMix(path, tokenizer_path=tokenizer, **kwargs).demonstrations
        return [(data.prompts.row(i), data.responses.row(i)) for i in range(3)]

    assert rows() == [([2, 3], [4, 0]), ([1, 2, 3], [4, 0]), ([2], [4])]
    assert rows(end=False) == [([2, 3], [4]), ([1, 2, 3], [4, 0]), ([2], [4])]
    assert rows(chat_template_kwargs={"tail": "h"})[1][0] == [1, 2, 3, 9]


def test_it_keeps_the_contract_of_a_plugin(write):
    path = write(TOKENS)
    assert_plugin_contract(lambda: SftMix(path, share=0.3))
