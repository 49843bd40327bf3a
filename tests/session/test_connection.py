"""One end of a conversation: the same bytes, however cut, say the same; nothing that a peer sends raises."""

from __future__ import annotations

from math import inf, nan
from typing import Any, Self

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replication.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from replication.session.connection import MAY_SAY, Fault, Heard, Keepalive, ReplicationConnection, Role, Rows, Words
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
from tests.transcripts.lines import MALFORMED, SAID

KINDS = {"unknown command", "bad line", "wrong direction", "line too long", "not UTF-8", "ping timeout"}

# protocol A4, once more: who sends what
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


def flatten(heard: list[Heard]) -> list[Command | Fault]:
    """Take Rows apart: how many RDATA came together is not part of what was said."""
    flat: list[Command | Fault] = []
    for each in heard:
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


# ---- who may say what


def test_the_table_is_that_of_the_protocol() -> None:
    for role, words in MAY_SAY.items():
        assert {word.WORD for word in words} == {word for word, who in DIRECTIONS.items() if LETTER[role] in who}
    assert DIRECTIONS.keys() == COMMANDS.keys()
    assert Role.MASTER.other is Role.WORKER
    assert Role.WORKER.other is Role.MASTER


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("line", "command"), SAID, ids=[line[:30] for line, _ in SAID])
def test_every_word_is_heard_from_who_may_say_it_and_refused_from_who_may_not(
    role: Role, line: str, command: Command
) -> None:
    speaker, listener = ReplicationConnection(role, 0.0), ReplicationConnection(role.other, 0.0)
    data = line.encode() + b"\n"
    if LETTER[role] in DIRECTIONS[command.WORD]:
        assert speaker.send(command, 2.0) == data
        assert speaker.spoke_at == 2.0
        assert flatten(listener.receive_data(data, 3.0)) == [command]
        assert listener.heard_at == 3.0
    else:
        with pytest.raises(LocalProtocolError, match=f"{command.WORD} is not for a {role.value} to say"):
            speaker.send(command, 2.0)
        assert speaker.spoke_at == 0.0
        fault = fault_of(listener, data)
        assert fault.kind == "wrong direction"
        assert (
            f"line 1: invalid command: {command.WORD} is not for a {role.value} to say, in '{line[:10]}" in fault.text
        )
        assert listener.heard_at == 0.0


@given(st.data(), st.sampled_from(Role))
def test_a_conversation_arrives_as_it_was_said(data: st.DataObject, role: Role) -> None:
    said = data.draw(st.lists(strategies.master_commands if role is Role.MASTER else strategies.worker_commands))
    speaker, listener = ReplicationConnection(role, 0.0), ReplicationConnection(role.other, 0.0)
    sent = b"".join(speaker.send(command, 1.0) for command in said)
    assert [each for read in data.draw(cuts(sent)) for each in flatten(listener.receive_data(read, 1.0))] == said
    assert listener.lines_heard == len(said)
    assert not listener.closed


def test_what_cannot_be_said_does_not_count_as_speaking() -> None:
    connection = worker(line_limit=10)
    for command in (Ping("a\nb"), Name("x" * 10)):
        with pytest.raises(LocalProtocolError):
            connection.send(command, 5.0)
    assert connection.spoke_at == 0.0


# ---- runs of RDATA


def test_consecutive_rows_of_one_stream_and_instance_come_as_one() -> None:
    data = (
        b'RDATA s a 5 ["x y"]\nRDATA s a batch []\nRDATA s a 6 {}\nRDATA s b 7 []\nRDATA s bb 7 []\nRDATA st b 8 []\n'
        b"\nRDATA s b 9 []\nPOSITION s b 9 10\nRDATA s b 11 []\nRDATA s b 12 []\nRDATA s"
    )
    heard = worker().receive_data(data, 1.0)
    assert heard == [
        Rows(StreamName("s"), InstanceName("a"), [Token(5), None, Token(6)], ['["x y"]', "[]", "{}"]),
        Rows(StreamName("s"), InstanceName("b"), [Token(7)], ["[]"]),
        Rows(StreamName("s"), InstanceName("bb"), [Token(7)], ["[]"]),
        Rows(StreamName("st"), InstanceName("b"), [Token(8)], ["[]"]),
        Rows(StreamName("s"), InstanceName("b"), [Token(9)], ["[]"]),
        Position(StreamName("s"), InstanceName("b"), Token(9), Token(10)),
        Rows(StreamName("s"), InstanceName("b"), [Token(11), Token(12)], ["[]", "[]"]),
    ]


