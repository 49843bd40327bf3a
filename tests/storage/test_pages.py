"""Rows become facts; where a page ends."""

from __future__ import annotations

import pytest

from replication.errors import StoreError
from replication.storage.pages import Rows, check_limit, cut_rows
from replication.streams.facts import Fact, gather
from replication.streams.interfaces import Page
from replication.wire.grammar import Token


def tokens(*values: int) -> list[Token]:
    return list(map(Token, values))


def test_rows_of_one_token_are_one_fact() -> None:
    assert gather(tokens(2, 5, 5, 9), ["a", "b", "c", "d"]) == [
        Fact(Token(2), ("a",)),
        Fact(Token(5), ("b", "c")),
        Fact(Token(9), ("d",)),
    ]


def test_rows_of_different_tokens_are_a_fact_each() -> None:
    facts = gather(tokens(2, 5), ["a", "b"])
    assert facts == [Fact(Token(2), ("a",)), Fact(Token(5), ("b",))]
    assert all(type(each) is Fact for each in facts)


def test_no_rows_are_no_facts() -> None:
    assert gather([], []) == []


def test_a_page_that_holds_all_there_is_reaches_as_far_as_asked() -> None:
    assert cut_rows(tokens(2, 3), ["a", "b"], upto=Token(9), limit=2) == Rows(
        tokens(2, 3), ["a", "b"], Token(9), limited=False
    )


def test_the_row_too_many_shows_where_the_last_whole_fact_ends() -> None:
    whole = Rows(tokens(2, 3), ["a", "b"], Token(3), limited=True)
    assert cut_rows(tokens(2, 3, 4), ["a", "b", "c"], upto=Token(9), limit=2) == whole
    assert cut_rows(tokens(2, 3, 4, 4), ["a", "b", "c", "d"], upto=Token(9), limit=3) == whole


def test_a_first_fact_that_does_not_fit_makes_no_page() -> None:
    assert cut_rows(tokens(2, 2, 2), ["a", "b", "c"], upto=Token(9), limit=2) is None


def test_rows_of_one_fact_are_a_page_that_is_limited_if_there_is_more() -> None:
    for upto, limited in ((2, False), (9, True)):
        page = Rows.of_fact(Token(2), ("a", "b"), Token(upto)).page()
        assert page == Page([Fact(Token(2), ("a", "b"))], Token(2), limited=limited)


def test_a_page_holds_a_row_at_least() -> None:
    check_limit(1)
    for limit in (0, -1):
        with pytest.raises(StoreError, match=str(limit)):
            check_limit(limit)
