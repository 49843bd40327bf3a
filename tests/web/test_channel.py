"""A request that never ends is closed; one that is only slow is answered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import pytest
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.logger import LogLevel
from twisted.python.failure import Failure
from twisted.web.server import version

from replication.net.admission import Bounds
from replication.web.channel import PART, PAUSE, Channel
from replication.web.site import ApiSite, make_site
from tests.doubles import logged, shown_metrics
from tests.net.test_sending import Socket
from tests.web.served import ELSEWHERE, FACTS, JSON, Client, FakeServed, header, read_answer

if TYPE_CHECKING:
    from collections.abc import Callable

BODY = b'{"rows": [["a", "new"]]}'
GONE = Failure(ConnectionDone())
HEAD = header("POST", FACTS, [JSON], len(BODY))


class Connection:
    """A site with short times, and one connection to it."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.clock = Clock()
        site = make_site(FakeServed(), secret=None, reactor=self.clock, bounds=bounds or Bounds())
        assert isinstance(site, ApiSite)
        self.site = site
        self.client = Client(site)

    @property
    def closed(self) -> bool:
        return bool(self.client.transport.disconnected or self.client.transport.disconnecting)

    def trickle(self, data: bytes, seconds: float) -> int:
        """Send one byte each time that so many seconds have passed; return how many were sent before the end."""
        for sent, byte in enumerate(data):
            if self.closed:
                return sent
            self.client.send(bytes([byte]))
            self.clock.advance(seconds)
        return len(data)

    def turn(self) -> None:
        """Run what is due, as one turn of the reactor does: what that calls for at once is done in the next one."""
        for call in [each for each in self.clock.calls if each.getTime() <= self.clock.seconds()]:
            self.clock.calls.remove(call)
            call.called = 1
            call.func(*call.args, **call.kw)

    def codes(self) -> tuple[int, ...]:
        """Return the status of each answer."""
        return tuple(map(int, re.findall(rb"HTTP/1.1 (\d+)", self.client.transport.value())))

    def timeouts(self) -> dict[str, float]:
        return {
            name: value for name, value in shown_metrics(self.site.resource.samples()).items() if "timeouts" in name
        }


@pytest.fixture
def connection() -> Connection:
    return Connection()


def test_a_connection_that_sends_nothing_is_closed(connection: Connection) -> None:
    connection.clock.advance(29)
    assert not connection.closed
    connection.clock.advance(1)
    assert connection.closed
    assert connection.timeouts() == {"http_timeouts_total part=headers": 1}


def test_headers_that_trickle_are_closed(connection: Connection) -> None:
    """Each byte begins the idle time of Twisted again."""
    with logged(LogLevel.warn) as lines:
        assert connection.trickle(HEAD, 1) == 30
    assert lines == ["HTTP: closing a peer (127.0.0.1:40000): the headers of a request took too long"]
    assert connection.timeouts() == {"http_timeouts_total part=headers": 1}


def test_a_body_that_trickles_is_closed(connection: Connection) -> None:
    connection.client.send(HEAD.replace(b"24", b"2400"))
    assert connection.trickle(BODY * 100, 1) == 61, "a byte is a thousandth of a second"
    assert connection.timeouts() == {"http_timeouts_total part=body": 1}


def test_a_body_that_is_slow_has_a_second_more_for_each_kib(connection: Connection) -> None:
    body = b'{"rows": [["%s", "new"]]}' % (b"x" * 200 * 1024)
    connection.client.send(header("POST", FACTS, [JSON], len(body)))
    for at in range(0, len(body), 2048):
        assert not connection.closed
        connection.client.send(body[at : at + 2048])
        connection.clock.advance(2)
    assert read_answer(connection.client.transport.value()).code == 200
    assert connection.timeouts() == {}


def test_the_time_begins_again_with_each_request_and_idle_ones_have_twisteds(connection: Connection) -> None:
    for _ in range(3):
        connection.client.transport.clear()
        connection.trickle(HEAD, 0.1)
        connection.trickle(BODY, 1)
        assert read_answer(connection.client.transport.value()).code == 200
        connection.clock.advance(40)
        assert not connection.closed
    connection.clock.advance(20)
    assert connection.closed
    assert connection.timeouts() == {}


def test_a_part_of_the_next_request_has_the_time_of_headers(connection: Connection) -> None:
    connection.trickle(HEAD[:200], 0.1)
    connection.client.send(HEAD[200:] + BODY + HEAD[:10])
    connection.clock.advance(0)
    assert read_answer(connection.client.transport.value()).code == 200
    connection.turn()
    connection.clock.advance(29)
    assert not connection.closed
    connection.clock.advance(1)
    assert connection.closed


