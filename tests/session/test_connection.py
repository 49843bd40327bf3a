"""One end of a connection: the same bytes, in reads of any size, give the same commands; no input raises."""

from __future__ import annotations

from math import inf, nan
from typing import Self
from unittest.mock import patch

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replication.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from replication.session.connection import (
    MAX_INCOMPLETE,
    Fault,
    Keepalive,
    Received,
    ReplicationConnection,
    Role,
    Rows,
)
from replication.wire.commands import (
    COMMANDS,
    LINE_LIMIT,
    ApplicationCommand,
    Command,
    Error,
    Name,
    Ping,
    Position,
    Rdata,
    encode_line,
)
from replication.wire.grammar import InstanceName, StreamName, Token
from tests import strategies
from tests.strategies import cuts
from tests.transcripts.lines import MALFORMED, VALID, ids_of

KINDS = {"unknown command", "bad line", "wrong direction", "line too long", "not UTF-8", "ping timeout"}

# docs/protocol/wire.md A4, once more: who sends what
DIRECTIONS = {
    "SERVER": "S",
    "RDATA": "S",
    "POSITION": "S",
    "ERROR": "SC",
    "PING": "SC",
    "NAME": "C",
    "REPLICATE": "C",
    "USER_SYNC": "C",
    "CLEAR_USER_SYNC": "C",
    "FEDERATION_ACK": "C",
    "USER_IP": "C",
    "REMOTE_SERVER_UP": "SC",
}
LETTER = {Role.MASTER: "S", Role.WORKER: "C"}


def worker(line_limit: int = LINE_LIMIT) -> ReplicationConnection:
    return ReplicationConnection(Role.WORKER, 0.0, line_limit=line_limit)


def flatten(received: list[Received]) -> list[Command | Fault]:
    """Split Rows into Rdata, so that results do not depend on the size of reads."""
    flat: list[Command | Fault] = []
    for each in received:
        if isinstance(each, Rows):
            assert len(each.places) == len(each.texts) > 0
            flat += [Rdata(each.stream, each.instance, *row) for row in zip(each.places, each.texts, strict=True)]
        else:
            assert not isinstance(each, Rdata)
            flat.append(each)
    return flat


def fault_of(connection: ReplicationConnection, data: bytes) -> Fault:
    """Return the Fault that ``data`` ends in."""
    fault = connection.receive_data(data, 1.0)[-1]
    assert isinstance(fault, Fault)
    assert connection.closed
    return fault


def test_the_access_token_of_a_wrong_user_ip_is_not_quoted() -> None:
    """It was sent back, and both ends logged it."""
    for line, shown in (
        (b'USER_IP @u:h ["syt_token","1.2.3.4","UA",null,x]', "in 'USER_IP @u:h'..."),
        (b'USER_IP @u:h ["syt_token"]', "in 'USER_IP @u:h'..."),
        (b'USER_IP  ["syt_token"]', "in 'USER_IP '..."),
        (b'USER_IP @u:h ["syt_token\xff"]', "in b'USER_IP @u:h'..."),
        (b"USER_IP @u:h", "in 'USER_IP @u:h'"),
    ):
        fault = fault_of(ReplicationConnection(Role.MASTER, 0.0), line + b"\n")
        assert fault.text.endswith(shown), fault.text
        assert "syt_token" not in fault.text
    assert "syt_token" not in fault_of(worker(), b'USER_IP @u:h ["syt_token","i","a",null,1]\n').text


# ---- directions


