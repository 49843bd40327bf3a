"""The commands of the protocol: strict parsing, exact encoding."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given

from replication.errors import LocalProtocolError, RemoteProtocolError
from replication.wire.commands import (
    COMMANDS,
    LINE_LIMIT,
    ApplicationCommand,
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
from tests.transcripts.lines import ALSO_READ, MALFORMED, VALID, ids_of

EVENTS, MASTER = StreamName("events"), InstanceName("master")


def test_there_are_twelve_commands() -> None:
    assert set(COMMANDS) == {type(command).WORD for _, command in VALID}
    assert len(COMMANDS) == 12


@pytest.mark.parametrize(("line", "command"), VALID, ids=ids_of(VALID))
def test_each_command_is_encoded_as_it_is_parsed(line: str, command: Command) -> None:
    """The space after the name is always sent."""
    assert parse_line(line) == command
    assert encode_line(command) == line.encode() + b"\n"


@pytest.mark.parametrize(("line", "command"), ALSO_READ, ids=ids_of(ALSO_READ))
def test_lines_typed_by_hand_are_parsed(line: str, command: Command) -> None:
    assert parse_line(line) == command


@pytest.mark.parametrize(("line", "complaint"), MALFORMED, ids=ids_of(MALFORMED))
def test_a_malformed_line_is_refused_with_the_reason(line: str, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        parse_line(line)
    assert complaint in str(raised.value)
    assert raised.value.kind == ("unknown command" if "unknown" in complaint else "bad line")


@pytest.mark.parametrize(
    ("line", "takes"),
    [
        ("RDATA", "a stream, an instance, a token and a row"),
        ("POSITION", "a stream, an instance and two tokens"),
        ("USER_SYNC", "an instance ID, a user ID, start or end, and a time in ms"),
        ("FEDERATION_ACK", "an instance and a token"),
        ("USER_IP", "a user ID and [access_token, ip, user_agent, device_id, last_seen]"),
    ],
)
def test_the_error_for_missing_arguments_lists_them(line: str, takes: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        parse_line(line)
    assert str(raised.value) == f"{line} takes {takes}"


def test_an_applications_command_must_have_parse_and_encode() -> None:
    class Half(ApplicationCommand):
        WORD = "HALF"
        SENT_BY = ("worker",)

    with pytest.raises(NotImplementedError, match=r"^Half lacks parse\(\)$"):
        parse_line("HALF 1", {"HALF": Half})
    with pytest.raises(
        LocalProtocolError, match=r"^HALF cannot be encoded: NotImplementedError: Half lacks encode\(\),"
    ):
        encode_line(Half())


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("FOO bar", "unknown command: 'FOO'"),
        ("F" * 41, f"unknown command: '{'F' * 40}'"),
        ("GET / HTTP/1.0", "unknown command: 'GET'; this is not an HTTP port"),
        ("POST /x HTTP/1.1\r", "unknown command: 'POST'; this is not an HTTP port"),
        (
            "HTTP/1.1 400 Bad Request",
            (
                "unknown command: 'HTTP/1.1'; this is an HTTP server: "
                "connect to the writer's --listen port, not to its --http port"
            ),
        ),
        (
            "-ERR unknown command 'NAME'\r",
            "unknown command: '-ERR'; this looks like a Redis: a worker follows it with connect = redis://HOST:PORT",
        ),
    ],
)
def test_the_error_for_an_unknown_command_has_its_name_and_a_cure(line: str, error: str) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        parse_line(line)
    assert (str(raised.value), raised.value.kind) == (error, "unknown command")


def test_an_applications_command_is_encoded_as_it_is_parsed() -> None:
    @attrs.frozen
    class Greet(ApplicationCommand):
        WORD = "GREET"
        SENT_BY = ("worker",)
        name: str

        @classmethod
        def parse(cls, rest: str) -> Greet:
            return cls(rest)

        def encode(self) -> str:
            return self.name

    assert encode_line(Greet("you")) == b"GREET you\n"
    with pytest.raises(LocalProtocolError) as raised:
        encode_line(Greet("x" * 80 + "\n"))
    assert str(raised.value) == f"GREET would be read as something else: 'GREET {'x' * 74}'"


@pytest.mark.parametrize("device", ["DEV", "None", "my device", ""])
def test_trap_10_user_sync_with_a_device_is_refused(device: str) -> None:
    """A device with a space would make six fields, and a device None would look like no device."""
    with pytest.raises(RemoteProtocolError, match="USER_SYNC takes an instance ID, a user ID"):
        parse_line(f"USER_SYNC abcde @u:h {device} start 1490197665618")


@given(any_command)
def test_parsing_reverses_encoding(command: Command) -> None:
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
    (Ping("\ud800"), "PING cannot be encoded: 'utf-8' codec"),
    (Rdata(StreamName("two words"), MASTER, Token(1), "[]"), "RDATA cannot be encoded: not a plain integer"),
    (Rdata(EVENTS, MASTER, Token(2**63), "[]"), "RDATA cannot be encoded: not a plain integer"),
    (Rdata(EVENTS, MASTER, Token(1), "[1"), "RDATA cannot be encoded: not JSON"),
    (Rdata(EVENTS, MASTER, Token(1), "[1,\n2]"), "RDATA would be read as something else"),
    (Position(EVENTS, InstanceName(""), Token(1), Token(2)), "POSITION cannot be encoded: not an instance name"),
    (Position(EVENTS, MASTER, Token(True), Token(2)), "POSITION cannot be encoded: not a plain integer"),
    (Replicate((StreamName("two words"),)), "REPLICATE would be read as something else"),
    (UserSync("", "@u:h", True, 1), "USER_SYNC cannot be encoded"),
    (FederationAck(InstanceName("a b"), Token(1)), "FEDERATION_ACK cannot be encoded"),
    (UserIp("@u:h", "t", "i", "a", "d", float("nan")), "USER_IP cannot be encoded: a row must be JSON"),  # type: ignore[arg-type]
    (UserIp("@u:h", "t", "i", "a", "d", True), "USER_IP cannot be encoded"),
]


@pytest.mark.parametrize(("command", "complaint"), SPOILT, ids=ids_of(SPOILT, 1))
def test_a_command_that_a_peer_would_refuse_or_misread_is_not_encoded(command: Command, complaint: str) -> None:
    with pytest.raises(LocalProtocolError) as raised:
        encode_line(command)
    assert complaint in str(raised.value)


def test_trap_5_a_line_over_the_limit_is_an_error_at_the_sender() -> None:
    fits = Ping("x" * (LINE_LIMIT - len("PING ")))
    assert len(encode_line(fits)) == LINE_LIMIT + 1
    with pytest.raises(LocalProtocolError, match="PING would take 16385 bytes; a line holds 16384"):
        encode_line(Ping(fits.text + "x"))


def test_the_limit_counts_bytes_not_characters() -> None:
    assert encode_line(Ping("éé"), limit=9) == "PING éé\n".encode()
    with pytest.raises(LocalProtocolError, match="PING would take 11 bytes; a line holds 9"):
        encode_line(Ping("ééé"), limit=9)


def test_trap_35_a_row_may_have_fields_of_a_newer_release() -> None:
    """Rows are not decoded on the wire, so the longer rows of a newer peer are accepted."""
    row = '["!r:h","m.read","@u:h","$e","thread",{"ts":1},"a new field"]'
    assert parse_line(f"RDATA receipts master 3 {row}") == Rdata(StreamName("receipts"), MASTER, Token(3), row)
