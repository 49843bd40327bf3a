"""``replication tail``: whole facts, each once, in order, also over several connections."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from twisted.internet import error
from twisted.internet.defer import Deferred
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.cli import tail
from replication.cli.fact_lines import encode_json, encode_rdata, encode_typed
from replication.cli.tail import Tail, TailError, read_start
from replication.errors import CatchUpError, ConfigError
from replication.storage.contract import facts_gone
from replication.streams.facts import Fact
from replication.streams.history import UNKNOWN_HISTORY
from replication.streams.interfaces import Page
from replication.web.response import NotAllowedError
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts)


def test_without_an_endpoint_it_follows_the_default_port() -> None:
    assert tail.make_parser().parse_args([]).endpoint == "tcp:127.0.0.1:9092"


def test_a_redis_is_refused_with_the_cure_and_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tail.main(["redis://us:secret@127.0.0.1:6379"])
    shown = capsys.readouterr().err
    assert (ended.value.code, "secret" in shown) == (2, False)
    assert "replication tail: tail follows no Redis: start a worker that follows it" in shown


def refuse(client: Any) -> None:
    """Let an attempt to connect, as MemoryReactor keeps it, fail."""
    client[2].clientConnectionFailed(None, Failure(error.ConnectionRefusedError()))


class FakeSource:
    """An ICatchUp that answers when the test calls ``answer``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int, int]] = []
        self.answers: list[Deferred[Page]] = []

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        self.asked.append((stream, writer, after, upto))
        answer: Deferred[Page] = Deferred()
        self.answers.append(answer)
        return await answer

    def answer(self, upto: int, *facts: Fact, limited: bool = False) -> None:
        self.answers.pop(0).callback(Page(facts, Token(upto), limited))


class Reactor(MemoryReactorClock):
    """A reactor that runs at once, and counts calls of ``stop``."""

    def __init__(self) -> None:
        super().__init__()
        self.running = True
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


