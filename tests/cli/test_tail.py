"""``replication tail``: whole facts, each once, in order, over as many connections as it takes."""

from __future__ import annotations

import io
import json
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
from replication.cli.tail import Tail, TailError, read_start, spell_json, spell_rdata, spell_typed
from replication.errors import CatchUpError, ConfigError
from replication.streams.facts import Fact
from replication.streams.seams import Page
from replication.web.client import NotAllowedError
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.synapse.recorded import lines_of, recorded_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts)


def refuse(client: Any) -> None:
    """Let an attempt to connect, as MemoryReactor keeps it, fail."""
    client[2].clientConnectionFailed(None, Failure(error.ConnectionRefusedError()))


class FakeSource:
    """An ICatchUp that answers when the test says so."""

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
    """A reactor that runs from the beginning, and counts who stops it."""

    def __init__(self) -> None:
        super().__init__()
        self.running = True
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


class TailTests(SynchronousTestCase):
    """What is printed, and when it ends."""

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
        spell: Callable[[StreamName, InstanceName, Sequence[Fact]], bytes] = spell_rdata,
        with_source: bool = True,
    ) -> Tail:
        """Start to follow."""
        made = Tail(
            self.reactor,
            "tcp:127.0.0.1:9092",
            streams=[StreamName(each) for each in streams],
            start=None if start is None else Token(start),
            source=self.source if with_source else None,
            spell=spell,
            output=self.writer,
        )
        made.start()
        self.addCleanup(made.stop)
        return made

    def connect(self, *lines: str, server: str = "example.com") -> Any:
        """Let the latest attempt to connect succeed, and say ``lines`` to it after SERVER."""
        protocol = self.dial()
        self.say(protocol, f"SERVER {server}", *lines)
        return protocol

    def dial(self) -> Any:
        """Let the latest attempt to connect succeed, with nothing said."""
        factory: Any = self.reactor.tcpClients[-1][2]
        protocol = factory.buildProtocol(None)
        self.transport = StringTransport()
        protocol.makeConnection(self.transport)
        return protocol

    def say(self, protocol: Any, *lines: str) -> None:
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

    def test_live_rows_are_printed_as_they_came_whatever_the_server_is_called(self) -> None:
        self.tail()
        peer = self.connect("POSITION orders master 5 5", server="any.name")
        self.say(peer, 'RDATA orders master batch ["a", 1]', 'RDATA orders master 7 {"b":2}', "RDATA orders master 9 3")
        self.assertEqual(
            self.printed(),
            ['RDATA orders master batch ["a", 1]', 'RDATA orders master 7 {"b":2}', "RDATA orders master 9 3"],
        )
        self.assertEqual(self.source.asked, [])

    def test_json_is_an_object_per_row(self) -> None:
        self.tail(spell=spell_json)
        peer = self.connect("POSITION orders master 5 5")
        self.say(peer, 'RDATA orders master batch ["a"]', "RDATA orders master 7 null")
        self.assertEqual(
            self.printed(),
            [
                '{"stream":"orders","instance":"master","token":7,"row":["a"]}',
                '{"stream":"orders","instance":"master","token":7,"row":null}',
            ],
        )

    def test_half_a_fact_is_not_printed(self) -> None:
        self.tail()
        peer = self.connect("POSITION orders master 5 5")
        self.say(peer, "RDATA orders master batch 1")
        self.assertEqual(self.printed(), [])

    def test_only_the_streams_that_were_asked_for(self) -> None:
        """A Synapse sends all of them whatever REPLICATE says."""
        self.tail("orders")
        peer = self.connect("POSITION orders master 5 5", "POSITION caches master 5 5")
        self.assertIn(b"REPLICATE orders\n", self.transport.value())
        self.say(peer, "RDATA caches master 6 1", "RDATA orders master 6 2")
        self.assertEqual(self.printed(), ["RDATA orders master 6 2"])

    def test_from_the_beginning_it_catches_up_first_and_goes_on_live(self) -> None:
        """What comes live meanwhile waits its turn; what comes twice is printed once."""
        self.tail(start=0)
        peer = self.connect("POSITION orders master 5 5")
        self.assertEqual(self.source.asked, [("orders", "master", 0, 5)])
        self.say(peer, "RDATA orders master 6 6")
        self.source.answer(3, fact(2, "2"), fact(3, "3a", "3b"), limited=True)
        self.assertEqual(self.source.asked[1:], [("orders", "master", 3, 5)])
        self.source.answer(5, fact(5, "5"))
        self.say(peer, "RDATA orders master 6 6", "RDATA orders master 7 7")
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

    def test_what_was_missed_between_two_connections_is_fetched(self) -> None:
        self.tail()
        peer = self.connect("POSITION orders master 5 5")
        self.say(peer, "RDATA orders master 6 6", "RDATA orders master batch 7a")
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

    def test_a_fetch_that_fails_is_told_once_and_tried_again(self) -> None:
        self.tail(start=0)
        self.connect("POSITION orders master 5 5")
        for _ in range(3):
            self.source.answers.pop(0).errback(CatchUpError("http://h: 503: busy"))
            self.assertEqual(self.source.answers, [])
            self.reactor.pump([1.0] * 6)
        self.source.answer(5, fact(2, "2"))
        self.assertEqual(self.printed(), ["RDATA orders master 2 2"])
        said = self.stderr.getvalue()
        self.assertEqual(said, "replication tail: orders of master waits at 0: http://h: 503: busy; trying again\n")

    def test_a_gap_without_http_is_told_and_passed(self) -> None:
        self.tail(with_source=False)
        peer = self.connect("POSITION orders master 5 5")
        self.lose(peer)
        self.connect("POSITION orders master 9 9", "RDATA orders master 10 10")
        self.assertEqual(self.printed(), ["RDATA orders master 10 10"])
        self.assertIn("orders of master: (5, 9] was missed; say --http URL", self.stderr.getvalue())

    def test_a_writer_that_went_back_is_told_and_followed(self) -> None:
        self.tail()
        self.lose(self.connect("POSITION orders master 9 9"))
        peer = self.connect("POSITION orders master 5 5")
        self.say(peer, "RDATA orders master 6 6")
        self.assertEqual(self.printed(), ["RDATA orders master 6 6"])
        self.assertIn("orders of master went back from 9 to 5", self.stderr.getvalue())

    def test_a_stream_that_has_not_got_as_far_as_the_token_is_followed_from_where_it_is(self) -> None:
        self.tail(start=3)
        peer = self.connect("POSITION caches master 1 1", "POSITION orders master 5 5")
        self.assertEqual(self.source.asked, [("orders", "master", 3, 5)])
        self.say(peer, "RDATA caches master 2 2")
        self.assertEqual(self.printed(), ["RDATA caches master 2 2"])
        self.assertEqual(self.stderr.getvalue(), "")

    def test_several_streams_that_fail_are_each_told_once_however_far_is_asked_for(self) -> None:
        self.tail(start=0)
        peer = self.connect("POSITION orders master 5 5", "POSITION caches master 5 5")
        for token in range(6, 10):
            for answer in self.source.answers:
                answer.errback(CatchUpError(f"http://h/u?upto={token}: HTTP 503: busy"))
            self.source.answers.clear()
            self.say(peer, f"RDATA orders master {token} 1")
            self.reactor.pump([1.0] * 6)
        self.assertEqual(
            [line.split()[2] for line in self.stderr.getvalue().splitlines()], ["orders", "caches"], "each once"
        )

    def test_trouble_after_things_worked_is_told_again(self) -> None:
        self.tail(start=0)
        self.connect("POSITION orders master 5 5")
        for _ in range(2):
            self.source.answers.pop(0).errback(CatchUpError("busy"))
            self.reactor.pump([1.0] * 6)
            self.source.answer(3, limited=True)
        self.assertEqual(self.stderr.getvalue().count("busy"), 2)

    def test_who_is_not_let_in_does_not_knock_again(self) -> None:
        made = self.tail(start=0)
        self.connect("POSITION orders master 5 5")
        self.source.answers.pop(0).errback(NotAllowedError("http://h: HTTP 401: the secret is missing"))
        self.reactor.pump([1.0] * 10)
        self.assertEqual(self.reactor.stops, 1)
        self.assertEqual(str(made._error), "http://h: HTTP 401: the secret is missing")
        self.assertEqual(self.source.answers, [])

    def test_a_stream_that_the_writer_does_not_have_is_told_once_and_waited_for(self) -> None:
        self.tail("nosuch", "orders")
        self.lose(self.connect("POSITION orders master 5 5"))
        peer = self.connect("POSITION orders master 5 5")
        self.reactor.pump([1.0] * 5)
        self.assertEqual(
            self.stderr.getvalue(),
            "replication tail: the writer at tcp:127.0.0.1:9092 has no stream 'nosuch'; waiting for it\n",
        )
        self.say(peer, "POSITION nosuch master 1 1", "RDATA nosuch master 2 2")
        self.assertEqual(self.printed(), ["RDATA nosuch master 2 2"])

    def test_a_full_disk_ends_it_with_a_clear_message(self) -> None:
        with open("/dev/full", "wb") as full:  # noqa: PTH123
            os.dup2(full.fileno(), self.writer)
        made = self.tail()
        self.say(self.connect("POSITION orders master 5 5"), "RDATA orders master 6 6")
        self.assertEqual(self.reactor.stops, 1)
        self.assertEqual(str(made._error), "cannot write to standard output: No space left on device")

    def test_an_http_port_dialled_by_mistake_ends_it_with_a_clear_message(self) -> None:
        made = self.tail()
        self.dial().dataReceived(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        self.assertEqual(self.reactor.stops, 1)
        assert made._error is not None
        self.assertIn("tcp:127.0.0.1:9092 is an HTTP port", str(made._error))

    def test_a_silent_peer_is_provoked_because_a_web_server_waits_for_the_end_of_our_request(self) -> None:
        self.tail()
        self.dial()
        self.assertNotIn(b"\r", self.transport.value())
        self.reactor.pump([1.0] * 4)
        self.assertEqual(self.transport.value().count(b"\r\n"), 2)

    def test_a_writer_is_not_provoked(self) -> None:
        """Blank lines end the connection of an old Synapse (trap 1)."""
        self.tail()
        self.connect()
        self.reactor.pump([1.0] * 4)
        self.assertNotIn(b"\r", self.transport.value())

    def test_a_writer_that_is_away_is_told_once_and_given_up_after_a_minute(self) -> None:
        made = self.tail()
        refused = 0
        while not self.reactor.stops:
            for client in self.reactor.tcpClients[refused:]:
                refused += 1
                refuse(client)
            self.reactor.advance(0.5)
        self.assertGreater(refused, 5)
        self.assertEqual(self.stderr.getvalue(), "")
        self.assertGreaterEqual(self.reactor.seconds(), tail.PATIENCE)
        self.assertIn("no writer answers at tcp:127.0.0.1:9092", str(made._error))

    def test_a_writer_that_was_there_is_waited_for_without_end(self) -> None:
        self.tail()
        self.lose(self.connect("POSITION orders master 5 5"))
        self.reactor.pump([1.0] * 300)
        self.assertEqual(self.reactor.stops, 0)

    def test_a_closed_output_ends_it_in_peace_though_nothing_comes(self) -> None:
        made = self.tail()
        self.connect("POSITION orders master 5 5")
        os.close(self.reader)
        self.reactor.advance(tail.LOOK_EVERY)
        self.assertEqual(self.reactor.stops, 1)
        self.assertIsNone(made._error)

    def test_a_closed_output_ends_it_in_peace_when_something_comes(self) -> None:
        made = self.tail()
        peer = self.connect("POSITION orders master 5 5")
        os.close(self.reader)
        self.say(peer, "RDATA orders master 6 6", "RDATA orders master 7 7")
        self.assertEqual(self.reactor.stops, 1)
        self.assertIsNone(made._error)


class RunTests(SynchronousTestCase):
    """``run`` gives the reactor its work, and says how it ended."""

    def test_the_link_has_its_say_on_standard_error_and_an_error_comes_out(self) -> None:
        stderr = io.StringIO()
        self.patch(sys, "stderr", stderr)

        class Running(MemoryReactorClock):
            def run(self) -> None:
                super().run()
                refuse(self.tcpClients[0])
                made._end(TailError("enough"))

        made = Tail(
            Running(), "tcp:127.0.0.1:1", streams=[], start=None, source=FakeSource(), spell=spell_rdata, output=1
        )
        self.assertRaises(TailError, made.run)
        self.assertIn("replication tail: cannot connect to tcp:127.0.0.1:1: ", stderr.getvalue())
        made.stop()

    def test_a_reactor_that_somebody_stops_is_done(self) -> None:
        reactor = MemoryReactorClock()
        made = Tail(reactor, "tcp:a:1", streams=[], start=None, source=FakeSource(), spell=spell_rdata, output=1)
        self.assertEqual(made.run(), 0)
        made.stop()


@pytest.mark.parametrize(("text", "token"), [(None, None), ("beginning", 0), ("0", 0), ("59", 59)])
def test_from_takes_a_token_or_beginning(text: str | None, token: int | None) -> None:
    assert read_start(text) == token


@pytest.mark.parametrize("text", ["", "-1", "1_0", "end", "٣"])
def test_from_takes_nothing_else(text: str) -> None:
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
def test_what_cannot_work_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        tail.main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_row_keeps_its_bytes() -> None:
    facts = [fact(2, '["\\u00e9",1.0]', "{}"), fact(3), fact(4, '"é"')]
    assert spell_rdata(ORDERS, MASTER, facts).decode() == (
        'RDATA orders master batch ["\\u00e9",1.0]\nRDATA orders master 2 {}\nRDATA orders master 4 "é"\n'
    )
    assert spell_json(ORDERS, MASTER, facts[2:]).decode() == (
        '{"stream":"orders","instance":"master","token":4,"row":"é"}\n'
    )


def test_a_row_that_no_line_of_the_wire_could_hold_is_printed_all_the_same() -> None:
    text = '"' + "x" * 20_000 + '"'
    assert spell_rdata(ORDERS, MASTER, [fact(2, text)]).decode() == f"RDATA orders master 2 {text}\n"


def test_json_and_types_name_the_fields_of_a_synapses_streams() -> None:
    events = StreamName("events")
    facts = [fact(2, '["state",["!r","t","\\ud800",null]]'), fact(3, '["mine","other fields"]')]
    assert spell_json(events, MASTER, facts).decode() == (
        '{"stream":"events","instance":"master","token":2,"row":["state",["!r","t","\\ud800",null]],'
        '"fields":{"kind":"state","room_id":"!r","type":"t","state_key":"\\ud800","event_id":null}}\n'
        '{"stream":"events","instance":"master","token":3,"row":["mine","other fields"]}\n'
    )
    assert spell_typed(events, MASTER, facts).decode() == (
        "events master 2 StateRow(data=State(room_id='!r', type='t', state_key='\\ud800', event_id=None))\n"
        'events master 3 ["mine","other fields"]\n'
    )
    assert spell_typed(ORDERS, MASTER, [fact(2, '"é"')]).decode() == 'orders master 2 "é"\n'


@pytest.mark.parametrize("name", ["synapse-sqlite", "synapse-postgres"])
def test_every_recorded_row_has_fields(name: str) -> None:
    for stream, facts in recorded_facts(name).items():
        told = [Fact(Token(token), tuple(rows)) for token, rows in facts.items()]
        for line in spell_json(StreamName(stream), MASTER, told).splitlines():
            assert json.loads(line)["fields"]
        assert spell_typed(StreamName(stream), MASTER, told).count(b"Row(") == len(lines_of(stream, facts))
