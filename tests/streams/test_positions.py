"""Positions of several writers, and the tokens that say them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import StreamError
from replication.streams.positions import MultiWriterToken, Positions
from replication.wire.grammar import InstanceName, Token

A, B, C = InstanceName("first"), InstanceName("second"), InstanceName("third")
NAMES = {1: A, 2: B, 3: C}
NUMBERS = {name: number for number, name in NAMES.items()}


def test_the_readers_example_of_the_streams_document() -> None:
    """Protocol F4: first 3, second 5; every line of it."""
    positions = Positions({A: Token(3), B: Token(5)})
    assert positions.persisted_upto == 3
    for writer, token, linear in ((A, 6, 6), (B, 7, 7), (B, 9, 7), (A, 8, 9), (A, 11, 9), (B, 15, 11)):
        positions.advance(writer, Token(token), [Token(token)])
        assert positions.persisted_upto == linear


def test_no_position_goes_back() -> None:
    positions = Positions({A: Token(5)})
    positions.advance(A, Token(3))
    assert positions.of(A) == 5


def test_a_writer_never_heard_of_stands_where_all_others_have_been() -> None:
    positions = Positions({A: Token(5), B: Token(9)})
    assert (positions.of(C), positions.minimum, positions.maximum) == (5, 5, 9)
    assert (Positions({}).minimum, Positions({}).maximum) == (0, 0)


def test_trap_37_a_new_writers_first_id_is_not_passed() -> None:
    """It begins where everything is known to be complete, and holds the linear position there."""
    positions = Positions({A: Token(5)})
    positions.advance(B, Token(5))
    positions.advance(A, Token(9), [Token(7), Token(9)])
    assert positions.persisted_upto == 5  # 6 may be B's


def test_positions_as_a_token() -> None:
    assert Positions({A: Token(5), B: Token(9)}).token() == MultiWriterToken(Token(5), {B: Token(9)})


def test_memory_is_bounded_while_a_writer_is_far_behind() -> None:
    positions = Positions({A: Token(1), B: Token(1)})
    positions.advance(B, Token(300_001), map(Token, range(3, 300_002)))
    assert positions.persisted_upto == 1
    positions.advance(A, Token(300_001))
    assert positions.persisted_upto == 300_001


@pytest.mark.parametrize(
    ("text", "stream", "ahead"),
    [("5", 5, {}), ("s5", 5, {}), ("m5~1.7~2.9", 5, {A: 7, B: 9}), ("m5", 5, {}), ("m5~1.4~2.5", 5, {})],
)
def test_tokens_are_read(text: str, stream: int, ahead: dict[InstanceName, int]) -> None:
    token = MultiWriterToken.parse(text, NAMES)
    assert (token.stream, dict(token.ahead)) == (stream, ahead)


def test_trap_42_an_empty_entry_and_entries_that_say_nothing() -> None:
    assert MultiWriterToken.parse("m5~", NAMES) == MultiWriterToken(Token(5))
    assert MultiWriterToken(Token(5), {A: Token(5), B: Token(4)}).spell(NUMBERS) == "5"


@pytest.mark.parametrize(
    "text", ["", "x5", "m", "m5~1", "m5~9.7", "-5", "5 ", "٣", "t3-5", "m5~1.99999999999999999999"]
)
def test_bad_tokens_are_named(text: str) -> None:
    with pytest.raises(StreamError, match="not a token"):
        MultiWriterToken.parse(text, NAMES)


_places = st.integers(1, 12).map(Token)
_tokens = st.builds(MultiWriterToken, _places, st.dictionaries(st.sampled_from([A, B, C]), _places))


@given(_tokens)
def test_a_token_comes_back_as_it_was_spelt(token: MultiWriterToken) -> None:
    assert MultiWriterToken.parse(token.spell(NUMBERS), NAMES) == token
    assert MultiWriterToken.parse(token.spell(NUMBERS, room=True), NAMES) == token


@given(_tokens, _tokens)
def test_the_order_is_that_of_every_writer(one: MultiWriterToken, other: MultiWriterToken) -> None:
    every = [*NAMES.values(), InstanceName("silent")]
    assert (one <= other) == all(one.of(each) <= other.of(each) for each in every)


def test_the_order_is_partial() -> None:
    one, other = MultiWriterToken(Token(5), {A: Token(9)}), MultiWriterToken(Token(5), {B: Token(9)})
    assert not one <= other
    assert not other <= one


@given(_tokens, _tokens)
def test_both_lie_before_what_they_advance_to(one: MultiWriterToken, other: MultiWriterToken) -> None:
    both = one.advanced(other)
    assert one <= both
    assert other <= both
    assert both.maximum == max(one.maximum, other.maximum)


@given(_tokens, _places)
def test_a_bounded_token_is_the_part_before_the_bound(token: MultiWriterToken, upto: Token) -> None:
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