def test_rows_before_a_bad_one_in_the_same_run_are_heard() -> None:
    connection = worker()
    heard = connection.receive_data(b"RDATA s a 5 []\nRDATA s a 6 []\nRDATA s a 07 []\nRDATA s a 8 []\n", 1.0)
    assert [type(each) for each in heard] == [Rows, Rows, Fault]
    assert [each.token for each in flatten(heard) if isinstance(each, Rdata)] == [5, 6]
    assert heard[-1] == Fault("line 3: not a plain integer of 64 bits: '07', in 'RDATA s a 07 []'", "bad line")
    assert connection.heard_at == 1.0
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


def _outcome(connection: ReplicationConnection, heard: list[list[Heard]]) -> object:
    flat = [each for some in heard for each in flatten(some)]
    return flat, connection.closed, connection.heard_at, connection.lines_heard, connection.wake_at()


@given(st.data(), st.sampled_from(Role), st.lists(_lines, max_size=12), _limits)
@example(None, Role.WORKER, [b"RDATA s a 5 [1,", b"RDATA s a 6 2]", b"RDATA s a 7 3 4"], LINE_LIMIT)
@example(None, Role.WORKER, [b"RDATA s a 5 []", b"RDATA s a 6 []\r", b"RDATA s a 7 []\r\r"], LINE_LIMIT)
@example(None, Role.WORKER, [b"PING 1", b"\xff", b"x" * 20], 16)
@example(None, Role.WORKER, [b"PING 1", b"x" * 20, b"\xff"], 16)
@example(None, Role.WORKER, [b"PING 1", b"\xff" * 20], 16)
def test_the_bulk_path_hears_what_line_by_line_is_heard(
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
def test_garbage_ends_in_at_most_one_fault_that_can_be_said(reads: list[bytes], role: Role, limit: int) -> None:
    connection = ReplicationConnection(role, 0.0, line_limit=limit)
    heard = [each for read in reads for each in connection.receive_data(read, 1.0)]
    faults = [each for each in heard if isinstance(each, Fault)]
    assert connection.closed == (len(faults) == 1)
    assert faults == heard[len(heard) - len(faults) :]
    for fault in faults:
        assert fault.kind in KINDS
        assert ReplicationConnection(role, 0.0).send(Error(fault.text), 1.0) == f"ERROR {fault.text}\n".encode()


# ---- what is not a command


@pytest.mark.parametrize("line", [b"", b" ", b"\r", b" \t\r", b"\x0b\x0c", "\u00a0\u2003".encode()])
@pytest.mark.parametrize("role", Role)
def test_trap_1_a_blank_line_says_nothing(role: Role, line: bytes) -> None:
    connection = ReplicationConnection(role, 0.0)
    assert connection.receive_data(line + b"\n" + line + b"\nPING 1\n", 1.0) == [Ping("1")]
    assert ReplicationConnection(role, 0.0).receive_line(line, 1.0) == []
    assert connection.lines_heard == 3


def test_blank_lines_are_no_sign_of_life() -> None:
    connection = worker()
    connection.receive_data(b"\n \n\r\n", 1.0)
    assert connection.heard_at == 0.0


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("line", "complaint"), MALFORMED, ids=[repr(line[:30]) for line, _ in MALFORMED])
def test_a_malformed_line_is_a_fault_that_says_what_and_where(role: Role, line: str, complaint: str) -> None:
    connection = ReplicationConnection(role, 0.0)
    fault = fault_of(connection, b"PING 1\n\n" + line.encode() + b"\nPING 2\n")
    assert fault.kind == ("unknown command" if "unknown" in complaint else "bad line")
    assert fault.text.startswith("line 3: ")
    assert complaint in fault.text
    quoted = repr(line[:80]) + ("..." if len(line) > 80 else "")
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
def test_trap_4_bytes_that_are_not_utf_8_are_a_fault_that_says_where(line: bytes, where: str) -> None:
    """All that was right before them is heard."""
    connection = worker()
    heard = connection.receive_data(b"PING 1\n" + line + b"\nPING 2\n", 1.0)
    assert heard == [Ping("1"), Fault(f"line 2: not UTF-8 at {where}", "not UTF-8")]
    assert connection.closed


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


