"""The link to a writer: it comes back, patiently, and takes nobody for a writer who has not shown it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from replication.errors import TLS_CURE, ConfigError
from replication.net.link import HELLO_PATIENCE, LONGEST_REST, MAX_DELAY, WriterLink, endpoint_trouble, http_beside
from replication.net.protocol import Limits
from replication.session.connection import Fault, Heard, Rows
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName
from replication.worker import Worker
from tests.doubles import Net, begin, lines_of, logged, now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.internet.interfaces import IAddress

GOOD = b"SERVER example.com\nPING 1\nPOSITION orders master 1 1\n"
PORT = 9092
JITTER = 0.1


@implementer(IProtocol)
class Scripted(Protocol):
    """Says what its factory has for this connection, and collects what it hears."""

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
    """Serves scripts, one a connection; the last one goes on."""

    def __init__(self, *scripts: bytes, hangs_up: bool = False) -> None:
        self.scripts = list(scripts)
        self.hangs_up = hangs_up
        self.connections: list[Scripted] = []

    def buildProtocol(self, addr: IAddress | None) -> Any:
        protocol = Scripted()
        protocol.factory = self
        self.connections.append(protocol)
        return protocol


class LinkCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.net = Net()
        self.heard: list[Heard] = []
        self.lost = 0
        self.faults: list[Fault] = []
        self.link = self.make_link()

    def tearDown(self) -> None:
        stopped = begin(self.link.stop())
        self.net.hanging = False
        self.net.run()
        self.assertEqual(stopped, [None])
        self.assertEqual(self.net.getDelayedCalls(), [])

    def make_link(self, server_name: str | None = "example.com", streams: Sequence[str] = ()) -> WriterLink:
        return WriterLink(
            self.net,
            f"tcp:127.0.0.1:{PORT}",
            server_name=server_name,
            instance_name=InstanceName("worker1"),
            streams=[StreamName(each) for each in streams],
            limits=Limits(),
            on_heard=self.on_heard,
            on_lost=self.on_lost,
            on_fault=self.faults.append,
        )

    def on_heard(self, link: WriterLink, heard: Sequence[Heard]) -> None:
        self.assertIs(link, self.link)
        self.heard += heard

    def on_lost(self, link: WriterLink) -> None:
        self.assertIs(link, self.link)
        self.lost += 1

    def serve(self, *scripts: bytes, hangs_up: bool = False) -> FakeWriter:
        writer = FakeWriter(*scripts, hangs_up=hangs_up)
        self.net.serving[PORT] = writer
        return writer

    def waits(self, attempts: int) -> list[float]:
        """Return how long it waited before each of the next attempts."""
        seconds = []
        for _ in range(attempts):
            before, made = self.net.seconds(), self.net.attempts
            while self.net.attempts == made:
                self.net.run(0.01)
            seconds.append(self.net.seconds() - before)
        return seconds


class ConversationTests(LinkCase):
    def test_it_introduces_itself_and_asks_without_waiting(self) -> None:
        writer = self.serve(b"")
        self.link.start()
        self.net.run()
        self.assertEqual(lines_of(writer.connections[0].received), ["NAME worker1", "PING 0", "REPLICATE "])
        self.assertEqual(self.link.state, "connected")

    def test_it_asks_for_the_streams_that_are_wanted(self) -> None:
        self.link = self.make_link(streams=["orders", "caches"])
        writer = self.serve(GOOD)
        self.link.start()
        self.net.run()
        self.link.ask()
        self.net.run()
        self.assertEqual(lines_of(writer.connections[0].received)[2:], ["REPLICATE orders caches"] * 2)

    def test_with_nobody_there_nobody_is_asked(self) -> None:
        self.link.ask()
        self.assertEqual(self.link.state, "not connected")

    def test_it_follows_from_the_first_position_on_and_passes_everything_on(self) -> None:
        self.serve(GOOD + b"RDATA orders master 2 []\n")
        self.link.start()
        self.net.run()
        self.assertEqual([type(each) for each in self.heard][-2:], [Position, Rows])
        self.assertEqual(self.link.state, "following")
        self.assertEqual(self.link.connections, 1)
        assert self.link.peer is not None
        self.assertEqual(self.link.peer.status().name, "example.com")

    def test_a_peer_that_does_not_say_server_in_time_is_left(self) -> None:
        """The link may be dead; with no PING heard, nothing else would ever tell."""
        writer = self.serve(b"")
        self.link.start()
        with logged():
            self.net.run(HELLO_PATIENCE + 1)
        said = "ping timeout: no SERVER line for 30 s: is that a writer's --listen, and not its --http?"
        self.assertEqual(self.faults, [Fault(said, "ping timeout")])
        self.assertEqual(len(writer.connections), 2)

    def test_one_that_has_said_server_and_no_ping_may_be_silent_for_ever(self) -> None:
        """It may be somebody with nc."""
        self.serve(b"SERVER example.com\n")
        self.link.start()
        self.net.run(300)
        self.assertEqual((self.faults, self.link.connections), ([], 1))

    def test_a_loss_is_told_once(self) -> None:
        self.serve(GOOD)
        self.link.start()
        self.net.run()
        self.net.cut()
        self.assertEqual((self.lost, self.link.peer, self.link.state), (1, None, "not connected"))

    def test_it_says_goodbye_when_it_stops_and_stays_away(self) -> None:
        writer = self.serve(GOOD)
        self.link.start()
        self.net.run()
        stopped = begin(self.link.stop())
        self.net.run(60)
        self.assertEqual(stopped, [None])
        self.assertEqual(lines_of(writer.connections[0].received)[-1], "ERROR server stopping")
        self.assertEqual((self.net.attempts, self.lost), (1, 1))

    def test_stopping_what_was_never_started_is_no_work(self) -> None:
        now(self.link.stop())
        now(self.link.stop())

    def test_stopping_in_the_middle_of_an_attempt_ends_it_and_is_no_trouble(self) -> None:
        self.net.hanging = True
        self.link.start()
        with logged() as said:
            now(self.link.stop())
        self.assertEqual(said, [])
        self.net.tcpClients.clear()

    def test_stopping_between_two_attempts_makes_no_third(self) -> None:
        self.link.start()
        with logged():
            self.net.run()
        now(self.link.stop())
        self.net.run(60)
        self.assertEqual(self.net.attempts, 1)


class RestTests(LinkCase):
    def start(self) -> Any:
        self.serve(GOOD)
        self.link.start()
        self.net.run()
        return self.link.peer

    def test_it_reads_no_more_until_it_goes_on(self) -> None:
        peer = self.start()
        self.link.rest()
        self.assertTrue(peer.paused)
        self.link.go_on()
        self.assertFalse(peer.paused)
        self.net.run(LONGEST_REST)
        self.link.rest()
        self.assertTrue(peer.paused)

    def test_it_rests_for_so_long_at_most_and_not_again_before_it_goes_on(self) -> None:
        peer = self.start()
        self.link.rest()
        self.net.run(LONGEST_REST)
        self.assertFalse(peer.paused)
        self.link.rest()
        self.assertFalse(peer.paused)
        self.link.go_on()
        self.link.rest()
        self.assertTrue(peer.paused)

    def test_the_next_connection_does_not_rest_for_the_last_one(self) -> None:
        self.start()
        self.link.rest()
        self.net.cut()
        self.net.run(MAX_DELAY)
        peer: Any = self.link.peer
        self.assertFalse(peer.paused)
        self.link.rest()
        self.assertTrue(peer.paused)

    def test_with_nobody_there_it_has_nothing_to_rest_from(self) -> None:
        self.link.rest()
        self.assertEqual(self.net.getDelayedCalls(), [])


class WrongRemoteTests(LinkCase):
    def test_a_writer_with_another_name_is_told_and_left(self) -> None:
        writer = self.serve(b"SERVER other.example\nPOSITION orders master 1 1\n")
        self.link.start()
        with logged() as said:
            self.net.run()
        self.assertEqual(
            lines_of(writer.connections[0].received)[-1],
            "ERROR Wrong remote: this is 'other.example', 'example.com' was expected",
        )
        self.assertEqual([fault.kind for fault in self.faults], ["wrong server name"])
        self.assertEqual(self.heard, [])
        self.assertEqual(len(said), 1)
        self.assertIn("tcp:127.0.0.1:9092", said[0])

    def test_trap_7_a_writer_with_another_name_is_not_called_in_a_tight_loop(self) -> None:
        self.serve(b"SERVER other.example\nPOSITION orders master 1 1\n")
        self.link.start()
        with logged() as said:
            waits = self.waits(8)
        self.check_growth(waits[1:])
        self.assertEqual(len(said), 1, said)

    def check_growth(self, waits: Sequence[float]) -> None:
        self.assertLess(waits[0], 0.1 + JITTER + 0.02)
        for earlier, later in pairwise(waits):
            self.assertGreater(later, min(earlier * 1.2, MAX_DELAY - 0.02))
        self.assertGreater(waits[-1], MAX_DELAY - 0.02)
        self.assertLess(max(waits), MAX_DELAY + JITTER + 0.02)

    def test_trap_7_nor_is_one_that_hangs_up_before_it_has_said_a_position(self) -> None:
        self.serve(b"SERVER example.com\n", hangs_up=True)
        self.link.start()
        self.check_growth(self.waits(8)[1:])
        self.assertEqual(self.link.connections, 8)

    def test_trap_45_a_link_that_has_died_without_a_word_is_noticed_and_made_again_for_ever(self) -> None:
        writer = self.serve(GOOD)
        self.link.start()
        for count in range(1, 30):
            self.net.run(60.0)
            self.assertGreaterEqual(len(writer.connections), count)
        del self.net.serving[PORT]
        self.net.cut()
        self.net.run(3_600.0)
        self.net.serving[PORT] = writer
        before = len(writer.connections)
        self.net.run(10.0)
        self.assertEqual((len(writer.connections), self.link.state), (before + 1, "following"))

    def test_nor_is_one_that_says_something_wrong_each_time_after_a_position(self) -> None:
        self.serve(GOOD + b"FOO\n")
        self.link.start()
        with logged() as said:
            waits = self.waits(8)
        self.check_growth(waits[1:])
        self.assertEqual(len(said), 1, said)

    def test_nor_is_one_that_refuses_the_connection(self) -> None:
        self.link.start()
        with logged() as said:
            self.check_growth(self.waits(8)[1:])
        self.assertEqual(said, ["cannot connect to tcp:127.0.0.1:9092: Connection was refused by other side."])

    def test_after_a_good_conversation_it_is_back_soon(self) -> None:
        self.link.start()
        with logged():
            self.waits(6)
        writer = self.serve(GOOD)
        self.net.run(3.0)
        self.assertEqual(self.link.state, "following")
        del self.net.serving[PORT]
        self.net.cut()
        with logged() as said:
            self.check_growth(self.waits(6))
        self.assertEqual(len(said), 1, "new trouble is told again")
        self.assertEqual(len(writer.connections), 1)

    def test_who_speaks_before_saying_its_name_is_no_writer(self) -> None:
        self.serve(b"POSITION orders master 1 1\n")
        self.link.start()
        with logged() as said:
            self.net.run()
        self.assertEqual(
            self.faults, [Fault("Wrong remote: a writer speaks its SERVER line first", "wrong server name")]
        )
        self.assertEqual(self.heard, [])
        self.assertEqual(len(said), 1)

    def test_what_was_said_before_a_name_that_is_wrong_counts(self) -> None:
        self.serve(GOOD + b"RDATA orders master 2 []\nSERVER other.example\nRDATA orders master 3 []\n")
        self.link.start()
        with logged():
            self.net.run()
        self.assertEqual([each.places for each in self.heard if isinstance(each, Rows)], [[2]])

    def test_a_name_counts_for_its_own_connection_only(self) -> None:
        self.serve(GOOD, b"POSITION orders master 2 2\n")
        self.link.start()
        self.net.run()
        self.net.cut()
        with logged():
            self.net.run(1.0)
        self.assertEqual([fault.kind for fault in self.faults][:1], ["wrong server name"])

    def test_whoever_answers_will_do_if_no_name_is_expected(self) -> None:
        self.link = self.make_link(server_name=None)
        self.serve(b"SERVER whoever\nPOSITION orders master 1 1\n")
        self.link.start()
        self.net.run()
        self.assertEqual(self.link.state, "following")

    def infos(self, seconds: float) -> list[str]:
        """Let time pass, and return what is logged that is no warning, from whatever library."""
        with capturedLogs() as events:
            self.net.run(seconds)
        return [formatEvent(each) for each in events if each["log_level"] is LogLevel.info]

    def test_a_good_link_is_told_when_it_is_there_lost_and_back(self) -> None:
        self.serve(GOOD)
        self.link.start()
        self.assertEqual(self.infos(1.0), ["following example.com at tcp:127.0.0.1:9092 as worker1"])
        serving = self.net.serving.pop(PORT)
        self.net.callLater(1.0, self.net.cut)
        self.assertEqual(self.infos(20.0), ["lost example.com at tcp:127.0.0.1:9092"])
        self.net.serving[PORT] = serving
        self.assertEqual(self.infos(10.0), ["example.com at tcp:127.0.0.1:9092 is back"])

    def test_a_link_that_goes_wrong_each_time_is_not_told_to_be_back_each_time(self) -> None:
        self.serve(GOOD + b"FOO\n")
        self.link.start()
        self.assertLessEqual(len(self.infos(60.0)), 2)

    def test_a_loss_that_we_want_is_not_told(self) -> None:
        self.serve(GOOD)
        self.link.start()
        self.net.run()
        self.net.callLater(1.0, self.link.stop)
        self.assertEqual(self.infos(2.0), [])

    def test_why_a_writer_closes_is_logged_once_and_not_as_a_format(self) -> None:
        self.serve(b"SERVER example.com\nERROR 100% {tired} \x1b[31m\n", hangs_up=True)
        self.link.start()
        with logged() as said:
            self.waits(4)
        self.assertEqual(said, ["the writer at tcp:127.0.0.1:9092 says: '100% {tired} \\x1b[31m'"])

    def test_an_http_server_is_no_writer(self) -> None:
        self.serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        self.link.start()
        with logged():
            self.net.run()
        self.assertEqual([fault.kind for fault in self.faults], ["unknown command"])


class EndpointTests(SynchronousTestCase):
    def test_what_is_no_endpoint_is_refused_with_its_text(self) -> None:
        for wrong in ("9092", "tcp", "nonsense:1", "tcp:h:x"):
            case = LinkCase()
            case.net, case.faults = Net(), []
            with self.assertRaises(ConfigError) as caught:
                WriterLink(
                    case.net,
                    wrong,
                    server_name=None,
                    instance_name=InstanceName("w"),
                    streams=(),
                    limits=Limits(),
                    on_heard=case.on_heard,
                    on_lost=case.on_lost,
                    on_fault=case.faults.append,
                )
            self.assertIn(repr(wrong), str(caught.exception))

    def test_a_wrong_endpoint_is_told_how_a_right_one_looks(self) -> None:
        for wrong in ("tcp:127.0.0.1", "127.0.0.1:9092", "http://127.0.0.1:9093", "9092", "tcp:h:x"):
            with self.assertRaises(ConfigError) as caught:
                Worker(connect=[wrong], database="sqlite://", reactor=Net())
            self.assertEqual(str(caught.exception), f"cannot connect to {wrong!r}: write tcp:HOST:PORT")

    def test_an_endpoint_of_another_kind_is_told_what_twisted_says(self) -> None:
        text = endpoint_trouble("ssl:1:privateKey=/x", FileNotFoundError(2, "No such file"), "tcp:PORT")
        self.assertEqual(text, "not an endpoint ([Errno 2] No such file)")

    def test_tls_without_its_libraries_says_how_to_get_them(self) -> None:
        for library in ("OpenSSL", "service_identity"):
            with patch.dict("sys.modules", {library: None}):
                for error in (NameError("name 'optionsForClientTLS' is not defined"), ValueError("Unknown endpoint")):
                    self.assertEqual(endpoint_trouble("tls:h:1", error, "tcp:HOST:PORT"), TLS_CURE)

    def test_http_is_on_the_same_host_at_the_next_port(self) -> None:
        for endpoint, url in [
            ("tcp:127.0.0.1:9092", "http://127.0.0.1:9093"),
            ("tcp:host=example.com:port=9092", "http://example.com:9093"),
            ("tcp:example.com:port=9092:timeout=3", "http://example.com:9093"),
            (r"tcp:\:\:1:9092", "http://[::1]:9093"),
            (r"tcp:host=fe80\:\:1:port=1", "http://[fe80::1]:2"),
        ]:
            self.assertEqual(http_beside(endpoint), url)

    def test_other_endpoints_have_no_port_beside_them(self) -> None:
        for endpoint in (
            "unix:/run/r.sock",
            "tls:example.com:9092",
            "tcp:example.com",
            "tcp:example.com:x",
            "tcp:",
            "",
        ):
            self.assertIsNone(http_beside(endpoint), endpoint)
