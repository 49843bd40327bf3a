"""Facts, and functions over many of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import RemoteProtocolError, RowError
from replication.streams import facts as module
from replication.streams.facts import (
    BYTES_IN_PAGE,
    Fact,
    check_size,
    fact_bytes,
    facts_of_rows,
    gather,
    is_ascending,
    row_bytes,
    texts_of,
    tokens_of,
)
from replication.wire import grammar
from replication.wire.grammar import Token
from tests.strategies import facts

FIVE = Fact(Token(5), ('["a",1]', "[]"))
SIX = Fact(Token(6), ())


def test_rows_are_the_texts_decoded() -> None:
    assert FIVE.rows == [["a", 1], []]
    assert SIX.rows == []


@pytest.mark.parametrize(
    ("limit", "most", "rows"),
    [
        ("MAX_FACT_ROWS", 3, ["1"] * 4),
        ("MAX_FACT_BYTES", 100, ['"' + "x" * 75 + '"']),
        ("MAX_FACT_BYTES", 100, ["1"] * 5),
        ("MAX_VALUES", 20, ['"' + "x" * 75 + '"', "[" + ",".join("1" * 30) + "]"]),
    ],
)
def test_rows_that_are_too_much_for_one_fact_are_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int, rows: list[str]
) -> None:
    """docs/configuration.md, Fixed limits."""
    check_size(rows)
    monkeypatch.setattr(module, limit, most)
    monkeypatch.setattr(module, "_SMALL", 0)  # below it a single row is not measured
    found = {"MAX_FACT_ROWS": 4, "MAX_FACT_BYTES": sum(map(len, rows)) + BYTES_IN_PAGE * len(rows), "MAX_VALUES": 30}
    expected = f"^a fact has {most} {limit.rpartition('_')[2].lower()} at most, and this one has {found[limit]}: "
    with pytest.raises(RowError, match=expected):
        check_size(rows)
    check_size(rows[:0])
    monkeypatch.setattr(module, limit, found[limit])
    check_size(rows)


def test_a_small_row_beside_a_large_one_is_measured_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FACT_BYTES", 100)
    check_size(["1" * 200])  # a single row below another limit is not measured
    with pytest.raises(RowError, match="100 bytes at most, and this one has 249"):
        check_size(["1", "1" * 200])


def test_brackets_and_commas_in_texts_are_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_VALUES", 3)
    assert grammar.count_values(b'["[[[[",",,\\",,"]') == 2
    grammar.check_values(b'["[[[[",",,\\",,"]')
    with pytest.raises(RemoteProtocolError, match="more than 3 values"):
        grammar.check_values(b'[1,2,[],"\xff"]')


def test_text_that_is_not_json_is_an_error_when_it_is_decoded() -> None:
    with pytest.raises(RemoteProtocolError, match="not JSON"):
        _ = Fact(Token(5), ("[",)).rows


def test_facts_of_rows_makes_real_facts_of_one_row_each() -> None:
    made = facts_of_rows([Token(2), Token(4)], ["[]", "{}"])
    assert made == [Fact(Token(2), ("[]",)), Fact(Token(4), ("{}",))]
    assert [type(each) for each in made] == [Fact, Fact]
    assert made[1].rows == [{}]


def test_facts_of_rows_needs_a_token_for_each_row() -> None:
    with pytest.raises(ValueError, match="zip"):
        facts_of_rows([Token(2)], ["[]", "{}"])


def test_gather_needs_a_token_for_each_row() -> None:
    with pytest.raises(ValueError, match="zip"):
        gather([Token(2), Token(2)], ["1"])


@given(facts(min_rows=1))
def test_rows_in_token_order_are_gathered_into_facts(some: list[Fact]) -> None:
    assert gather([each.token for each in some for _ in each.texts], texts_of(some)) == some


@given(facts())
def test_tokens_and_texts_of_facts_make_the_same_facts(some: list[Fact]) -> None:
    assert tokens_of(some) == [each.token for each in some]
    assert texts_of(some) == [text for each in some for text in each.texts]
    assert is_ascending(tokens_of(some))


@given(st.lists(st.integers(0, 5).map(Token), max_size=5))
def test_is_ascending_means_sorted_without_duplicates(tokens: list[Token]) -> None:
    assert is_ascending(tokens) == (tokens == sorted(set(tokens)))


@given(facts(), facts())
def test_the_memory_of_facts_is_additive(some: list[Fact], more: list[Fact]) -> None:
    assert fact_bytes([*some, *more]) == fact_bytes(some) + fact_bytes(more)
    assert fact_bytes(some) >= row_bytes(texts_of(some)) >= sum(map(len, texts_of(some)))


def test_the_memory_of_a_short_row_includes_pythons_objects() -> None:
    """Otherwise a limit in bytes would admit a hundred times as much."""
    assert row_bytes(["1"] * 1000) > 50_000
    assert fact_bytes([SIX] * 1000) > 100_000