def test_the_table_of_directions_is_the_protocols() -> None:
    for role in Role:
        sent = {word for word, command in COMMANDS.items() if role.value in command.SENT_BY}
        assert sent == {word for word, who in DIRECTIONS.items() if LETTER[role] in who}
    assert DIRECTIONS.keys() == COMMANDS.keys()
    assert Role.MASTER.other is Role.WORKER
    assert Role.WORKER.other is Role.MASTER


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("line", "command"), VALID, ids=ids_of(VALID))
def test_each_command_is_sent_and_received_in_its_direction_only(role: Role, line: str, command: Command) -> None:
    sender, receiver = ReplicationConnection(role, 0.0), ReplicationConnection(role.other, 0.0)
    data = line.encode() + b"\n"
    if LETTER[role] in DIRECTIONS[command.WORD]:
        assert sender.send(command, 2.0) == data
        assert sender.sent_at == 2.0
        assert flatten(receiver.receive_data(data, 3.0)) == [command]
        assert receiver.received_at == 3.0
    else:
        with pytest.raises(LocalProtocolError, match=f"{command.WORD} may not be sent by a {role.value}"):
            sender.send(command, 2.0)
        assert sender.sent_at == 0.0
        fault = fault_of(receiver, data)
        assert fault.kind == "wrong direction"
        expected = f"line 1: invalid command: {command.WORD} may not be sent by a {role.value}, in '{line[:10]}"
        assert fault.text.startswith(expected)
        assert receiver.received_at == 0.0


@given(st.data(), st.sampled_from(Role))
def test_commands_are_received_as_they_were_sent(data: st.DataObject, role: Role) -> None:
    commands = data.draw(st.lists(strategies.master_commands if role is Role.MASTER else strategies.worker_commands))
    sender, receiver = ReplicationConnection(role, 0.0), ReplicationConnection(role.other, 0.0)
    sent = b"".join(sender.send(command, 1.0) for command in commands)
    assert [each for read in data.draw(cuts(sent)) for each in flatten(receiver.receive_data(read, 1.0))] == commands
    assert receiver.lines_received == len(commands)
    assert not receiver.closed


def test_a_command_that_cannot_be_encoded_does_not_delay_the_ping() -> None:
    connection = worker(line_limit=10)
    for command in (Ping("a\nb"), Name("x" * 10)):
        with pytest.raises(LocalProtocolError):
            connection.send(command, 5.0)
    assert connection.sent_at == 0.0


# ---- runs of RDATA


def test_consecutive_rdata_of_one_stream_and_instance_are_one_object() -> None:
    data = (
        b'RDATA s a 5 ["x y"]\nRDATA s a batch []\nRDATA s a 6 {}\nRDATA s b 7 []\nRDATA s bb 7 []\nRDATA st b 8 []\n'
        b"\nRDATA s b 9 []\nPOSITION s b 9 10\nRDATA s b 11 []\nRDATA s b 12 []\nRDATA s"
    )
    received = worker().receive_data(data, 1.0)
    assert received == [
        Rows(StreamName("s"), InstanceName("a"), [Token(5), None, Token(6)], ['["x y"]', "[]", "{}"]),
        Rows(StreamName("s"), InstanceName("b"), [Token(7)], ["[]"]),
        Rows(StreamName("s"), InstanceName("bb"), [Token(7)], ["[]"]),
        Rows(StreamName("st"), InstanceName("b"), [Token(8)], ["[]"]),
        Rows(StreamName("s"), InstanceName("b"), [Token(9)], ["[]"]),
        Position(StreamName("s"), InstanceName("b"), Token(9), Token(10)),
        Rows(StreamName("s"), InstanceName("b"), [Token(11), Token(12)], ["[]", "[]"]),
    ]


def test_rdata_before_a_bad_line_of_the_same_run_is_received() -> None:
    connection = worker()
    received = connection.receive_data(b"RDATA s a 5 []\nRDATA s a 6 []\nRDATA s a 07 []\nRDATA s a 8 []\n", 1.0)
    assert [type(each) for each in received] == [Rows, Rows, Fault]
    assert [each.token for each in flatten(received) if isinstance(each, Rdata)] == [5, 6]
    assert received[-1] == Fault("line 3: not a plain integer of 64 bits: '07', in 'RDATA s a 07 []'", "bad line")
    assert connection.received_at == 1.0
    assert connection.receive_data(b"RDATA s a 8 []\n", 2.0) == []


