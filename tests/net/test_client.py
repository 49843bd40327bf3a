"""The connection to a writer: what it sends first, when it connects again, and which peers it refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from replication.errors import ConfigError
from replication.follower.worker import Worker
from replication.net.client import (
    ANSWER_TIMEOUT,
    FIRST_DELAY,
    MAX_DELAY,
    MAX_DELAY_WRONG_SERVER,
    MAX_JITTER,
    MAX_PAUSE,
    REFUSED_SOON,
    SERVER_TIMEOUT,
    SERVER_WARNING,
    WriterClient,
)
from replication.net.protocol import Limits
from replication.session.connection import Fault, Received, Rows
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName
from tests.doubles import Net, begin, lines_of, logged, now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.internet.interfaces import IAddress

GOOD = b"SERVER example.com\nPING 1\nPOSITION orders master 1 1\n"
PORT = 9092
ERROR = "the writer at tcp:127.0.0.1:9092 sent ERROR: 'go away'"


@implementer(IProtocol)
class Scripted(Protocol):
    """Sends its factory's script for this connection, and collects what it receives."""

    factory: FakeWriter
    transport: Any

    def connectionMade(self) -> None:
        self.received = b""
        script = self.factory.scripts.pop(0) if len(self.factory.scripts) > 1 else self.factory.scripts[0]
        self.transport.write(script)
        if self.factory.hangs_up:
            self.transport.loseConnection()

    def dataReceived(self, data: bytes) -> None:
        self.received += data


class FakeWriter(Factory):
    """Sends one script a connection; the last script serves all further connections."""

    def __init__(self, *scripts: bytes, hangs_up: bool = False) -> None:
        self.scripts = list(scripts)
        self.hangs_up = hangs_up
        self.connections: list[Scripted] = []

    def buildProtocol(self, addr: IAddress | None) -> Any:
        protocol = Scripted()
        protocol.factory = self
        self.connections.append(protocol)
        return protocol


class ClientCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.net = Net()
        self.received: list[Received] = []
        self.lost = 0
        self.faults: list[Fault] = []
        self.client = self.make_client()

    def tearDown(self) -> None:
        stopped = begin(self.client.stop())
        self.net.hanging = False
        self.net.run()
        self.assertEqual(stopped, [None])
        self.assertEqual(self.net.getDelayedCalls(), [])

    def make_client(self, server_name: str | None = "example.com", streams: Sequence[str] = ()) -> WriterClient:
        return WriterClient(
            reactor=self.net,
            endpoint=f"tcp:127.0.0.1:{PORT}",
            server_name=server_name,
            instance_name=InstanceName("worker1"),
            streams=[StreamName(each) for each in streams],
            limits=Limits(),
            on_received=self.on_received,
            on_lost=self.on_lost,
            on_fault=self.faults.append,
            wall=lambda: 1.5,
        )

    def on_received(self, client: WriterClient, received: Sequence[Received]) -> None:
        self.assertIs(client, self.client)
        self.received += received

    def on_lost(self, client: WriterClient) -> None:
        self.assertIs(client, self.client)
        self.lost += 1

    def serve(self, *scripts: bytes, hangs_up: bool = False) -> FakeWriter:
        writer = FakeWriter(*scripts, hangs_up=hangs_up)
        self.net.serving[PORT] = writer
        return writer

    def waits(self, attempts: int) -> list[float]:
        """Return the seconds before each of the next attempts to connect."""
        seconds = []
        for _ in range(attempts):
            before, made = self.net.seconds(), self.net.attempts
            while self.net.attempts == made:
                self.net.run(0.01)
            seconds.append(self.net.seconds() - before)
        return seconds


