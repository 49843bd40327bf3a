"""Texts that name a position: tokens, tokens of several writers, places in a room, and limits of retention."""

from __future__ import annotations

from replication.errors import ConfigError, RemoteProtocolError, RoomError, StreamError
from replication.rooms.ordering import Place
from replication.streams.interfaces import FactSlice
from replication.streams.positions import MultiWriterToken
from replication.streams.retention import KeptSlices, Retention
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

NAMES = {1: InstanceName("master"), 2: InstanceName("worker2"), 10: InstanceName("worker10")}
NUMBERS = {name: number for number, name in NAMES.items()}


def check(data: bytes) -> None:
    """Read each line of ``data`` as each kind of text."""
    last = MultiWriterToken(Token(3))
    for text in data.decode(errors="replace").split("\n"):
        check_token(text)
        last = check_multi(text, last)
        check_place(text)
        check_retention(text)


def check_token(text: str) -> None:
    try:
        token = grammar.token(text)
    except RemoteProtocolError as error:
        assert str(error)
        return
    assert str(token) == text
    assert -(2**63) <= token < 2**63


def check_multi(text: str, last: MultiWriterToken) -> MultiWriterToken:
    try:
        token = MultiWriterToken.parse(text, NAMES)
    except StreamError as error:
        assert str(error)
        return last
    for room in (False, True):
        assert MultiWriterToken.parse(token.encode(NUMBERS, room=room), NAMES) == token
    further = token.advanced(last)
    assert token <= further
    assert last <= further
    assert further.bounded(token.stream) <= further
    assert further.maximum == max(token.maximum, last.maximum)
    assert not token.covers(NAMES[1], token.of(NAMES[1]), after=token)
    return token


def check_place(text: str) -> None:
    try:
        place = Place.parse(text)
    except RoomError as error:
        assert str(error)
        return
    assert Place.parse(place.encode()) == place
    assert -(2**63) <= place.stream_ordering < 2**63
    assert 0 <= place.depth < 2**63


def check_retention(text: str) -> None:
    try:
        limits = Retention.parse(text)
    except ConfigError as error:
        assert str(error)
        return
    if limits is not None:
        kept = KeptSlices()
        kept.add(FactSlice(Token(1), 5, 100, 1_700_000_000.5))
        kept.oldest_beyond(limits, 1_800_000_000.5)