# Parts of lines that are close to each other, right and wrong, so that runs form and break.
_streams = st.sampled_from(["s", "s", "s", "t", "", "s\x00", "s" * 256])
_instances = st.sampled_from(["a", "a", "a", "aa", "é", ""])
_places = st.sampled_from(
    ["batch", "5", "6", "77", "-3", str(2**63 - 1), str(2**63), "05", "-0", "1_0", "\u0663", "", "9" * 5000]
)
_texts = st.sampled_from(
    ["[]", "[]", '["x y"]', '"\\ud800"', ' {"a": 1} ', '"é"', "[1", "2]", "1 2", "NaN", "", "9" * 4301]
)
_rdata_lines = st.builds("RDATA {} {} {} {}".format, _streams, _instances, _places, _texts)
_good_rdata_lines = st.builds(
    "RDATA {} {} {} {}".format,
    st.sampled_from("st"),
    st.just("a"),
    st.sampled_from(["batch", "5", "66"]),
    st.just("[1]"),
)
_odd_lines = st.sampled_from(
    [
        "",
        " ",
        "\r",
        "\t\x0c\x1c\u00a0",
        "RDATA",
        "RDATA ",
        "RDATA s",
        "RDATA s a",
        "RDATA s a 5",
        "PING 1\r",
        "PING \r\r",
        "REPLICATE\r",
        "x" * 90,
    ]
)
_lines = st.one_of(
    _good_rdata_lines.map(str.encode),
    _good_rdata_lines.map(str.encode),
    _rdata_lines.map(str.encode),
    _good_rdata_lines.map(lambda line: line.encode() + b"\r"),
    _odd_lines.map(str.encode),
    strategies.any_command.map(lambda command: encode_line(command)[:-1]),
    st.sampled_from(MALFORMED).map(lambda line: line[0].encode()),
    st.sampled_from([b"\xff", b"PING \xc3", b"RDATA s a 5 [\xc3\x28]", b"\xe2\x82", b"RDATA s a 5 []\x80"]),
    st.binary(max_size=5).map(lambda line: line.replace(b"\n", b"")),
)
_limits = st.sampled_from([16, 40, 80, 200, LINE_LIMIT])


def _outcome(connection: ReplicationConnection, received: list[list[Received]]) -> object:
    flat = [each for some in received for each in flatten(some)]
    return flat, connection.closed, connection.received_at, connection.lines_received, connection.wake_at()


@given(st.data(), st.sampled_from(Role), st.lists(_lines, max_size=12), _limits)
@example(None, Role.WORKER, [b"RDATA s a 5 [1,", b"RDATA s a 6 2]", b"RDATA s a 7 3 4"], LINE_LIMIT)
@example(None, Role.WORKER, [b"RDATA s a 5 []", b"RDATA s a 6 []\r", b"RDATA s a 7 []\r\r"], LINE_LIMIT)
@example(None, Role.WORKER, [b"PING 1", b"\xff", b"x" * 20], 16)
@example(None, Role.WORKER, [b"PING 1", b"x" * 20, b"\xff"], 16)
@example(None, Role.WORKER, [b"PING 1", b"\xff" * 20], 16)
def test_the_bulk_path_receives_the_same_as_line_by_line(
    data: st.DataObject | None, role: Role, lines: list[bytes], limit: int
) -> None:
    slow = ReplicationConnection(role, 0.0, line_limit=limit)
    expected = _outcome(slow, [slow.receive_line(line, 1.0) for line in lines])
    whole = b"".join(line + b"\n" for line in lines)
    ways = [[whole], [whole[at : at + 1] for at in range(len(whole))]]
    if data is not None:
        ways.append(data.draw(cuts(whole)))
    for reads in ways:
        fast = ReplicationConnection(role, 0.0, line_limit=limit)
        assert _outcome(fast, [fast.receive_data(read, 1.0) for read in reads]) == expected


@given(
    st.lists(st.binary(max_size=50) | st.sampled_from([b"\n", b"PING ", b"RDATA s a 5 []\n"])),
    st.sampled_from(Role),
    _limits,
)
def test_garbage_ends_in_at_most_one_fault_that_can_be_sent(reads: list[bytes], role: Role, limit: int) -> None:
    connection = ReplicationConnection(role, 0.0, line_limit=limit)
    received = [each for read in reads for each in connection.receive_data(read, 1.0)]
    faults = [each for each in received if isinstance(each, Fault)]
    assert connection.closed == (len(faults) == 1)
    assert faults == received[len(received) - len(faults) :]
    for fault in faults:
        assert fault.kind in KINDS
        assert ReplicationConnection(role, 0.0).send(Error(fault.text), 1.0) == f"ERROR {fault.text}\n".encode()