class ConversationTests(ClientCase):
    def test_a_writer_that_answers_pings_is_asked_whether_the_connection_is_open(self) -> None:
        writer = self.serve(GOOD.replace(b"PING 1", b"PING 1 echo"))
        self.client.start()
        self.net.run()
        answers: list[str | None] = []
        self.client.echo().addCallback(answers.append)
        self.net.run()
        self.assertEqual(lines_of(writer.connections[0].received)[-1], "PING echo 1")
        self.assertEqual(answers, [])
        writer.connections[0].transport.write(b"PING echo 1\n")
        self.net.run()
        self.assertEqual(answers, [""])
        self.client.echo().addCallback(answers.append)
        writer.connections[0].transport.loseConnection()
        self.net.run()
        self.assertEqual(answers, ["", None])

    def test_the_process_at_the_endpoint_is_asked_for_a_history(self) -> None:
        writer = self.serve(GOOD.replace(b"PING 1", b"PING 1 echo"))
        self.assertIsNone(now(self.client.echo("orders master 0")), "no connection")
        self.client.start()
        self.net.run()
        answers: list[str | None] = []
        for _ in range(2):
            self.client.echo("orders master 0").addCallback(answers.append)
        self.net.run()
        self.assertEqual(lines_of(writer.connections[0].received)[-2], "PING echo 1 orders master 0")
        writer.connections[0].transport.write(b"PING echo 1 orders master 0 []\n")
        self.net.run()
        writer.connections[0].transport.loseConnection()
        self.net.run()
        self.assertEqual(answers, ["[]", None])

    def test_a_writer_that_answers_no_pings_is_not_asked(self) -> None:
        writer = self.serve(GOOD)
        self.client.start()
        self.net.run()
        self.assertEqual(now(self.client.echo("orders master")), "")
        self.net.run()
        self.assertEqual(lines_of(writer.connections[0].received)[-1], "REPLICATE ")

    def test_it_sends_its_first_lines_without_waiting_for_the_writers(self) -> None:
        writer = self.serve(b"")
        self.client.start()
        self.net.run()
        self.assertEqual(lines_of(writer.connections[0].received), ["NAME worker1", "PING 1500", "REPLICATE "])
        self.assertEqual(self.client.state, "connected")

    def test_replicate_names_the_wanted_streams(self) -> None:
        self.client = self.make_client(streams=["orders", "caches"])
        writer = self.serve(GOOD)
        self.client.start()
        self.net.run()
        self.client.request_positions()
        self.net.run()
        self.assertEqual(lines_of(writer.connections[0].received)[2:], ["REPLICATE orders caches"] * 2)

    def test_while_not_connected_a_request_for_positions_does_nothing(self) -> None:
        self.client.request_positions()
        self.assertEqual(self.client.state, "not connected")

    def test_after_the_first_position_it_is_following_and_every_command_is_passed_on(self) -> None:
        self.serve(GOOD + b"RDATA orders master 2 []\n")
        self.client.start()
        self.net.run()
        self.assertEqual([type(each) for each in self.received][-2:], [Position, Rows])
        self.assertEqual(self.client.state, "following")
        self.assertEqual(self.client.connections, 1)
        assert self.client.peer is not None
        self.assertEqual(self.client.peer.status().name, "example.com")

    def test_a_peer_that_sends_no_server_line_is_warned_of_after_5_s_and_closed_after_30_s(self) -> None:
        """A port of HTTP or TLS waits in silence.  The warning is logged once, however often it connects again."""
        writer = self.serve(b"")
        self.client.start()
        text = "no SERVER line received: is this a writer's --listen port, and not its --http port?"
        with logged() as lines:
            self.net.run(SERVER_WARNING + 1)
        self.assertEqual(lines, [f"the writer at tcp:127.0.0.1:9092: {text}"])
        self.assertEqual((self.client.error, self.client.state), (lines[0], "connected"))
        with logged() as lines:
            self.net.run(SERVER_TIMEOUT)
        self.assertEqual(self.faults, [Fault(f"ping timeout: {text}", "ping timeout")])
        self.assertEqual((len(writer.connections), lines), (2, []))

    def test_a_writer_that_is_silent_after_a_good_connection_may_hang(self) -> None:
        """Its endpoint is right: an earlier connection had a SERVER line."""
        self.serve(GOOD, b"")
        self.client.start()
        self.net.run()
        with logged() as lines:
            self.net.cut()
            self.net.run(SERVER_WARNING + 1)
        text = "no SERVER line received, although earlier connections received one: restart the writer's process"
        self.assertEqual(lines[-1], f"the writer at tcp:127.0.0.1:9092: {text} if it hangs")

    def test_a_server_line_after_the_warning_is_in_time(self) -> None:
        writer = self.serve(b"")
        self.client.start()
        with logged():
            self.net.run(SERVER_WARNING + 1)
        writer.connections[0].transport.write(b"SERVER example.com\nPOSITION orders master 1 1\n")
        self.net.run(SERVER_TIMEOUT)
        self.assertEqual((self.client.state, self.client.error, self.client.connections), ("following", None, 1))

    def test_after_server_a_peer_that_never_pings_may_be_silent_for_ever(self) -> None:
        """It may be a person with nc."""
        self.serve(b"SERVER example.com\n")
        self.client.start()
        self.net.run(300)
        self.assertEqual((self.faults, self.client.connections), ([], 1))

    def test_a_loss_is_reported_once(self) -> None:
        self.serve(GOOD)
        self.client.start()
        self.net.run()
        self.net.cut()
        self.assertEqual((self.lost, self.client.peer, self.client.state), (1, None, "not connected"))

    def test_it_sends_error_when_it_stops_and_does_not_connect_again(self) -> None:
        writer = self.serve(GOOD)
        self.client.start()
        self.net.run()
        stopped = begin(self.client.stop())
        self.net.run(60)
        self.assertEqual(stopped, [None])
        self.assertEqual(lines_of(writer.connections[0].received)[-1], "ERROR server stopping")
        self.assertEqual((self.net.attempts, self.lost), (1, 1))

    def test_stop_without_start_does_nothing(self) -> None:
        now(self.client.stop())
        now(self.client.stop())

    def test_stop_ends_an_attempt_and_logs_no_error(self) -> None:
        self.net.hanging = True
        self.client.start()
        with logged() as lines:
            now(self.client.stop())
        self.assertEqual(lines, [])
        self.net.tcpClients.clear()

    def test_stop_between_two_attempts_prevents_the_next(self) -> None:
        self.client.start()
        with logged():
            self.net.run()
        now(self.client.stop())
        self.net.run(60)
        self.assertEqual(self.net.attempts, 1)


