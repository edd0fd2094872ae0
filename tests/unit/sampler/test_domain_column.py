"""Domains of a dataset, what is wrong with them, and the dataset's fingerprint."""

from __future__ import annotations

import pytest

from dataflex_hooks import ConfigError
from dataflex_verl.domain_column import encode, read_domains


def test_domains_are_discovered_sorted_with_their_rows(prompts):
    found = read_domains(prompts({"math": 3, "code": 2}), None, None)
    assert (found.key, found.domains, found.left_out) == ("domain", ("code", "math"), 0)
    assert [rows.tolist() for rows in found.rows] == [[1, 3], [0, 2, 4]]
    assert sum(rows.nbytes for rows in found.rows) == 5 * 4


def test_listed_domains_keep_their_order_and_leave_others_out(prompts):
    found = read_domains(prompts({"math": 3, "code": 2, "prose": 4}), "domain", ["prose", "math"])
    assert found.domains == ("prose", "math")
    assert [len(rows) for rows in found.rows] == [4, 3]
    assert found.left_out == 2


def test_data_source_stands_in_for_a_missing_domain_column(prompts):
    assert read_domains(prompts({"gsm8k": 2}, key="data_source"), None, None).key == "data_source"
    assert read_domains(prompts({"gsm8k": 2}, key="topic"), "topic", None).domains == ("gsm8k",)


@pytest.mark.parametrize(
    ("key", "listed", "wrong"),
    [
        ("domian", None, "dataflex.domain_key: got 'domian', which the training data does not have; accepted: one of "),
        ("domian", None, "prompt, domain; did you mean 'domain'?"),
        (None, ["math", "cod"], "dataflex.domains: got 'cod', of which the training data has no row; accepted: "),
        (None, ["math", "cod"], "domains in column 'domain': code, math; did you mean 'code'?"),
        (None, ["math", "math"], "each domain once"),
        (None, [], "at least one domain"),
    ],
)
def test_what_cannot_be_is_one_error_with_what_there_is(prompts, key, listed, wrong):
    with pytest.raises(ConfigError) as caught:
        read_domains(prompts({"math": 3, "code": 2}), key, listed)
    assert wrong in str(caught.value)
    assert len(caught.value.problems) == 1


def test_neither_default_column_names_both(prompts):
    with pytest.raises(ConfigError, match=r"'domain or data_source', which the training data does not have; .*topic"):
        read_domains(prompts({"math": 3}, key="topic"), None, None)


def test_rows_without_a_domain_are_an_error(prompts):
    data = prompts({"math": 2})
    data.dataframe = data.dataframe.add_item({"prompt": "x", "domain": None})
    with pytest.raises(ConfigError, match="empty in 1 rows, first in row 2"):
        read_domains(data, None, None)


def test_datasets_without_a_table_are_read_by_row(prompts):
    data = prompts({"math": 3, "code": 2})
    table, data.dataframe = list(data.dataframe), None
    plain = [dict(row) for row in table]
    found = read_domains(plain, None, None)
    assert [rows.tolist() for rows in found.rows] == [[1, 3], [0, 2, 4]]
    assert encode([None, 7, "a", 7])[1].tolist() == [-1, 0, 1, 0]


def test_the_fingerprint_is_of_the_content_not_the_place(prompts):
    def fingerprint(sizes, **how):
        return read_domains(prompts(sizes, **how), None, None).fingerprint

    base = fingerprint({"math": 3, "code": 2})
    assert base.startswith("5 rows, ")
    assert base == fingerprint({"math": 3, "code": 2}, name="copied")
    assert base != fingerprint({"math": 2, "code": 3})
    assert base != fingerprint({"math": 3, "code": 3})
    assert base != fingerprint({"math": 3, "code": 2}, word="PROMPT")


def test_the_fingerprint_sees_a_changed_row_that_is_not_sampled(prompts):
    small = prompts({"math": 3000})
    base = read_domains(small, None, None).fingerprint
    path = small.data_files[0]
    with open(path, "a") as file:
        file.write(" ")
    assert read_domains(small, None, None).fingerprint != base
