"""Tokens that hold the positions of several writers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import StreamError
from replication.streams.positions import MultiWriterToken, token_of
from replication.wire.grammar import InstanceName, Token

A, B, C = InstanceName("first"), InstanceName("second"), InstanceName("third")
NAMES = {1: A, 2: B, 3: C}
NUMBERS = {name: number for number, name in NAMES.items()}


@pytest.mark.parametrize(
    ("text", "stream", "ahead"),
    [("5", 5, {}), ("s5", 5, {}), ("m5~1.7~2.9", 5, {A: 7, B: 9}), ("m5", 5, {}), ("m5~1.4~2.5", 5, {})],
)
def test_tokens_are_parsed(text: str, stream: int, ahead: dict[InstanceName, int]) -> None:
    token = MultiWriterToken.parse(text, NAMES)
    assert (token.stream, dict(token.ahead)) == (stream, ahead)


def test_trap_42_an_empty_entry_and_entries_that_are_not_ahead_are_removed() -> None:
    assert MultiWriterToken.parse("m5~", NAMES) == MultiWriterToken(Token(5))
    assert MultiWriterToken(Token(5), {A: Token(5), B: Token(4)}).encode(NUMBERS) == "5"


@pytest.mark.parametrize(
    "text",
    ["", "x5", "m", "m5~1", "m5~9.7", "-5", "5 ", "٣", "t3-5", "m5~1.99999999999999999999", "9223372036854775808"],
)
def test_the_error_for_a_bad_token_has_its_text(text: str) -> None:
    with pytest.raises(StreamError, match="not a token"):
        MultiWriterToken.parse(text, NAMES)


@pytest.mark.parametrize("text", ["x" * 101, "m5~9.7" + "~9.7" * 24])
def test_100_characters_of_a_bad_token_are_quoted(text: str) -> None:
    with pytest.raises(StreamError, match=f": '{text[:100]}'$"):
        MultiWriterToken.parse(text, NAMES)


def test_a_plain_token_of_a_room_begins_with_s() -> None:
    token = MultiWriterToken(Token(5))
    assert (token.encode(NUMBERS), token.encode(NUMBERS, room=True)) == ("5", "s5")


def test_the_token_of_positions_begins_at_the_smallest() -> None:
    assert token_of({}) == MultiWriterToken(Token(0))
    assert token_of({A: Token(7), B: Token(5)}) == MultiWriterToken(Token(5), {A: Token(7)})


_places = st.integers(1, 12).map(Token)
_tokens = st.builds(MultiWriterToken, _places, st.dictionaries(st.sampled_from([A, B, C]), _places))


@given(_tokens)
def test_parsing_reverses_encoding(token: MultiWriterToken) -> None:
    assert MultiWriterToken.parse(token.encode(NUMBERS), NAMES) == token
    assert MultiWriterToken.parse(token.encode(NUMBERS, room=True), NAMES) == token


@given(_tokens, _tokens)
def test_tokens_are_compared_by_every_writers_position(one: MultiWriterToken, other: MultiWriterToken) -> None:
    every = [*NAMES.values(), InstanceName("silent")]
    assert (one <= other) == all(one.of(each) <= other.of(each) for each in every)


def test_the_order_is_partial() -> None:
    one, other = MultiWriterToken(Token(5), {A: Token(9)}), MultiWriterToken(Token(5), {B: Token(9)})
    assert not one <= other
    assert not other <= one


@given(_tokens, _tokens)
def test_both_tokens_are_at_most_the_advanced_one(one: MultiWriterToken, other: MultiWriterToken) -> None:
    both = one.advanced(other)
    assert one <= both
    assert other <= both
    assert both.maximum == max(one.maximum, other.maximum)


@given(_tokens, _places)
def test_a_bounded_token_has_no_position_above_the_bound(token: MultiWriterToken, upto: Token) -> None:
    bounded = token.bounded(upto)
    assert bounded <= token
    assert bounded.maximum <= upto
    assert bounded == token or token.maximum > upto


def test_rows_between_two_tokens() -> None:
    after, upto = MultiWriterToken(Token(5), {A: Token(7)}), MultiWriterToken(Token(6), {A: Token(9)})
    assert not upto.covers(A, Token(7), after=after)
    assert upto.covers(A, Token(8), after=after)
    assert upto.covers(B, Token(6), after=after)
    assert not upto.covers(B, Token(7), after=after)
    assert upto.covers(None, Token(6), after=after)