class AnswerTests(ClientCase):
    """A server offers to send PINGs back, and does not: a follower would wait for its answers for ever."""

    ERROR = f"it has not answered PING echo for {ANSWER_TIMEOUT:g} s"

    def connect(self) -> FakeWriter:
        """Connect, and send a PING that should come back."""
        writer = self.serve(GOOD.replace(b"PING 1", b"PING 1 echo"))
        self.client.start()
        self.net.run()
        self.answers: list[str | None] = []
        self.client.echo("orders master").addCallback(self.answers.append)
        return writer

    def pings(self, writer: FakeWriter, seconds: float) -> None:
        """Let the server send a PING every 5 s, as one that has nothing else to send."""
        for _ in range(int(seconds / 5)):
            self.net.run(5.0)
            writer.connections[-1].transport.write(b"PING 2\n")
            self.net.run()

    def test_a_server_that_does_not_answer_is_a_failed_connection(self) -> None:
        writer = self.connect()
        with logged() as messages:
            self.pings(writer, ANSWER_TIMEOUT - 5.0)
            self.assertEqual((self.faults, self.answers), ([], []))
            self.pings(writer, 5.0)
        self.assertEqual(self.faults, [Fault(f"ping timeout: {self.ERROR}", "ping timeout")])
        self.assertEqual(self.answers, [None])
        self.assertIn(f"the writer at tcp:127.0.0.1:9092: {self.ERROR}", messages)

    def test_the_reason_is_shown_until_a_server_answers(self) -> None:
        writer = self.connect()
        with logged() as messages:
            self.pings(writer, ANSWER_TIMEOUT)
            self.net.run(5.0)
        self.assertEqual((len(writer.connections), self.client.state), (2, "following"))
        self.assertEqual((self.client.greeted, messages), (False, [self.client.error]))
        self.assertIn(self.ERROR, self.client.error or "")
        with logged(LogLevel.info) as messages:
            writer.connections[-1].transport.write(b"PING echo 1\n")
            self.net.run()
        self.assertEqual((self.client.greeted, self.client.error), (True, None))
        self.assertEqual(messages, ["example.com at tcp:127.0.0.1:9092 is back"])

    def test_another_server_that_sends_no_pings_back_is_followed(self) -> None:
        writer = self.connect()
        writer.scripts = [GOOD]
        self.pings(writer, ANSWER_TIMEOUT)
        self.net.run(5.0)
        self.assertEqual((len(writer.connections), self.client.greeted, self.client.error), (2, True, None))

    def test_a_server_that_has_other_lines_to_send_is_waited_for(self) -> None:
        """The answer is behind them."""
        writer = self.connect()
        for token in range(2, 22):
            self.net.run(5.0)
            writer.connections[0].transport.write(b"RDATA orders master %d []\n" % token)
            self.net.run()
        self.assertEqual((self.faults, len(writer.connections)), ([], 1))

    def test_the_time_begins_with_each_answer(self) -> None:
        writer = self.connect()
        self.client.echo("orders other").addCallback(self.answers.append)
        self.pings(writer, ANSWER_TIMEOUT - 5.0)
        writer.connections[0].transport.write(b"PING echo 1 orders master\n")
        self.pings(writer, ANSWER_TIMEOUT - 5.0)
        self.assertEqual((self.faults, self.answers), ([], [""]))
        self.pings(writer, 5.0)
        self.assertEqual((len(self.faults), self.answers), (1, ["", None]))

    def test_a_server_that_was_asked_nothing_owes_no_answer(self) -> None:
        writer = self.connect()
        writer.connections[0].transport.write(b"PING echo 1 orders master\n")
        self.pings(writer, 2 * ANSWER_TIMEOUT)
        self.client.echo()
        self.pings(writer, 5.0)
        self.assertEqual(self.faults, [])