def test_of_requests_that_arrive_together_one_is_answered_in_each_turn(connection: Connection) -> None:
    """Thousands of small ones in one read held up every other connection for seconds."""
    refused = header("POST", FACTS, [("Content-Type", "text/plain")], len(BODY)) + BODY
    connection.client.send(refused + header("GET", "/health/live") + header("GET", "/v1/streams/none"))
    answers = [(415,), (415, 200), (415, 200, 404)]
    for expected in answers:
        assert connection.codes() == expected
        connection.turn()
    assert connection.codes() == answers[-1]
    connection.client.send(header("GET", "/health/live"))
    assert connection.codes() == (415, 200, 404, 200)


def test_while_a_client_does_not_read_its_next_request_waits(connection: Connection) -> None:
    """The answers to requests that had arrived together took memory without a bound."""
    connection.client.send(header("GET", "/health/live") * 2)
    connection.client.protocol.pauseProducing()
    connection.client.send(header("GET", "/v1/streams/none"))
    connection.clock.advance(10)
    assert connection.codes() == (200,)
    connection.client.protocol.resumeProducing()
    connection.clock.advance(0)
    assert connection.codes() == (200, 200, 404)


def test_a_client_that_does_not_read_is_closed(connection: Connection) -> None:
    connection.client.send(header("GET", "/health/live") * 2)
    connection.client.protocol.pauseProducing()
    connection.clock.advance(59)
    assert not connection.closed
    connection.clock.advance(1)
    assert connection.closed
    connection.client.protocol.resumeProducing()
    connection.clock.advance(0)
    assert connection.codes() == (200,)


def test_a_connection_that_is_lost_answers_nothing_more(connection: Connection) -> None:
    connection.client.send(header("GET", "/v1/streams/none") * 2)
    connection.client.protocol.connectionLost(GONE)
    connection.clock.advance(0)
    assert connection.clock.getDelayedCalls() == []
    assert connection.codes() == (404,)


def test_a_request_in_one_read_needs_no_timer_beside_twisteds(connection: Connection) -> None:
    connection.client.send(HEAD + BODY)
    assert len(connection.clock.getDelayedCalls()) == 1
    connection.client.protocol.connectionLost(GONE)
    assert connection.clock.getDelayedCalls() == []


def answers(connection: Connection) -> int:
    return bytes(connection.client.transport.value()).count(b"HTTP/1.1 200 OK")


def test_requests_that_are_sent_at_once_are_answered_one_in_a_turn(connection: Connection) -> None:
    """A thousand of them would block the reactor for seconds."""
    waiting: list[Callable[[], None]] = []
    connection.client.protocol.callLater = lambda seconds, function: (
        waiting.append(function) if seconds == 0 else connection.clock.callLater(seconds, function)
    )
    connection.client.send((HEAD + BODY) * 3)
    for number in (1, 2, 3):
        assert answers(connection) == number
        for function in waiting[number - 1 :]:
            function()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_waits_until_the_client_has_read_the_answer_before(connection: Connection, *, at_once: bool) -> None:
    channel, transport = connection.client.protocol, connection.client.transport
    write, full = transport.write, True

    def fill(data: bytes) -> None:
        write(data)
        if full:
            channel.pauseProducing()

    transport.write = fill  # type: ignore[method-assign]
    if at_once:
        connection.client.send((HEAD + BODY) * 3)
    else:
        connection.client.send(HEAD + BODY)
    assert transport.producerState == "paused", "it is not read while it does not read"
    if not at_once:
        connection.client.send((HEAD + BODY) * 2)  # had arrived before
    for number in (1, 2, 3):
        connection.clock.advance(0)
        assert answers(connection) == number
        full = number < 2
        channel.resumeProducing()
        connection.clock.advance(0)
    assert transport.producerState == "producing"


def test_a_client_that_does_not_read_its_answer_is_closed(connection: Connection) -> None:
    transport = connection.client.transport
    write = transport.write

    def fill(data: bytes) -> None:
        write(data)
        connection.client.protocol.pauseProducing()

    transport.write = fill  # type: ignore[method-assign]
    connection.client.send(HEAD + BODY)
    connection.clock.advance(59)
    assert not connection.closed
    connection.clock.advance(1)
    assert connection.closed