# ---- what is not a command


@pytest.mark.parametrize("line", [b"", b" ", b"\r", b" \t\r", b"\x0b\x0c", "\u00a0\u2003".encode()])
@pytest.mark.parametrize("role", Role)
def test_trap_1_a_blank_line_is_ignored(role: Role, line: bytes) -> None:
    connection = ReplicationConnection(role, 0.0)
    assert connection.receive_data(line + b"\n" + line + b"\nPING 1\n", 1.0) == [Ping("1")]
    assert ReplicationConnection(role, 0.0).receive_line(line, 1.0) == []
    assert connection.lines_received == 3


def test_blank_lines_are_no_sign_of_life() -> None:
    connection = worker()
    connection.receive_data(b"\n \n\r\n", 1.0)
    assert connection.received_at == 0.0


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("line", "complaint"), MALFORMED, ids=ids_of(MALFORMED))
def test_a_malformed_line_is_a_fault_with_reason_and_line_number(role: Role, line: str, complaint: str) -> None:
    connection = ReplicationConnection(role, 0.0)
    fault = fault_of(connection, b"PING 1\n\n" + line.encode() + b"\nPING 2\n")
    assert fault.kind == ("unknown command" if "unknown" in complaint else "bad line")
    assert fault.text.startswith("line 3: ")
    assert complaint in fault.text
    shown = " ".join(line.split(" ")[:2]) if line.startswith("USER_IP ") else line[:80]  # no access token
    quoted = repr(shown) + ("..." if len(line) > len(shown) else "")
    assert fault.text.endswith(f", in {quoted}")
    assert connection.send(Error(fault.text), 1.0).endswith(b"\n")


def test_trap_3_a_percent_sign_in_a_bad_line_is_not_formatted() -> None:
    fault = fault_of(worker(), b"FOO 100% %s %(x)d {0} %%\n")
    assert fault.text == "line 1: unknown command: 'FOO', in 'FOO 100% %s %(x)d {0} %%'"


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (b"PING a\xffb", r"byte 7: invalid start byte, in b'PING a\xffb'"),
        (b"\xc3(", r"byte 1: invalid continuation byte, in b'\xc3('"),
        (b"PING \xe2\x82", r"byte 6: unexpected end of data, in b'PING \xe2\x82'"),
        (b"PING \xed\xa0\x80", r"byte 6: invalid continuation byte, in b'PING \xed\xa0\x80'"),
        (b"x" * 90 + b"\x80", f"byte 91: invalid start byte, in b'{'x' * 80}'..."),
    ],
)
def test_trap_4_bytes_that_are_not_utf_8_are_a_fault_with_their_offset(line: bytes, where: str) -> None:
    """The good lines before them are received."""
    connection = worker()
    received = connection.receive_data(b"PING 1\n" + line + b"\nPING 2\n", 1.0)
    assert received == [Ping("1"), Fault(f"line 2: not UTF-8 at {where}", "not UTF-8")]
    assert connection.closed


@pytest.mark.parametrize("hello", [b"\x16\x03\x01\x01.\x01", b"\x16\x03\x01\x02\xff"])
def test_a_peer_with_tls_is_named_whatever_its_random_bytes_are(hello: bytes) -> None:
    fault = fault_of(worker(), hello + b"\n")
    assert (fault.text, fault.kind) == ("line 1: the peer connects with TLS, this port has none", "bad line")


@pytest.mark.parametrize(("before", "number"), [(b"PING 1\nPING 2\n", 3), (b"\n", 2), (b"", 1)])
def test_every_line_before_the_bytes_that_are_not_utf_8_is_received(before: bytes, number: int) -> None:
    *good, fault = worker().receive_data(before + b"\xff\nPING 9\n", 1.0)
    assert good == [Ping(str(each)) for each in range(1, before.count(b"P") + 1)]
    assert isinstance(fault, Fault)
    assert fault.text.startswith(f"line {number}: not UTF-8 at byte 1")