class TailTests(SynchronousTestCase):
    """The output, and the end."""

    def setUp(self) -> None:
        self.reactor = Reactor()
        self.source = FakeSource()
        self.stderr = io.StringIO()
        self.patch(sys, "stderr", self.stderr)
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.addCleanup(self.close_pipe)

    def close_pipe(self) -> None:
        for each in (self.reader, self.writer):
            try:
                os.close(each)
            except OSError:
                continue  # the test has closed it

    def tail(
        self,
        *streams: str,
        start: int | None = None,
        encode: Callable[[StreamName, InstanceName, Sequence[Fact]], bytes] = encode_rdata,
        with_source: bool = True,
        access_tokens: bool = False,
    ) -> Tail:
        """Start to follow."""
        made = Tail(
            self.reactor,
            "tcp:127.0.0.1:9092",
            streams=[StreamName(each) for each in streams],
            after=None if start is None else Token(start),
            source=self.source if with_source else None,
            encode=encode,
            access_tokens=access_tokens,
            output=self.writer,
        )
        made.start()
        self.addCleanup(made.stop)
        return made

    def connect(self, *lines: str, server: str = "example.com") -> Any:
        """Let the latest attempt to connect succeed, and send it ``lines`` after SERVER."""
        protocol = self.dial()
        self.send(protocol, f"SERVER {server}", *lines)
        return protocol

    def dial(self) -> Any:
        """Let the latest attempt to connect succeed, and send nothing."""
        factory: Any = self.reactor.tcpClients[-1][2]
        protocol = factory.buildProtocol(None)
        self.transport = StringTransport()
        protocol.makeConnection(self.transport)
        return protocol

    def send(self, protocol: Any, *lines: str) -> None:
        protocol.dataReceived("".join(f"{line}\n" for line in lines).encode())

    def lose(self, protocol: Any) -> None:
        """Cut the connection, and wait until the next one is attempted."""
        attempts = len(self.reactor.tcpClients)
        protocol.connectionLost(Failure(error.ConnectionDone()))
        self.reactor.pump([0.5] * 20)
        assert len(self.reactor.tcpClients) > attempts

    def printed(self) -> list[str]:
        try:
            return os.read(self.reader, 1_000_000).decode().splitlines()
        except BlockingIOError:
            return []

    def test_live_rows_are_printed_unchanged_whatever_the_server_name(self) -> None:
        self.tail()
        peer = self.connect("POSITION orders master 5 5", server="any.name")
        self.send(
            peer, 'RDATA orders master batch ["a", 1]', 'RDATA orders master 7 {"b":2}', "RDATA orders master 9 3"
        )
        self.assertEqual(
            self.printed(),
            ['RDATA orders master batch ["a", 1]', 'RDATA orders master 7 {"b":2}', "RDATA orders master 9 3"],
        )
        self.assertEqual(self.source.asked, [])

    def test_json_is_an_object_per_row(self) -> None:
        self.tail(encode=encode_json)
        peer = self.connect("POSITION orders master 5 5")
        self.send(peer, 'RDATA orders master batch ["a"]', "RDATA orders master 7 null")
        self.assertEqual(
            self.printed(),
            [
                '{"stream":"orders","instance":"master","token":7,"row":["a"]}',
                '{"stream":"orders","instance":"master","token":7,"row":null}',
            ],
        )

    def test_rows_of_all_releases_of_synapse_have_field_names(self) -> None:
        old, new = '["!r","m.read","@u","$e",{"ts":1}]', '["!r","m.read","@u","$e",null,{"ts":1}]'
        for row, fields in ((old, ""), (new, "thread_id=None, ")):
            self.tail(encode=encode_typed)
            self.send(self.connect("POSITION receipts master 5 5"), f"RDATA receipts master 7 {row}")
            shown = f"room_id='!r', receipt_type='m.read', user_id='@u', event_id='$e', {fields}data={{'ts': 1}}"
            self.assertEqual(self.printed(), [f"receipts master 7 ReceiptRow({shown})"])

    def test_access_tokens_are_printed_only_if_they_are_asked_for(self) -> None:
        row = 'RDATA caches master 7 ["get_user_by_access_token",["syt_1"],5]'
        for shown, line in ((False, row.replace('["syt_1"]', "null")), (True, row)):
            self.tail(access_tokens=shown)
            self.send(self.connect("POSITION caches master 5 5"), row)
            self.assertEqual(self.printed(), [line])

    def test_half_a_fact_is_not_printed(self) -> None:
        self.tail()
        peer = self.connect("POSITION orders master 5 5")
        self.send(peer, "RDATA orders master batch 1")
        self.assertEqual(self.printed(), [])

    def test_only_the_streams_of_the_options_are_printed(self) -> None:
        """A Synapse sends all streams, whatever stands in REPLICATE."""
        self.tail("orders")
        peer = self.connect("POSITION orders master 5 5", "POSITION caches master 5 5")
        self.assertIn(b"REPLICATE orders\n", self.transport.value())
        self.send(peer, "RDATA caches master 6 1", "RDATA orders master 6 2")
        self.assertEqual(self.printed(), ["RDATA orders master 6 2"])

    def test_from_the_beginning_it_catches_up_first_and_goes_on_live(self) -> None:
        """Live facts that arrive meanwhile are printed after the fetched ones; a fact that arrives twice, once."""
        self.tail(start=0)
        peer = self.connect("POSITION orders master 5 5")
        self.assertEqual(self.source.asked, [("orders", "master", 0, 5)])
        self.send(peer, "RDATA orders master 6 6")
        self.source.answer(3, fact(2, "2"), fact(3, "3a", "3b"), limited=True)
        self.assertEqual(self.source.asked[1:], [("orders", "master", 3, 5)])
        self.source.answer(5, fact(5, "5"))
        self.send(peer, "RDATA orders master 6 6", "RDATA orders master 7 7")
        self.assertEqual(
            self.printed(),
            [
                "RDATA orders master 2 2",
                "RDATA orders master batch 3a",
                "RDATA orders master 3 3b",
                "RDATA orders master 5 5",
                "RDATA orders master 6 6",
                "RDATA orders master 7 7",
            ],
        )

    def test_facts_missed_between_two_connections_are_fetched(self) -> None:
        self.tail()
        peer = self.connect("POSITION orders master 5 5")
        self.send(peer, "RDATA orders master 6 6", "RDATA orders master batch 7a")
        self.lose(peer)
        self.connect("POSITION orders master 9 9", "RDATA orders master 10 10")
        self.assertEqual(self.source.asked, [("orders", "master", 6, 9)])
        self.source.answer(9, fact(7, "7a", "7b"))
        self.assertEqual(
            self.printed(),
            [
                "RDATA orders master 6 6",
                "RDATA orders master batch 7a",
                "RDATA orders master 7 7b",
                "RDATA orders master 10 10",
            ],
        )

    def test_a_fetch_that_fails_is_reported_once_and_retried(self) -> None:
        self.tail(start=0)
        self.connect("POSITION orders master 5 5")
        for _ in range(3):
            self.source.answers.pop(0).errback(CatchUpError("http://h: 503: busy"))
            self.assertEqual(self.source.answers, [])
            self.reactor.pump([1.0] * 6)
        self.source.answer(5, fact(2, "2"))
        self.assertEqual(self.printed(), ["RDATA orders master 2 2"])
        output = self.stderr.getvalue()
        self.assertEqual(output, "replication tail: orders of master waits at 0: http://h: 503: busy; retrying\n")

    def test_facts_that_are_gone_are_reported_and_the_rest_is_printed(self) -> None:
        self.tail(start=0)
        self.connect("POSITION orders master 5 5")
        self.source.answers.pop(0).errback(facts_gone(StreamName("orders"), InstanceName("master"), Token(3)))
        self.source.answer(5, fact(5, "5"))
        self.assertEqual(self.printed(), ["RDATA orders master 5 5"])
        output = self.stderr.getvalue()
        self.assertEqual(
            output, "replication tail: orders of master: facts after 0 up to 3 are gone; printing from there\n"
        )

    def test_a_gap_without_http_is_reported_and_skipped(self) -> None:
        self.tail(with_source=False)
        peer = self.connect("POSITION orders master 5 5")
        self.lose(peer)
        self.connect("POSITION orders master 9 9", "RDATA orders master 10 10")
        self.assertEqual(self.printed(), ["RDATA orders master 10 10"])
        self.assertIn("orders of master: (5, 9] was missed; give --http URL", self.stderr.getvalue())

    def test_a_writer_that_went_back_is_reported_and_followed(self) -> None:
        self.tail()
        self.lose(self.connect("POSITION orders master 9 9"))
        peer = self.connect("POSITION orders master 5 5")
        self.send(peer, "RDATA orders master 6 6")
        self.assertEqual(self.printed(), ["RDATA orders master 6 6"])
        self.assertIn("orders of master went back from 9 to 5", self.stderr.getvalue())

    def test_a_restored_writer_that_has_passed_the_position_is_followed_from_the_end_of_its_backup(self) -> None:
        self.tail()
        peer = self.greeted("POSITION orders master 6 6", 'RDATA orders master 7 "lost"')
        self.answer_pings(peer, '[1,[["first",1,1]]]')
        self.lose(peer)
        peer = self.greeted("POSITION orders master 9 9")
        self.answer_pings(peer, '[2,[["first",1,1],["second",6,6]]]')
        self.assertEqual(self.source.asked, [("orders", "master", 6, 9)])
        self.source.answer(9, fact(7, '"new"'), fact(9, "9"))
        expected = ['RDATA orders master 7 "lost"', 'RDATA orders master 7 "new"', "RDATA orders master 9 9"]
        self.assertEqual(self.printed(), expected)
        self.assertIn("orders of master went back from 7 to 6; following from there", self.stderr.getvalue())

    def test_a_history_that_cannot_be_read_is_reported_and_requested_again(self) -> None:
        self.tail()
        peer = self.greeted("POSITION orders master 6 6", "RDATA orders master 7 7")
        self.answer_pings(peer, '[1,[["first",1,1]]]')
        self.lose(peer)
        peer = self.greeted("POSITION orders master 7 7", "RDATA orders master 8 8")
        self.answer_pings(peer, UNKNOWN_HISTORY)
        self.assertEqual(self.printed(), ["RDATA orders master 7 7"])
        self.assertIn("orders of master: the process at tcp:127.0.0.1:9092 cannot", self.stderr.getvalue())
        self.reactor.advance(0.5)
        self.answer_pings(peer, '[1,[["first",1,1]]]')
        self.assertEqual(self.printed(), ["RDATA orders master 8 8"])

    def greeted(self, *lines: str) -> Any:
        """Let the latest attempt to connect succeed; the other end sends PINGs back."""
        return self.connect("PING 1 echo", *lines)

    def answer_pings(self, peer: Any, history: str) -> None:
        """Send back each PING of ``peer``; one that requests a history receives ``history``."""
        while pings := [line for line in self.transport.value().decode().splitlines() if line.startswith("PING echo")]:
            self.transport.clear()
            for each in pings:
                self.send(peer, f"{each} {history}" if " orders " in each else each)

    def test_a_stream_that_has_not_reached_the_token_is_followed_from_its_position(self) -> None:
        self.tail(start=3)
        peer = self.connect("POSITION caches master 1 1", "POSITION orders master 5 5")
        self.assertEqual(self.source.asked, [("orders", "master", 3, 5)])
        self.send(peer, "RDATA caches master 2 2")
        self.assertEqual(self.printed(), ["RDATA caches master 2 2"])
        self.assertEqual(self.stderr.getvalue(), "")

    def test_a_token_beyond_every_stream_is_reported_with_the_largest_position(self) -> None:
        self.tail(start=9)
        self.connect("POSITION caches master 1 1", "POSITION orders master 5 5")
        self.reactor.pump([1.0] * 5)
        self.assertEqual(
            self.stderr.getvalue(),
            "replication tail: --from 9 is beyond orders of master, which is at 5: printing from there\n",
        )

    def test_a_token_beyond_a_stream_that_was_asked_for_is_reported(self) -> None:
        self.tail("caches", "orders", start=3)
        self.connect("POSITION caches master 1 1", "POSITION orders master 5 5")
        self.reactor.pump([1.0] * 5)
        self.assertIn("--from 3 is beyond caches of master, which is at 1", self.stderr.getvalue())
        self.assertNotIn("orders", self.stderr.getvalue())

    def test_each_stream_that_fails_is_reported_once_whatever_range_is_fetched(self) -> None:
        self.tail(start=0)
        peer = self.connect("POSITION orders master 5 5", "POSITION caches master 5 5")
        for token in range(6, 10):
            for answer in self.source.answers:
                answer.errback(CatchUpError(f"http://h/u?upto={token}: HTTP 503: busy"))
            self.source.answers.clear()
            self.send(peer, f"RDATA orders master {token} 1")
            self.reactor.pump([1.0] * 6)
        self.assertEqual(
            [line.split()[2] for line in self.stderr.getvalue().splitlines()], ["orders", "caches"], "each once"
        )

    def test_trouble_after_a_success_is_reported_again(self) -> None:
        self.tail(start=0)
        self.connect("POSITION orders master 5 5")
        for _ in range(2):
            self.source.answers.pop(0).errback(CatchUpError("busy"))
            self.reactor.pump([1.0] * 6)
            self.source.answer(3, limited=True)
        self.assertEqual(self.stderr.getvalue().count("busy"), 2)

    def test_a_refused_secret_is_not_tried_again(self) -> None:
        made = self.tail(start=0)
        self.connect("POSITION orders master 5 5")
        self.source.answers.pop(0).errback(NotAllowedError("http://h: HTTP 401: the secret is missing"))
        self.reactor.pump([1.0] * 10)
        self.assertEqual(self.reactor.stops, 1)
        self.assertEqual(str(made._error), "http://h: HTTP 401: the secret is missing")
        self.assertEqual(self.source.answers, [])

    def test_a_stream_that_the_writer_does_not_have_is_reported_once_and_awaited(self) -> None:
        self.tail("nosuch", "orders")
        self.lose(self.connect("POSITION orders master 5 5"))
        peer = self.connect("POSITION orders master 5 5")
        self.reactor.pump([1.0] * 5)
        self.assertEqual(
            self.stderr.getvalue(),
            "replication tail: the writer at tcp:127.0.0.1:9092 has no stream 'nosuch'; waiting for it\n",
        )
        self.send(peer, "POSITION nosuch master 1 1", "RDATA nosuch master 2 2")
        self.assertEqual(self.printed(), ["RDATA nosuch master 2 2"])

    def test_a_full_disk_ends_it_with_a_clear_message(self) -> None:
        with open("/dev/full", "wb") as full:  # noqa: PTH123
            os.dup2(full.fileno(), self.writer)
        made = self.tail()
        self.send(self.connect("POSITION orders master 5 5"), "RDATA orders master 6 6")
        self.assertEqual(self.reactor.stops, 1)
        self.assertEqual(str(made._error), "cannot write to standard output: No space left on device")

    def test_an_http_port_ends_it_with_a_clear_message(self) -> None:
        made = self.tail()
        self.dial().dataReceived(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        self.assertEqual(self.reactor.stops, 1)
        assert made._error is not None
        self.assertIn("tcp:127.0.0.1:9092 is an HTTP port", str(made._error))

    def test_a_redis_ends_it_with_a_clear_message(self) -> None:
        """It answers each line with an error, and the tail connected again for ever."""
        made = self.tail()
        self.dial().dataReceived(b"-NOAUTH Authentication required.\r\n")
        self.assertEqual(self.reactor.stops, 1)
        why = "tcp:127.0.0.1:9092 looks like a Redis: tail follows no Redis: start a worker that follows it"
        self.assertIn(why, str(made._error))
        self.assertEqual(self.stderr.getvalue(), "")

    def test_a_silent_peer_is_sent_blank_lines_because_a_web_server_waits_for_the_end_of_a_request(self) -> None:
        self.tail()
        self.dial()
        self.assertNotIn(b"\r", self.transport.value())
        self.reactor.pump([1.0] * 4)
        self.assertEqual(self.transport.value().count(b"\r\n"), 2)

    def test_a_writer_is_sent_no_blank_lines(self) -> None:
        """Blank lines end the connection of an old Synapse (docs/protocol/traps.md 1)."""
        self.tail()
        self.connect()
        self.reactor.pump([1.0] * 4)
        self.assertNotIn(b"\r", self.transport.value())

    def test_a_writer_that_does_not_answer_is_reported_once_and_given_up_after_a_minute(self) -> None:
        made = self.tail()
        refused = 0
        while not self.reactor.stops:
            for client in self.reactor.tcpClients[refused:]:
                refused += 1
                refuse(client)
            self.reactor.advance(0.5)
        self.assertGreater(refused, 5)
        self.assertEqual(
            self.stderr.getvalue(),
            "replication tail: cannot connect to tcp:127.0.0.1:9092: Connection was refused by other side; retrying\n",
        )
        self.assertGreaterEqual(self.reactor.seconds(), tail.PATIENCE)
        self.assertIn("no writer answers at tcp:127.0.0.1:9092", str(made._error))

    def test_a_connection_after_a_reported_failure_is_reported(self) -> None:
        self.tail()
        for _ in range(2):
            refuse(self.reactor.tcpClients[-1])
            self.reactor.pump([1.0] * 4)
            self.lose(self.connect("POSITION orders master 5 5"))
            self.reactor.pump([1.0] * 4)
        self.assertEqual(
            [line.split(" tcp")[0] for line in self.stderr.getvalue().splitlines()],
            ["replication tail: cannot connect to", "replication tail: connected to"] * 2,
        )

    def test_a_connection_without_a_failure_before_it_is_not_reported(self) -> None:
        self.tail()
        self.lose(self.connect("POSITION orders master 5 5"))
        self.connect("POSITION orders master 5 5")
        self.assertEqual(self.stderr.getvalue(), "")

    def test_a_writer_that_has_answered_once_is_awaited_without_end(self) -> None:
        self.tail()
        self.lose(self.connect("POSITION orders master 5 5"))
        self.reactor.pump([1.0] * 300)
        self.assertEqual(self.reactor.stops, 0)

    def test_a_closed_output_ends_it_without_an_error_while_no_fact_arrives(self) -> None:
        made = self.tail()
        self.connect("POSITION orders master 5 5")
        os.close(self.reader)
        self.reactor.advance(tail.POLL_INTERVAL)
        self.assertEqual(self.reactor.stops, 1)
        self.assertIsNone(made._error)

    def test_a_closed_output_ends_it_without_an_error_when_a_fact_arrives(self) -> None:
        made = self.tail()
        peer = self.connect("POSITION orders master 5 5")
        os.close(self.reader)
        self.send(peer, "RDATA orders master 6 6", "RDATA orders master 7 7")
        self.assertEqual(self.reactor.stops, 1)
        self.assertIsNone(made._error)


class RunTests(SynchronousTestCase):
    """``run`` runs the reactor, and returns or raises."""

    def test_warnings_of_the_connection_go_to_standard_error_and_an_error_is_raised(self) -> None:
        stderr = io.StringIO()
        self.patch(sys, "stderr", stderr)

        class Running(MemoryReactorClock):
            def run(self) -> None:
                super().run()
                refuse(self.tcpClients[0])
                made._end(TailError("enough"))

        made = Tail(
            Running(), "tcp:127.0.0.1:1", streams=[], after=None, source=FakeSource(), encode=encode_rdata, output=1
        )
        self.assertRaises(TailError, made.run)
        self.assertIn("replication tail: cannot connect to tcp:127.0.0.1:1: ", stderr.getvalue())
        made.stop()

    def test_a_stopped_reactor_is_status_0(self) -> None:
        reactor = MemoryReactorClock()
        made = Tail(reactor, "tcp:a:1", streams=[], after=None, source=FakeSource(), encode=encode_rdata, output=1)
        self.assertEqual(made.run(), 0)
        made.stop()


@pytest.mark.parametrize(("text", "token"), [(None, None), ("beginning", 0), ("0", 0), ("59", 59)])
def test_from_takes_a_token_or_beginning(text: str | None, token: int | None) -> None:
    assert read_start(text) == token


@pytest.mark.parametrize("text", ["", "-1", "1_0", "end", "٣"])
def test_from_takes_no_other_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--from takes a token or `beginning`"):
        read_start(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["9092"],
        ["tcq:localhost:9092"],
        ["tcp:h:1", "--from", "now"],
        ["unix:/w.sock", "--from", "beginning"],
        ["tcp:h:1", "--http", "h:2"],
        ["tcp:h:1", "--stream", "a b"],
        ["tcp:h:1", "--secret-file", "/no/such/file"],
    ],
)
def test_wrong_options_are_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tail.main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