def chunked(body: bytes) -> bytes:
    """Return a request with a chunk for each byte of its body."""
    head = header("POST", FACTS, [JSON], 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert b"chunked" in head
    return head + b"".join([b"1\r\n%c\r\n" % byte for byte in body]) + b"0\r\n\r\n"


def test_a_read_with_many_chunks_is_processed_in_parts(connection: Connection) -> None:
    """A read of tiny chunks takes a fifth of a second: with twenty such connections, nothing else was done."""
    request = chunked(BODY + b" " * 2_000)
    connection.client.send(request + request)
    assert connection.site.in_parts == 1
    turns = 0
    while connection.site.in_parts:
        connection.turn()
        connection.clock.rightNow += PAUSE
        turns += 1
        assert turns < 100
    assert turns >= 2 * len(request) // PART - 1
    connection.clock.advance(PAUSE)
    assert connection.codes() == (200, 200)
    connection.client.send(HEAD + BODY)
    assert connection.codes() == (200, 200, 200)


def test_connections_with_parts_share_the_time(connection: Connection) -> None:
    other = Client(connection.site)
    connection.client.send(chunked(BODY + b" " * 2_000))
    other.send(chunked(BODY + b" " * 2_000))
    assert connection.site.in_parts == 2
    connection.clock.advance(0)
    connection.clock.advance(PAUSE / 2)
    assert min(each.getTime() for each in connection.clock.calls) > connection.clock.seconds()  # both rest
    connection.client.protocol.connectionLost(GONE)
    assert connection.site.in_parts == 1
    for _ in range(100):
        connection.clock.advance(PAUSE)
    assert connection.site.in_parts == 0
    assert b" 200 " in other.transport.value()


def test_a_length_that_python_cannot_read_is_answered(connection: Connection) -> None:
    """Python reads no integer of more than 4,300 digits; the error was logged with a traceback."""
    with logged(LogLevel.warn) as lines:
        connection.client.send(HEAD.replace(b"Content-Length: ", b"Content-Length: " + b"9" * 5000))
    assert connection.client.transport.value().startswith(b"HTTP/1.1 400 ")
    assert connection.closed
    assert lines == []


def test_a_time_of_zero_is_no_limit() -> None:
    connection = Connection(Bounds(header_timeout=0, body_timeout=0))
    assert connection.trickle(HEAD + BODY, 50) == len(HEAD + BODY)
    assert read_answer(connection.client.transport.value()).code == 200


def test_connections_are_counted_and_refused_beyond_the_bound() -> None:
    connection = Connection(Bounds(max_connections=2))
    second = Client(connection.site)
    assert connection.site.buildProtocol(ELSEWHERE) is None
    metrics = shown_metrics(connection.site.resource.samples())
    assert metrics["http_connections"] == 2
    assert metrics["connections_refused_total socket=http bound=max_connections"] == 1
    second.protocol.connectionLost(GONE)
    assert connection.site.buildProtocol(ELSEWHERE) is not None


def requests_of(data: bytes, *, whole: bool) -> bytes:
    """Return the answer to a request that arrives in one read, or byte by byte."""
    connection = Connection()
    for part in [data] if whole else [bytes([byte]) for byte in data]:
        connection.client.send(part)
        connection.clock.advance(0)
    return re.sub(rb"Date: [^\r]*", b"Date:", connection.client.transport.value())


@pytest.mark.parametrize(
    "data",
    [
        HEAD + BODY,
        header("GET", FACTS),
        header("HEAD", "/health/live"),
        header("GET", "/health/live", [("Connection", "close")]),
        header("POST", FACTS, [JSON, ("Expect", "100-continue")], len(BODY)) + BODY,
        header("POST", FACTS, [("Content-Type", "text/plain")], len(BODY)) + BODY,
        header("GET", "/health/live").replace(b"1.1", b"1.0"),
        header("OPTIONS", "*"),
        HEAD.replace(b"localhost", b"evil.example") + BODY,
        HEAD + BODY + header("GET", "/v1/streams/none"),
    ],
)
def test_a_request_in_one_read_is_answered_as_one_byte_by_byte(data: bytes) -> None:
    answer = requests_of(data, whole=True)
    assert answer.startswith(b"HTTP/1.")
    assert answer == requests_of(data, whole=False)


def test_an_answer_has_the_lines_of_twisted() -> None:
    answer = requests_of(HEAD + BODY, whole=True)
    assert answer == (
        b"HTTP/1.1 200 OK\r\nServer: %b\r\nDate:\r\nContent-Length: 11\r\nContent-Type: application/json\r\n"
        b'Cache-Control: no-store\r\n\r\n{"ids":[2]}' % version
    )


def channel_over(socket: Socket) -> Channel:
    channel = Channel()
    channel.transport = cast("Any", socket)
    return channel


def test_an_answer_is_sent_at_once() -> None:
    socket = Socket(room=100)
    channel_over(socket).send(b"answer")
    assert socket.sent == b"answer"
    assert not socket.waits


def test_what_has_no_room_is_sent_later_and_in_order() -> None:
    socket = Socket(room=4)
    channel = channel_over(socket)
    channel.send(b"answer")
    channel.send(b"next")
    assert socket.sent == b"answ"
    assert socket.waits
    while socket.waits:
        socket.doWrite()
    assert socket.sent == b"answernext"