@pytest.mark.parametrize(("length", "end"), [(80, "'"), (81, "'...")])
def test_80_characters_of_a_bad_line_are_quoted(length: int, end: str) -> None:
    line = "x" * length
    assert fault_of(worker(), f"{line}\n".encode()).text.endswith(f", in '{line[:80]}{end}")


def test_a_bad_line_before_the_bytes_that_are_not_utf_8_comes_first() -> None:
    assert fault_of(worker(), b"FOO\n\xff\n").kind == "unknown command"


@pytest.mark.parametrize("rest", [b"", b"\n", b"\nPING 2\n", b"x" * 100_000])
def test_a_line_over_the_limit_is_a_fault_as_soon_as_it_is_seen(rest: bytes) -> None:
    connection = worker()
    line = b"PING " + b"x" * (LINE_LIMIT - 5)
    assert connection.receive_data(b"PING 1\n" + line + b"\n" + line, 1.0) == [Ping("1"), Ping("x" * (LINE_LIMIT - 5))]
    assert connection.receive_data(b"x" + rest, 1.0) == [
        Fault("Line length exceeded: line 3 has more than 16384 bytes", "line too long")
    ]
    assert connection.closed


def test_the_limit_is_of_bytes_and_the_cr_counts() -> None:
    assert worker(9).receive_data("PING éé\n".encode(), 1.0) == [Ping("éé")]
    assert fault_of(worker(9), "PING ééé\n".encode()).kind == "line too long"
    assert fault_of(worker(6), b"PING 1\r\n").kind == "line too long"
    assert worker(7).receive_data(b"PING 1\r\n", 1.0) == [Ping("1")]


def test_receive_line_has_the_same_limit() -> None:
    assert worker(6).receive_line(b"PING 1", 1.0) == [Ping("1")]
    too_long = worker(6).receive_line(b"PING 12", 1.0)
    assert too_long == [Fault("Line length exceeded: line 1 has more than 6 bytes", "line too long")]


def test_the_limit_can_be_raised() -> None:
    connection = worker(16 * 1024 * 1024)
    assert connection.line_limit == 16 * 1024 * 1024
    row = f'["{"x" * 1_000_000}"]'
    assert flatten(connection.receive_data(f"RDATA s a 5 {row}\n".encode(), 1.0)) == [
        Rdata(StreamName("s"), InstanceName("a"), Token(5), row)
    ]
    assert len(connection.send(Ping("x" * 1_000_000), 1.0)) == 1_000_006


def test_a_writer_that_begins_facts_and_completes_none_is_a_fault() -> None:
    """What waits for the rest of a fact takes memory (docs/configuration.md, Fixed limits)."""
    connection = worker()
    for number in range(1_000):  # complete facts do not count
        assert not any(
            isinstance(each, Fault)
            for each in connection.receive_data(f"RDATA a w{number} batch 1\nRDATA a w{number} 5 2\n".encode(), 0.0)
        )
    for number in range(MAX_INCOMPLETE):
        (rows,) = connection.receive_data(f"RDATA a w{number} batch 1\nRDATA a w{number} batch 2\n".encode(), 0.0)
        assert isinstance(rows, Rows)
    (rows,) = connection.receive_data(b"RDATA a w0 5 2\n", 0.0)
    assert isinstance(rows, Rows)
    (rows,) = connection.receive_line(b"RDATA b w0 batch 2", 0.0)
    assert isinstance(rows, Rows)
    (fault,) = connection.receive_line(b"RDATA c w0 batch 2", 0.0)
    assert isinstance(fault, Fault)
    assert fault.kind == "incomplete facts"
    assert "more than 16 facts are incomplete" in fault.text


@pytest.mark.parametrize("rest", [b"POSITION a w0 5 5\n", b"RDATA a w0 5 2\n", b""])
def test_a_fact_counts_as_incomplete_until_its_last_row_or_a_position(rest: bytes) -> None:
    connection = worker()
    connection.receive_data(
        b"".join([b"RDATA a w%d batch 1\n" % number for number in range(MAX_INCOMPLETE)]) + rest, 0.0
    )
    (received,) = connection.receive_data(b"RDATA b w0 batch 1\n", 0.0)
    if rest:
        assert isinstance(received, Rows)
    else:
        assert isinstance(received, Fault)
        assert received.text.endswith("more than 16 facts are incomplete, in 'RDATA b w0 batch 1'")