class PauseTests(ClientCase):
    def start(self) -> Any:
        self.serve(GOOD)
        self.client.start()
        self.net.run()
        return self.client.peer

    def test_it_does_not_read_until_it_resumes(self) -> None:
        peer = self.start()
        self.client.pause_reading()
        self.assertTrue(peer.paused)
        self.client.resume_reading()
        self.assertFalse(peer.paused)
        self.net.run(MAX_PAUSE)
        self.client.pause_reading()
        self.assertTrue(peer.paused)

    def test_a_pause_ends_after_2_s_and_cannot_be_repeated_before_it_resumes(self) -> None:
        peer = self.start()
        self.client.pause_reading()
        self.net.run(MAX_PAUSE)
        self.assertFalse(peer.paused)
        self.client.pause_reading()
        self.assertFalse(peer.paused)
        self.client.resume_reading()
        self.client.pause_reading()
        self.assertTrue(peer.paused)

    def test_a_pause_ends_with_its_connection(self) -> None:
        self.start()
        self.client.pause_reading()
        self.net.cut()
        self.net.run(MAX_DELAY)
        peer: Any = self.client.peer
        self.assertFalse(peer.paused)
        self.client.pause_reading()
        self.assertTrue(peer.paused)

    def test_while_not_connected_a_pause_does_nothing(self) -> None:
        self.client.pause_reading()
        self.assertEqual(self.net.getDelayedCalls(), [])


