"""Messages of a Redis channel: what becomes a command, what is skipped and counted, and that nothing ends it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Self
from unittest.mock import patch

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.session.channel import MAX_NAMES, ChannelReader, LostRow
from replication.session.connection import Fault, ReplicationConnection, Role, Rows
from replication.wire.commands import ApplicationCommand, Command, Position, RemoteServerUp, UserSync
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

BEGINNINGS = [b"RDATA ", b"RDATA events w ", b"RDATA events w 1 ", b"POSITION ", b"POSITION events w ", b"USER_SYNC "]

EVENTS, PERSISTER = StreamName("events"), InstanceName("persister1")


def make_reader(*names: str, takes: type[Command] | None = None) -> ChannelReader:
    def command(word: str) -> type[Command] | None:
        return takes if takes is not None and word == takes.WORD else None

    return ChannelReader(
        instance_name=InstanceName("us"), wants=lambda stream: not names or stream in names, command=command
    )


def test_consecutive_rows_of_one_writer_are_received_together() -> None:
    reader = make_reader()
    received = reader.receive(
        [
            b'RDATA events persister1 batch ["a"]',
            b'RDATA events persister1 7 ["b"]',
            b'RDATA events persister2 8 ["c"]',
            b"POSITION events persister1 7 9",
        ]
    )
    assert received == [
        Rows(EVENTS, PERSISTER, [None, Token(7)], ['["a"]', '["b"]']),
        Rows(EVENTS, InstanceName("persister2"), [Token(8)], ['["c"]']),
        Position(EVENTS, PERSISTER, Token(7), Token(9)),
    ]
    assert reader.messages == 4


def test_rows_of_writers_in_turns_are_received_together_up_to_the_next_command() -> None:
    """A busy channel has the rows of many writers in turns; each Rows costs as much as some rows."""
    reader = make_reader()
    received = reader.receive(
        [
            b"RDATA events persister1 7 [1]",
            b"RDATA events persister2 8 [2]",
            b"LOCK_RELEASED []",
            b"RDATA events persister1 9 [3]",
            b"POSITION events persister1 9 9",
            b"RDATA events persister1 10 [4]",
        ]
    )
    assert received == [
        Rows(EVENTS, PERSISTER, [Token(7), Token(9)], ["[1]", "[3]"]),
        Rows(EVENTS, InstanceName("persister2"), [Token(8)], ["[2]"]),
        Position(EVENTS, PERSISTER, Token(9), Token(9)),
        Rows(EVENTS, PERSISTER, [Token(10)], ["[4]"]),
    ]


def test_trap_31_streams_that_are_not_followed_are_skipped_before_token_and_row_are_read() -> None:
    reader = make_reader("events")
    received = reader.receive(
        [
            b"RDATA typing w x {",
            b"RDATA typing w y {",
            b"RDATA events persister1 7 [1]",
            b"POSITION typing w x y",
            b"POSITION typing",
            b"POSITION events persister1 7 9",
        ]
    )
    assert received == [
        Rows(EVENTS, PERSISTER, [Token(7)], ["[1]"]),
        Position(EVENTS, PERSISTER, Token(7), Token(9)),
    ]
    assert reader.skipped == {"not followed": 4}
    assert reader.not_followed == ["typing"]
    assert reader.positions == 3


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b'LOCK_RELEASED ["w","l","k"]', "not needed"),
        (b"NEW_ACTIVE_TASK 7", "not needed"),
        (b"CANCEL_TASK 7", "not needed"),
        (b"USER_SYNC id @a:b None start 1700000000000", "not needed"),
        (b"CLEAR_USER_SYNC id", "not needed"),
        (b'USER_IP @a:b ["token","ip","agent",null,1]', "not needed"),
        (b"FEDERATION_ACK w x", "not needed"),
        (b"REMOTE_SERVER_UP h", "not needed"),
        (b"REPLICATE ", "not needed"),
        (b"PING 1", "not needed"),
        (b"ERROR x", "not needed"),
        (b"SERVER x", "not needed"),
        (b"FROM_THE_FUTURE 1 2", "unknown command"),
        (b"", "blank"),
        (b"  ", "blank"),
        (b"12345", "bad message"),
        (b"\xff\xfe", "bad message"),
        (b"\x00", "bad message"),
        (b"REPLICATE \nRDATA events w 1 [1]", "bad message"),
        (b"\nRDATA events w 1 [1]", "bad message"),
        (b"RDATA", "bad message"),
        (b"RDATA ", "bad message"),
        (b"RDATA events", "bad message"),
        (b"RDATA events w 1", "bad message"),
        (b"RDATA events w one []", "bad message"),
        (b"RDATA events w 1 {", "bad message"),
        (b"RDATA events w 1 []\n", "bad message"),
        (b'RDATA events w 1 ["\xff"]', "bad message"),
        (b"POSITION", "bad message"),
        (b"POSITION events  us 1 1", "bad message"),
        (b"POSITION events w 1", "bad message"),
        (b"POSITION events w 1 x", "bad message"),
        (b"POSITION events w 1 99999999999999999999", "bad message"),
    ],
)
def test_what_is_not_needed_or_wrong_is_counted_and_skipped(message: bytes, reason: str) -> None:
    reader = make_reader()
    good = b"RDATA events persister1 7 [1]"
    assert reader.receive([message, message, good]) == [Rows(EVENTS, PERSISTER, [Token(7)], ["[1]"])]
    assert reader.skipped == {reason: 2}
    assert not reader.closed


def test_trap_48_a_message_of_digits_is_skipped() -> None:
    reader = make_reader()
    assert reader.receive([b"12345", b"0", b"-1"]) == []
    assert reader.skipped == {"bad message": 3}


def test_unknown_commands_are_named_once_and_their_number_is_bounded() -> None:
    reader = make_reader()
    reader.receive([b"SURPRISE 1", b"SURPRISE 2", *[b"X" * n for n in range(1, 64)] * 2])
    assert reader.unknown_commands[0] == "SURPRISE"
    assert len(reader.unknown_commands) == 64
    reader.receive([b"Y" * a + b"Z" * b for a in range(1, 20) for b in range(1, 20)])
    assert len(reader.unknown_commands) == MAX_NAMES


def test_100_characters_of_the_name_of_a_stream_that_is_not_followed_are_kept() -> None:
    reader = make_reader("events")
    reader.receive([b"RDATA " + b"x" * 200 + b" w 1 []"])
    assert reader.not_followed == ["x" * 100]


@pytest.mark.parametrize(
    "bad",
    [
        b"RDATA events persister1 3 [",
        b'RDATA events persister1 3 ["\xff"]',
        b"RDATA events persister1 3 []\n",
        b"RDATA events persister1",
    ],
)
def test_a_bad_row_of_a_followed_writer_is_received_as_lost(bad: bytes) -> None:
    """A row that is only skipped would leave its fact out for ever, or mix it with the next fact."""
    reader = make_reader()
    received = reader.receive(
        [
            b"POSITION events persister1 1 1",
            b"RDATA events persister1 2 [1]",
            bad,
            bad,
            b"RDATA events persister1 4 [2]",
        ]
    )
    assert [each for each in received[1:] if isinstance(each, Rows)] == [
        Rows(EVENTS, PERSISTER, [Token(2)], ["[1]"]),
        Rows(EVENTS, PERSISTER, [Token(4)], ["[2]"]),
    ]
    assert received.count(LostRow(EVENTS, PERSISTER)) == 2
    assert reader.skipped == {"bad row": 2}


@pytest.mark.parametrize("bad", [b"RDATA events persister1 3 [", b'RDATA events persister1 3 ["\xff"]'])
def test_a_bad_row_before_the_first_position_is_a_bad_message_even_if_both_are_read_at_once(bad: bytes) -> None:
    """The POSITION makes the writer known for the rows after it only."""
    reader = make_reader()
    received = reader.receive([bad, b"POSITION events persister1 3 3"])
    assert received == [Position(EVENTS, PERSISTER, Token(3), Token(3))]
    assert reader.skipped == {"bad message": 1}


def test_a_row_of_our_name_is_noticed_after_one_without_an_instance() -> None:
    reader = make_reader()
    (fault,) = reader.receive([b"RDATA events", b"RDATA events us 4 [1]"])
    assert isinstance(fault, Fault)
    assert reader.skipped == {"bad message": 1}


def test_a_row_of_no_known_writer_is_a_bad_message() -> None:
    reader = make_reader()
    messages = [b"POSITION events persister1 1 1", b"RDATA  events persister1 3 [", b"RDATA events w 3 ["]
    assert len(reader.receive(messages)) == 1
    assert reader.skipped == {"bad message": 2}


def test_a_cr_at_the_end_is_ignored() -> None:
    received = make_reader().receive([b"POSITION events persister1 1 2\r", b"RDATA events persister1 3 [1]\r"])
    assert received == [
        Position(EVENTS, PERSISTER, Token(1), Token(2)),
        Rows(EVENTS, PERSISTER, [Token(3)], ["[1]"]),
    ]


@pytest.mark.parametrize(
    "message",
    [b"POSITION typing us 1 2", b"RDATA events us 1 [1]", b"RDATA typing us 1 [1]", b"POSITION typing us"],
)
def test_another_process_with_our_name_is_a_fault_even_on_streams_that_are_not_followed(message: bytes) -> None:
    reader = make_reader("events")
    *_, fault = reader.receive([b"POSITION events w 1 1", message, b"POSITION events w 2 2"])
    assert isinstance(fault, Fault)
    assert fault.kind == "same instance name"
    assert fault.text == (
        "another process publishes under the name of this process, us: give each process an instance name of its own"
    )
    assert reader.closed
    assert reader.receive([b"POSITION events w 3 3"]) == []


def test_without_an_application_no_other_command_is_received() -> None:
    reader = ChannelReader(instance_name=InstanceName("us"), wants=lambda _: True)
    assert reader.receive([b"REMOTE_SERVER_UP h"]) == []


def test_a_command_of_the_application_that_cannot_be_parsed_is_skipped() -> None:
    reader = make_reader(takes=UserSync)
    assert reader.receive([b"USER_SYNC id @a:b None start 1700000000000"] * 2) == []
    assert reader.skipped == {"bad message": 2}


@attrs.frozen
class Color(ApplicationCommand):
    """A command that the protocol does not have."""

    WORD = "COLOR"
    name: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(rest)


@pytest.mark.parametrize(
    ("message", "command"), [(b"REMOTE_SERVER_UP h", RemoteServerUp("h")), (b"COLOR a", Color("a"))]
)
def test_a_command_that_the_application_takes_is_received(message: bytes, command: Command) -> None:
    reader = make_reader(takes=type(command))
    assert reader.receive([message]) == [command]
    assert make_reader(takes=Position).receive([b"REMOTE_SERVER_UP h"]) == []


@given(
    st.lists(
        st.sampled_from(
            [
                b'RDATA events persister1 batch ["a"]',
                b'RDATA events persister1 7 ["b"]',
                b'RDATA events w 8 {"c":1}\r',
                'RDATA events w 9 "ü"'.encode(),
                b"POSITION events persister1 1 2",
                b"REMOTE_SERVER_UP h",
            ]
        )
    ),
    st.lists(st.integers(0, 20)),
)
def test_good_messages_mean_what_the_same_lines_mean_on_a_connection(messages: list[bytes], cuts: list[int]) -> None:
    """However they are cut into reads.  Rows are compared one by one, in the order of each writer."""

    def flat(received: Sequence[object]) -> list[object]:
        rows: list[object] = []
        for each in received:
            if isinstance(each, Rows):
                pairs = zip(each.places, each.texts, strict=True)
                rows += [(each.stream, each.instance, place, text) for place, text in pairs]
            else:
                rows.append(each)
        return rows

    def of_writer(flattened: Sequence[object], writer: str) -> list[object]:
        return [each for each in flattened if not isinstance(each, tuple) or each[1] == writer]

    connection = ReplicationConnection(Role.WORKER, 0.0)
    expected = flat(connection.receive_data(b"".join(each + b"\n" for each in messages), 0.0))
    reader = make_reader(takes=RemoteServerUp)
    bounds = sorted({0, *[cut for cut in cuts if cut < len(messages)], len(messages)})
    received = []
    for start, end in pairwise(bounds):
        received += flat(reader.receive(messages[start:end]))
    for writer in ("persister1", "w"):
        assert of_writer(received, writer) == of_writer(expected, writer)
    assert not reader.skipped


@given(st.lists(st.binary(max_size=40) | st.builds(bytes.__add__, st.sampled_from(BEGINNINGS), st.binary(max_size=20))))
def test_no_message_raises_or_ends_the_subscription(messages: list[bytes]) -> None:
    reader = make_reader(takes=UserSync)
    reader.receive(messages)
    assert reader.messages == len(messages)
    assert not reader.closed


def test_what_is_kept_of_streams_and_writers_is_bounded() -> None:
    reader = make_reader()
    with patch("replication.session.channel.MAX_WRITERS", 2):
        names = [InstanceName(f"w{number}") for number in range(4)]
        received = reader.receive([f"POSITION events {name} 1 1".encode() for name in names])
        assert [each.instance for each in received if isinstance(each, Position)] == names[:2]
        rows = reader.receive([f"RDATA events {name} 2 []".encode() for name in names])
    assert len(rows) == 4  # which streams are followed is found again
    assert reader.skipped == {"too many writers": 2}
    assert len(reader._followed) == 2
    with patch("replication.session.channel.MAX_WRITERS", 2):
        position = b"POSITION events w0 3 3"
        assert reader.receive([position, position]) == [Position(EVENTS, names[0], Token(3), Token(3))] * 2