def test_a_writer_with_positions_of_too_many_writers_is_a_fault() -> None:
    connection = worker()
    data = "".join([f"POSITION a w{number} 1 1\n" for number in range(9)]).encode()
    with patch("replication.session.connection.MAX_WRITERS", 9):
        for _ in range(2):
            assert len(connection.receive_data(data, 0.0)) == 9
        (fault,) = connection.receive_data(b"POSITION b w 1 1\n", 0.0)
    assert isinstance(fault, Fault)
    assert fault.kind == "too many writers"
    assert "positions of more than 9 streams and writers, in 'POSITION b w 1 1'" in fault.text


def test_nothing_is_received_after_a_fault() -> None:
    connection = worker()
    connection.receive_data(b"FOO\n", 1.0)
    assert connection.receive_data(b"PING 1\n\xff\n", 2.0) == []
    assert connection.receive_line(b"PING 1", 2.0) == []
    assert connection.received_at == 0.0
    assert connection.tick(1000.0, 0) is None
    assert connection.wake_at() == inf


@pytest.mark.parametrize("role", Role)
def test_an_error_from_the_peer_does_not_close(role: Role) -> None:
    """docs/protocol/connection.md B3: the sender of an ERROR closes, the receiver logs it."""
    connection = ReplicationConnection(role, 0.0)
    assert connection.receive_data(b"ERROR 100%\nPING 1\n", 1.0) == [Error("100%"), Ping("1")]
    assert not connection.closed


# ---- keep-alive


def test_ping_is_due_5_s_after_the_last_line_sent() -> None:
    connection = worker()
    assert connection.wake_at() == 5.0
    assert connection.tick(4.9, 1) is None
    ping = connection.tick(5.0, 1490197665618)
    assert ping == Ping("1490197665618")
    assert connection.send(Ping("1490197665618"), 5.0) == b"PING 1490197665618\n"
    assert connection.tick(5.0, 1) is None
    assert connection.wake_at() == 10.0


def test_lines_encoded_elsewhere_delay_the_ping() -> None:
    connection = worker()
    connection.sent(3.0)
    assert connection.wake_at() == 8.0
    assert connection.tick(5.0, 1) is None


def test_a_peer_that_never_pinged_may_be_silent_for_ever() -> None:
    """docs/protocol/connection.md B2: a person with nc may watch."""
    connection = worker()
    connection.receive_data(b"SERVER localhost\n", 1.0)
    assert connection.tick(1_000_000.0, 1) == Ping("1")
    assert not connection.closed


def test_a_peer_that_pinged_times_out_after_15_s_of_silence() -> None:
    connection = worker()
    connection.receive_data(b"PING 1\n", 2.0)
    for now in (5.0, 10.0, 15.0):
        connection.sent(now)
    assert connection.wake_at() == 17.0
    assert connection.tick(16.9, 1) is None
    assert connection.tick(17.0, 1) == Fault("ping timeout: nothing received for 15 s", "ping timeout")
    assert connection.closed
    assert connection.send(Error("ping timeout"), 17.0) == b"ERROR ping timeout\n"


def test_trap_2_a_silence_of_10_s_is_no_fault() -> None:
    connection = worker()
    now = 0.0
    while now < 100.0:
        connection.receive_data(b"PING 1\n", now)
        now += 9.999
        assert not isinstance(connection.tick(now, 1), Fault)


def test_every_good_command_is_a_sign_of_life_and_a_bad_one_is_not() -> None:
    connection = worker()
    connection.receive_data(b"PING 1\n", 0.0)
    connection.receive_data(b"RDATA s a 5 []\n", 10.0)
    assert connection.received_at == 10.0
    connection.receive_line(b"POSITION s a 5 5", 20.0)
    assert connection.received_at == 20.0
    connection.receive_data(b"FOO\n", 30.0)
    assert connection.received_at == 20.0


