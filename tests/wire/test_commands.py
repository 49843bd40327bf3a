"""Every word of the protocol: strict on the way in, exact on the way out."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given

from replication.errors import LocalProtocolError, RemoteProtocolError
from replication.wire.commands import (
    COMMANDS,
    LINE_LIMIT,
    Command,
    FederationAck,
    Ping,
    Position,
    ProtocolCommand,
    Rdata,
    Replicate,
    Server,
    UserIp,
    UserSync,
    encode_line,
    parse_line,
)
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.strategies import any_command
from tests.transcripts.lines import ALSO_READ, MALFORMED, SAID

EVENTS, MASTER = StreamName("events"), InstanceName("master")


def test_there_are_twelve_words() -> None:
    assert set(COMMANDS) == {type(command).WORD for _, command in SAID}
    assert len(COMMANDS) == 12


@pytest.mark.parametrize(("line", "command"), SAID, ids=[line[:40] for line, _ in SAID])
def test_a_command_is_spelt_as_it_is_read(line: str, command: Command) -> None:
    """The space after the word is always sent."""
    assert parse_line(line) == command
    assert encode_line(command) == line.encode() + b"\n"


@pytest.mark.parametrize(("line", "command"), ALSO_READ, ids=[repr(line) for line, _ in ALSO_READ])
def test_a_line_typed_by_hand_is_read(line: str, command: Command) -> None:
    assert parse_line(line) == command


@pytest.mark.parametrize(("line", "complaint"), MALFORMED, ids=[repr(line[:40]) for line, _ in MALFORMED])
def test_a_malformed_line_is_refused_and_the_culprit_named(line: str, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        parse_line(line)
    assert complaint in str(raised.value)
    assert raised.value.kind == ("unknown command" if "unknown" in complaint else "bad line")


@pytest.mark.parametrize("device", ["DEV", "None", "my device", ""])
def test_trap_10_user_sync_has_no_device_and_what_has_one_is_refused(device: str) -> None:
    """With a fifth field, a device with a space would be six, and who is called None would be nobody."""
    with pytest.raises(RemoteProtocolError, match="USER_SYNC takes an instance ID, a user ID"):
        parse_line(f"USER_SYNC abcde @u:h {device} start 1490197665618")


@given(any_command)
def test_what_is_written_is_read_back(command: Command) -> None:
    line = encode_line(command)
    assert line.count(b"\n") == 1
    assert parse_line(line.removesuffix(b"\n").decode()) == command


@given(any_command)
def test_a_command_cannot_be_changed(command: ProtocolCommand) -> None:
    field = attrs.fields(type(command))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(command, field, getattr(command, field))


SPOILT: list[tuple[Any, str]] = [
    (Ping("a\nPING b"), "PING would be read as something else: 'PING a\\nPING b'"),
    (Server("localhost\r"), "SERVER would be read as something else"),
    (Ping("\ud800"), "PING cannot be said: 'utf-8' codec"),
    (Rdata(StreamName("two words"), MASTER, Token(1), "[]"), "RDATA cannot be said: not a plain integer"),
    (Rdata(EVENTS, MASTER, Token(2**63), "[]"), "RDATA cannot be said: not a plain integer"),
    (Rdata(EVENTS, MASTER, Token(1), "[1"), "RDATA cannot be said: not JSON"),
    (Rdata(EVENTS, MASTER, Token(1), "[1,\n2]"), "RDATA would be read as something else"),
    (Position(EVENTS, InstanceName(""), Token(1), Token(2)), "POSITION cannot be said: not an instance name"),
    (Position(EVENTS, MASTER, Token(True), Token(2)), "POSITION cannot be said: not a plain integer"),
    (Replicate((StreamName("two words"),)), "REPLICATE would be read as something else"),
    (UserSync("", "@u:h", True, 1), "USER_SYNC cannot be said"),
    (FederationAck(InstanceName("a b"), Token(1)), "FEDERATION_ACK cannot be said"),
    (UserIp("@u:h", "t", "i", "a", "d", float("nan")), "USER_IP cannot be said: a row must be JSON"),  # type: ignore[arg-type]
    (UserIp("@u:h", "t", "i", "a", "d", True), "USER_IP cannot be said"),
]


@pytest.mark.parametrize(("command", "complaint"), SPOILT, ids=[complaint for _, complaint in SPOILT])
def test_what_nobody_would_read_as_it_was_meant_is_not_said(command: Command, complaint: str) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        encode_line(command)
    assert complaint in str(raised.value)


def test_trap_5_a_line_over_the_limit_is_an_error_here_and_not_lost() -> None:
    fits = Ping("x" * (LINE_LIMIT - len("PING ")))
    assert len(encode_line(fits)) == LINE_LIMIT + 1
    with pytest.raises(LocalProtocolError, match="PING would take 16385 bytes; a line holds 16384"):
        encode_line(Ping(fits.text + "x"))


def test_the_limit_counts_bytes_not_characters() -> None:
    assert encode_line(Ping("éé"), limit=9) == "PING éé\n".encode()
    with pytest.raises(LocalProtocolError, match="PING would take 11 bytes; a line holds 9"):
        encode_line(Ping("ééé"), limit=9)


def test_trap_35_a_row_may_have_more_fields_than_we_know() -> None:
    """Rows are not decoded on the wire, so a newer peer's longer rows pass."""
    row = '["!r:h","m.read","@u:h","$e","thread",{"ts":1},"a field of tomorrow"]'
    assert parse_line(f"RDATA receipts master 3 {row}") == Rdata(StreamName("receipts"), MASTER, Token(3), row)