def test_a_line_cut_by_somebody_else_has_the_same_limit() -> None:
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


def test_nothing_is_heard_after_the_end() -> None:
    connection = worker()
    connection.receive_data(b"FOO\n", 1.0)
    assert connection.receive_data(b"PING 1\n\xff\n", 2.0) == []
    assert connection.receive_line(b"PING 1", 2.0) == []
    assert connection.heard_at == 0.0
    assert connection.tick(1000.0, 0) is None
    assert connection.wake_at() == inf


@pytest.mark.parametrize("role", Role)
def test_an_error_from_the_peer_does_not_close(role: Role) -> None:
    """Protocol B3: the sender of an ERROR closes, the receiver logs it."""
    connection = ReplicationConnection(role, 0.0)
    assert connection.receive_data(b"ERROR 100%\nPING 1\n", 1.0) == [Error("100%"), Ping("1")]
    assert not connection.closed


# ---- silence


def test_we_ping_when_we_have_said_nothing_for_a_while() -> None:
    connection = worker()
    assert connection.wake_at() == 5.0
    assert connection.tick(4.9, 1) is None
    ping = connection.tick(5.0, 1490197665618)
    assert ping == Ping("1490197665618")
    assert connection.send(Ping("1490197665618"), 5.0) == b"PING 1490197665618\n"
    assert connection.tick(5.0, 1) is None
    assert connection.wake_at() == 10.0


def test_lines_spelt_elsewhere_count_as_speaking() -> None:
    connection = worker()
    connection.sent(3.0)
    assert connection.wake_at() == 8.0
    assert connection.tick(5.0, 1) is None


def test_a_peer_that_never_pinged_may_be_silent_for_ever() -> None:
    """Protocol B2: netcat is welcome."""
    connection = worker()
    connection.receive_data(b"SERVER localhost\n", 1.0)
    assert connection.tick(1_000_000.0, 1) == Ping("1")
    assert not connection.closed


def test_a_peer_that_pinged_once_must_not_fall_silent() -> None:
    connection = worker()
    connection.receive_data(b"PING 1\n", 2.0)
    for now in (5.0, 10.0, 15.0):
        connection.sent(now)
    assert connection.wake_at() == 17.0
    assert connection.tick(16.9, 1) is None
    assert connection.tick(17.0, 1) == Fault("ping timeout: nothing heard for 15 s", "ping timeout")
    assert connection.closed
    assert connection.send(Error("ping timeout"), 17.0) == b"ERROR ping timeout\n"


def test_trap_2_a_healthy_synapse_may_be_silent_for_ten_seconds() -> None:
    connection = worker()
    now = 0.0
    while now < 100.0:
        connection.receive_data(b"PING 1\n", now)
        now += 9.999
        assert not isinstance(connection.tick(now, 1), Fault)


def test_any_right_command_is_a_sign_of_life_and_a_wrong_one_is_none() -> None:
    connection = worker()
    connection.receive_data(b"PING 1\n", 0.0)
    connection.receive_data(b"RDATA s a 5 []\n", 10.0)
    assert connection.heard_at == 10.0
    connection.receive_line(b"POSITION s a 5 5", 20.0)
    assert connection.heard_at == 20.0
    connection.receive_data(b"FOO\n", 30.0)
    assert connection.heard_at == 20.0