@given(
    st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["received", "pinged", "sent", "nothing"])), max_size=20),
    st.floats(0.01, 20),
    st.floats(0.01, 20),
)
def test_something_is_due_at_wake_at_and_nothing_before(
    steps: list[tuple[float, str]], ping_after: float, give_up_after: float
) -> None:
    now = 1.0
    connection = ReplicationConnection(Role.WORKER, now, Keepalive(ping_after, give_up_after))
    for pause, what in steps:
        now += pause
        match what:
            case "received":
                connection.receive_data(b"SERVER a\n", now)
            case "pinged":
                connection.receive_data(b"PING 1\n", now)
            case "sent":
                connection.sent(now)
    due = connection.wake_at()
    if now < due:
        assert connection.tick(now, 1) is None
    assert connection.tick(max(now, due), 1) is not None


@pytest.mark.parametrize("seconds", [0, -1, nan, inf])
def test_a_time_that_is_not_above_0_or_not_finite_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="keep-alive: ping_after must be a number of seconds above 0"):
        Keepalive(ping_after=seconds)
    with pytest.raises(ConfigError, match="keep-alive: give_up_after must be"):
        Keepalive(give_up_after=seconds)


# ---- an application's own commands


@attrs.frozen
class Reindex(ApplicationCommand):
    """An application's own command."""

    WORD = "REINDEX"
    SENT_BY = ("worker",)
    table: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        if rest == "?":
            raise RemoteProtocolError("REINDEX takes a table")
        return cls(rest[: 10 // len(rest)])  # the application's bug: it divides by 0 if the rest is empty

    def encode(self) -> str:
        return self.table


def test_an_applications_command_is_sent_and_received_like_the_protocols() -> None:
    commands = {**COMMANDS, Reindex.WORD: Reindex}
    sender, without = worker(), ReplicationConnection(Role.MASTER, 0.0)
    line = sender.send(Reindex("t"), 1.0)
    assert line == b"REINDEX t\n"
    assert fault_of(without, line).kind == "unknown command"
    assert ReplicationConnection(Role.MASTER, 0.0, commands=commands).receive_data(line, 1.0) == [Reindex("t")]
    fault = fault_of(ReplicationConnection(Role.WORKER, 0.0, commands=commands), line)
    assert fault.kind == "wrong direction"
    with pytest.raises(LocalProtocolError, match="REINDEX may not be sent by a master"):
        ReplicationConnection(Role.MASTER, 0.0).send(Reindex("t"), 1.0)


def test_an_error_of_an_applications_parse_is_a_fault_of_its_connection() -> None:
    commands = {**COMMANDS, Reindex.WORD: Reindex}
    for line, why in ((b"REINDEX ?\n", "REINDEX takes a table"), (b"REINDEX \n", "ZeroDivisionError: ")):
        fault = fault_of(ReplicationConnection(Role.MASTER, 0.0, commands=commands), line)
        assert fault.kind == "bad line"
        assert why in fault.text


@attrs.frozen
class Paint(ApplicationCommand):
    """An application's own command, whose methods raise what Python raises."""

    WORD = "PAINT"
    SENT_BY = ("worker",)
    number: int
    color: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        number, color = rest.split(" ")
        return cls(int(number), color)

    def encode(self) -> str:
        return f"{self.number:d} {self.color}"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            Paint(1, "dark red"),
            "ValueError: too many values to unpack (expected 2)",
        ),
        (Paint("1", "red"), "ValueError: Unknown format code 'd'"),  # type: ignore[arg-type]
        (Paint(None, "red"), "TypeError: unsupported format string"),  # type: ignore[arg-type]
    ],
)
def test_an_error_of_an_applications_encode_or_parse_is_one_of_send_with_the_fields(command: Paint, why: str) -> None:
    assert worker().send(Paint(1, "red"), 1.0) == b"PAINT 1 red\n"
    with pytest.raises(LocalProtocolError) as raised:
        worker().send(command, 1.0)
    assert str(raised.value).startswith(f"PAINT cannot be encoded: {why}")
    assert repr(command) in str(raised.value)


def test_a_command_without_parse_or_encode_names_the_missing_method() -> None:
    with pytest.raises(NotImplementedError, match=r"ApplicationCommand lacks parse\(\)"):
        ApplicationCommand.parse("")
    with pytest.raises(NotImplementedError, match=r"ApplicationCommand lacks encode\(\)"):
        ApplicationCommand().encode()
