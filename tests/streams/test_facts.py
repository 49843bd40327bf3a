"""Facts, one and many."""

from __future__ import annotations

import pytest
from hypothesis import given

from replication.streams.facts import Fact, fact_bytes, facts_of_rows, is_ascending, row_bytes, texts_of, tokens_of
from replication.wire.grammar import Token, read_json
from tests import strategies


def test_rows_are_decoded_when_they_are_asked_for() -> None:
    assert Fact(Token(2), ('["o1","placed"]', "null")).rows == [["o1", "placed"], None]


def test_a_fact_may_have_no_rows() -> None:
    assert Fact(Token(2), ()).rows == []


def test_a_fact_per_row_is_what_a_fact_is() -> None:
    facts = facts_of_rows([Token(2), Token(5)], ["[1]", "[2]"])
    assert facts == [Fact(Token(2), ("[1]",)), Fact(Token(5), ("[2]",))]
    assert [type(each) for each in facts] == [Fact, Fact]


def test_as_many_tokens_as_rows() -> None:
    with pytest.raises(ValueError, match="zip"):
        facts_of_rows([Token(2)], ["[1]", "[2]"])


@given(strategies.facts())
def test_taking_facts_apart_loses_nothing(facts: list[Fact]) -> None:
    assert tokens_of(facts) == [each.token for each in facts]
    assert texts_of(facts) == [text for each in facts for text in each.texts]
    assert is_ascending(tokens_of(facts))
    assert [row for each in facts for row in each.rows] == [read_json(text) for text in texts_of(facts)]


def test_equal_tokens_do_not_ascend() -> None:
    assert is_ascending([])
    assert not is_ascending([Token(2), Token(2)])
    assert not is_ascending([Token(3), Token(2)])


def test_memory_grows_with_text_and_with_number() -> None:
    small, large = Fact(Token(2), ("[]",)), Fact(Token(2), ("[]" * 500,))
    assert fact_bytes([large]) - fact_bytes([small]) == 998
    assert fact_bytes([small, small]) == 2 * fact_bytes([small]) > 2 * row_bytes(["[]"])