@given(
    st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["heard", "pinged", "spoke", "slept"])), max_size=20),
    st.floats(0.01, 20),
    st.floats(0.01, 20),
)
def test_there_is_something_to_do_at_the_time_to_wake_and_nothing_before(
    steps: list[tuple[float, str]], ping_after: float, give_up_after: float
) -> None:
    now = 1.0
    connection = ReplicationConnection(Role.WORKER, now, Keepalive(ping_after, give_up_after))
    for pause, what in steps:
        now += pause
        match what:
            case "heard":
                connection.receive_data(b"SERVER a\n", now)
            case "pinged":
                connection.receive_data(b"PING 1\n", now)
            case "spoke":
                connection.sent(now)
    due = connection.wake_at()
    if now < due:
        assert connection.tick(now, 1) is None
    assert connection.tick(max(now, due), 1) is not None


@pytest.mark.parametrize("seconds", [0, -1, nan, inf])
def test_a_time_that_no_timer_can_wait_for_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="keep-alive: ping_after must be a number of seconds above 0"):
        Keepalive(ping_after=seconds)
    with pytest.raises(ConfigError, match="keep-alive: give_up_after must be"):
        Keepalive(give_up_after=seconds)


# ---- an application's own words


@attrs.frozen
class Reindex(ApplicationCommand):
    """Something that only we know."""

    WORD = "REINDEX"
    SAID_BY = ("worker",)
    table: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        if rest == "?":
            raise RemoteProtocolError("REINDEX takes a table")
        return cls(rest[: 10 // len(rest)])  # a bug of the application's: not made for an empty rest

    def spell(self) -> str:
        return self.table


def test_an_applications_word_is_said_and_heard_as_the_protocols_are() -> None:
    words = Words()
    speaker, stranger = worker(), ReplicationConnection(Role.MASTER, 0.0)
    line = speaker.send(Reindex("t"), 1.0)
    assert line == b"REINDEX t\n"
    assert fault_of(stranger, line).kind == "unknown command"
    words.add(Reindex)
    words.add(Reindex)
    words.add(Ping)
    assert ReplicationConnection(Role.MASTER, 0.0, words=words).receive_data(line, 1.0) == [Reindex("t")]
    fault = fault_of(ReplicationConnection(Role.WORKER, 0.0, words=words), line)
    assert fault.kind == "wrong direction"
    assert Words().classes == dict(COMMANDS)
    with pytest.raises(LocalProtocolError, match="REINDEX is not for a master to say"):
        ReplicationConnection(Role.MASTER, 0.0).send(Reindex("t"), 1.0)


def test_whatever_an_applications_word_raises_closes_that_connection_only() -> None:
    words = Words()
    words.add(Reindex)
    for line, why in ((b"REINDEX ?\n", "REINDEX takes a table"), (b"REINDEX \n", "ZeroDivisionError: ")):
        fault = fault_of(ReplicationConnection(Role.MASTER, 0.0, words=words), line)
        assert fault.kind == "bad line"
        assert why in fault.text


def test_a_word_that_cannot_be_added_is_refused() -> None:
    def own(word: object, said_by: object = ("worker",)) -> Any:
        return type("Own", (ApplicationCommand,), {"WORD": word, "SAID_BY": said_by})

    refused: list[tuple[Any, str]] = [
        (int, "is no command: subclass ApplicationCommand"),
        (Reindex("t"), "is no command"),
        (own("re-index"), "is no command"),
        (own("PING"), "PING is Ping already: give Own another WORD"),
        (own("X", "worker"), "X: SAID_BY lists"),
        (own("X", ["boss"]), "X: SAID_BY lists"),
        (own("X", []), "X: SAID_BY lists"),
    ]
    for made, why in refused:
        with pytest.raises(ConfigError, match=why):
            Words().add(made)


def test_an_application_that_forgot_something_is_told_what() -> None:
    with pytest.raises(NotImplementedError, match=r"ApplicationCommand lacks parse\(\)"):
        ApplicationCommand.parse("")
    with pytest.raises(NotImplementedError, match=r"ApplicationCommand lacks spell\(\)"):
        ApplicationCommand().spell()
