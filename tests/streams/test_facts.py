"""Facts, one and many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import RemoteProtocolError
from replication.streams.facts import (
    Fact,
    fact_bytes,
    facts_of_rows,
    gather,
    is_ascending,
    row_bytes,
    texts_of,
    tokens_of,
)
from replication.wire.grammar import Token
from tests.strategies import facts

FIVE = Fact(Token(5), ('["a",1]', "[]"))
SIX = Fact(Token(6), ())


def test_rows_are_the_texts_decoded() -> None:
    assert FIVE.rows == [["a", 1], []]
    assert SIX.rows == []


def test_a_text_that_is_not_json_says_so_when_it_is_decoded() -> None:
    with pytest.raises(RemoteProtocolError, match="not JSON"):
        _ = Fact(Token(5), ("[",)).rows


def test_facts_of_rows_makes_real_facts_of_one_row_each() -> None:
    made = facts_of_rows([Token(2), Token(4)], ["[]", "{}"])
    assert made == [Fact(Token(2), ("[]",)), Fact(Token(4), ("{}",))]
    assert [type(each) for each in made] == [Fact, Fact]
    assert made[1].rows == [{}]


def test_facts_of_rows_wants_a_token_for_each_row() -> None:
    with pytest.raises(ValueError, match="zip"):
        facts_of_rows([Token(2)], ["[]", "{}"])


@given(facts(min_rows=1))
def test_rows_in_token_order_are_gathered_into_the_facts_they_came_from(some: list[Fact]) -> None:
    assert gather([each.token for each in some for _ in each.texts], texts_of(some)) == some


@given(facts())
def test_taking_facts_apart_loses_nothing(some: list[Fact]) -> None:
    assert tokens_of(some) == [each.token for each in some]
    assert texts_of(some) == [text for each in some for text in each.texts]
    assert is_ascending(tokens_of(some))


@given(st.lists(st.integers(0, 5).map(Token), max_size=5))
def test_is_ascending_means_sorted_without_doubles(tokens: list[Token]) -> None:
    assert is_ascending(tokens) == (tokens == sorted(set(tokens)))


@given(facts(), facts())
def test_memory_adds_up(some: list[Fact], more: list[Fact]) -> None:
    assert fact_bytes([*some, *more]) == fact_bytes(some) + fact_bytes(more)
    assert fact_bytes(some) >= row_bytes(texts_of(some)) >= sum(map(len, texts_of(some)))


def test_memory_counts_what_python_adds_to_a_short_row() -> None:
    """A bound in bytes would otherwise let in a hundred times as much."""
    assert row_bytes(["1"] * 1000) > 50_000
    assert fact_bytes([SIX] * 1000) > 100_000