class WrongRemoteTests(ClientCase):
    def test_a_writer_with_another_server_name_is_closed_with_an_error(self) -> None:
        writer = self.serve(b"SERVER other.example\nPOSITION orders master 1 1\n")
        self.client.start()
        with logged() as lines:
            self.net.run()
        self.assertEqual(
            lines_of(writer.connections[0].received)[-1],
            "ERROR Wrong remote: this is 'other.example', 'example.com' was expected; check --server-name",
        )
        self.assertEqual([fault.kind for fault in self.faults], ["wrong server name"])
        self.assertEqual(self.received, [])
        self.assertEqual(len(lines), 1)
        self.assertIn("tcp:127.0.0.1:9092", lines[0])

    def test_trap_7_a_writer_with_another_server_name_is_tried_ever_more_seldom_and_logged_once(self) -> None:
        self.serve(b"SERVER other.example\nPOSITION orders master 1 1\n")
        self.client.start()
        with logged() as lines:
            waits = self.waits(10)
        self.assertLess(max(waits[:4]), MAX_DELAY)
        self.assertGreater(min(waits[8:]), MAX_DELAY_WRONG_SERVER - 0.02)
        self.assertEqual(len(lines), 1, lines)
        assert self.client.error is not None
        self.assertIn("'example.com' was expected", self.client.error)

    def check_growth(self, waits: Sequence[float]) -> None:
        self.assertLess(waits[0], 0.1 + MAX_JITTER + 0.02)
        for earlier, later in pairwise(waits):
            self.assertGreater(later, min(earlier * 1.2, MAX_DELAY - 0.02))
        self.assertGreater(waits[-1], MAX_DELAY - 0.02)
        self.assertLess(max(waits), MAX_DELAY + MAX_JITTER + 0.02)

    def test_trap_7_reconnects_to_a_writer_that_closes_before_its_first_position_are_delayed_ever_more(self) -> None:
        self.serve(b"SERVER example.com\n", hangs_up=True)
        self.client.start()
        self.check_growth(self.waits(8)[1:])
        self.assertEqual(self.client.connections, 8)

    def test_trap_45_a_connection_that_dies_in_silence_is_noticed_and_made_again_for_ever(self) -> None:
        writer = self.serve(GOOD)
        self.client.start()
        for count in range(1, 30):
            self.net.run(60.0)
            self.assertGreaterEqual(len(writer.connections), count)
        del self.net.serving[PORT]
        self.net.cut()
        self.net.run(3_600.0)
        self.net.serving[PORT] = writer
        before = len(writer.connections)
        self.net.run(10.0)
        self.assertEqual((len(writer.connections), self.client.state), (before + 1, "following"))

    def test_reconnects_to_a_writer_with_a_fault_each_time_are_delayed_ever_more(self) -> None:
        self.serve(GOOD + b"FOO\n")
        self.client.start()
        with logged() as lines:
            waits = self.waits(8)
        self.check_growth(waits[1:])
        self.assertEqual(len(lines), 1, lines)

    def test_reconnects_after_refused_connections_are_delayed_ever_more_and_logged_once(self) -> None:
        self.client.start()
        with logged() as lines:
            self.check_growth(self.waits(8)[1:])
        self.assertEqual(
            lines, ["cannot connect to tcp:127.0.0.1:9092: Connection was refused by other side; retrying"]
        )
        self.assertEqual(self.client.error, lines[0])

    def test_after_a_good_connection_the_first_delay_is_short_again(self) -> None:
        self.client.start()
        with logged():
            self.waits(6)
        writer = self.serve(GOOD)
        self.net.run(3.0)
        self.assertEqual(self.client.state, "following")
        del self.net.serving[PORT]
        self.net.cut()
        with logged() as lines:
            self.check_growth(self.waits(6))
        self.assertEqual(len(lines), 1, "a new trouble is logged again")
        self.assertEqual(len(writer.connections), 1)

    def test_a_peer_that_sends_anything_before_server_is_refused(self) -> None:
        self.serve(b"POSITION orders master 1 1\n")
        self.client.start()
        with logged() as lines:
            self.net.run()
        self.assertEqual(
            self.faults, [Fault("Wrong remote: a writer sends SERVER before anything else", "wrong server name")]
        )
        self.assertEqual(self.received, [])
        self.assertEqual(len(lines), 1)

    def test_commands_before_a_wrong_server_name_are_passed_on(self) -> None:
        self.serve(GOOD + b"RDATA orders master 2 []\nSERVER other.example\nRDATA orders master 3 []\n")
        self.client.start()
        with logged():
            self.net.run()
        self.assertEqual([each.places for each in self.received if isinstance(each, Rows)], [[2]])

    def test_a_server_line_counts_for_its_own_connection_only(self) -> None:
        self.serve(GOOD, b"POSITION orders master 2 2\n")
        self.client.start()
        self.net.run()
        self.net.cut()
        with logged():
            self.net.run(1.0)
        self.assertEqual([fault.kind for fault in self.faults][:1], ["wrong server name"])

    def test_without_an_expected_server_name_any_is_accepted(self) -> None:
        self.client = self.make_client(server_name=None)
        self.serve(b"SERVER other.example\nPOSITION orders master 1 1\n")
        self.client.start()
        self.net.run()
        self.assertEqual(self.client.state, "following")

    def infos(self, seconds: float) -> list[str]:
        """Let time pass, and return what is logged at level info, by any library."""
        with capturedLogs() as events:
            self.net.run(seconds)
        return [formatEvent(each) for each in events if each["log_level"] is LogLevel.info]

    def test_following_loss_and_return_are_logged(self) -> None:
        self.serve(GOOD)
        self.client.start()
        self.assertEqual(self.infos(1.0), ["following example.com at tcp:127.0.0.1:9092 as worker1"])
        serving = self.net.serving.pop(PORT)
        self.net.callLater(1.0, self.net.cut)
        self.assertEqual(self.infos(20.0), ["lost example.com at tcp:127.0.0.1:9092"])
        self.net.serving[PORT] = serving
        self.assertEqual(self.infos(10.0), ["example.com at tcp:127.0.0.1:9092 is back"])

    def test_a_connection_that_fails_each_time_is_not_logged_as_back_each_time(self) -> None:
        self.serve(GOOD + b"FOO\n")
        self.client.start()
        self.assertLessEqual(len(self.infos(60.0)), 2)

    def test_a_writer_that_closes_too_early_is_logged_once_with_the_reason(self) -> None:
        for script, reason in [
            (b"", "it closed the connection before SERVER; if that port has TLS, write tls:"),
            (b"SERVER example.com\n", "it closed the connection before its first POSITION"),
        ]:
            self.serve(script, hangs_up=True)
            self.client.start()
            with logged() as lines:
                self.waits(5)
            self.assertEqual(lines, [f"the writer at tcp:127.0.0.1:9092: {reason}; retrying"])
            self.assertEqual(self.client.error, lines[0])

    def test_tls_is_not_suspected_at_a_writer_that_was_greeted_before(self) -> None:
        self.serve(GOOD)
        self.client.start()
        self.waits(20)
        self.serve(b"", hangs_up=True)
        with logged() as lines:
            self.net.cut()
            self.waits(5)
        why = "it closed the connection before SERVER"
        self.assertEqual(lines[-1], f"the writer at tcp:127.0.0.1:9092: {why}; retrying")

    def test_the_loss_at_a_stop_is_not_logged(self) -> None:
        self.serve(GOOD)
        self.client.start()
        self.net.run()
        self.net.callLater(1.0, self.client.stop)
        self.assertEqual(self.infos(2.0), [])

    def test_trap_3_the_text_of_error_is_logged_once_and_not_used_as_a_format(self) -> None:
        self.serve(b"SERVER example.com\nERROR 100% {tired} \x1b[31m\n", hangs_up=True)
        self.client.start()
        with logged() as lines:
            self.waits(4)
        self.assertEqual(lines, ["the writer at tcp:127.0.0.1:9092 sent ERROR: '100% {tired} \\x1b[31m'"])

    def test_a_writer_that_refuses_soon_is_logged_once_and_waited_for(self) -> None:
        """A relay in a circle sends a POSITION before it closes (docs/how-to/relay.md)."""
        self.serve(GOOD + b"ERROR go away\n", hangs_up=True)
        self.client.start()
        with logged() as lines:
            self.net.run(60)
        self.assertEqual(lines, [ERROR])
        self.assertLess(self.client.connections, 60 / MAX_DELAY + 5)

    def test_a_writer_that_refuses_late_is_connected_to_at_once(self) -> None:
        writer = self.serve(GOOD)
        self.client.start()
        for attempt in (1, 2, 3):
            self.net.run(REFUSED_SOON)
            with logged() as lines:
                writer.connections[-1].transport.write(b"ERROR go away\n")
                writer.connections[-1].transport.loseConnection()
                self.net.run(FIRST_DELAY + MAX_JITTER + 0.01)
            self.assertEqual((lines, self.client.connections), ([ERROR], attempt + 1))

    def test_a_writer_that_stops_is_not_logged_as_an_error_of_the_protocol(self) -> None:
        self.serve(b"SERVER example.com\nERROR server stopping\n", hangs_up=True)
        self.client.start()
        with logged() as lines:
            self.waits(4)
        self.assertEqual(lines, ["the writer at tcp:127.0.0.1:9092 is stopping"])

    def test_an_http_server_that_answers_is_named_at_once(self) -> None:
        self.serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        self.client.start()
        with logged() as lines:
            self.net.run()
        self.assertEqual([fault.kind for fault in self.faults], ["unknown command"])
        self.assertIn("this is an HTTP server: connect to the writer's --listen port", lines[0])


class EndpointTests(SynchronousTestCase):
    def test_an_invalid_endpoint_is_refused_with_its_text(self) -> None:
        for wrong in ("9092", "tcp", "nonsense:1", "tcp:h:x"):
            case = ClientCase()
            case.net, case.faults = Net(), []
            with self.assertRaises(ConfigError) as caught:
                WriterClient(
                    reactor=case.net,
                    endpoint=wrong,
                    server_name=None,
                    instance_name=InstanceName("w"),
                    streams=(),
                    limits=Limits(),
                    on_received=case.on_received,
                    on_lost=case.on_lost,
                    on_fault=case.faults.append,
                )
            self.assertIn(repr(wrong), str(caught.exception))

    def test_the_error_for_an_invalid_endpoint_shows_a_valid_form(self) -> None:
        for wrong in ("tcp:127.0.0.1", "127.0.0.1:9092", "http://127.0.0.1:9093", "9092", "tcp:h:x", "tcp:a..b:1"):
            with self.assertRaises(ConfigError) as caught:
                Worker(connect=[wrong], database="sqlite://", reactor=Net())
            self.assertEqual(str(caught.exception), f"cannot connect to {wrong!r}: write tcp:HOST:PORT")
