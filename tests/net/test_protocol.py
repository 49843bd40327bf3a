"""One connection on a transport: keep-alive, flow control, faults and closing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from twisted.internet.address import IPv6Address, UNIXAddress
from twisted.internet.interfaces import IHalfCloseableDescriptor, ISSLTransport
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.protocols.basic import LineReceiver
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import alsoProvides, implementer

from replication.net.protocol import REST, TURN_BYTES, Limits, ReplicationProtocol
from replication.session import send_buffer
from replication.session.connection import Fault, Keepalive, Role, Rows
from replication.wire.commands import Error, Name, Ping, Position, Server
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import Wire, lines_of, logged, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.session.connection import Received


class Owner:
    """An IConnectionOwner that takes notes; if ``closes``, it closes the connection when a command comes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.received: list[Received] = []
        self.faults: list[Fault] = []
        self.closes = False
        self.resting = 0

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        self.notes.append("connected")

    def commands_received(self, peer: ReplicationProtocol, received: Sequence[Received]) -> None:
        self.received += received
        if self.closes:
            peer.close("enough")

    def peer_failed(self, peer: ReplicationProtocol, fault: Fault) -> None:
        self.notes.append("faulted")
        self.faults.append(fault)

    def peer_disconnected(self, peer: ReplicationProtocol) -> None:
        self.notes.append("lost")

    def transport_closed(self, peer: ReplicationProtocol) -> None:
        self.notes.append("gone")


class ProtocolCase(SynchronousTestCase):
    role = Role.MASTER
    limits = Limits()

    def setUp(self) -> None:
        self.clock, self.owner = Clock(), Owner()
        self.protocol = ReplicationProtocol(self.role, self.owner, self.clock, self.limits, wall=lambda: 1234.5)
        self.wire = Wire(self.protocol, room=100)

    def tearDown(self) -> None:
        self.wire.lose()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.owner.notes.count("lost"), 1)
        self.assertEqual(self.owner.notes[-1], "gone")

    def send(self, *lines: str) -> None:
        self.protocol.dataReceived("".join(f"{line}\n" for line in lines).encode())

    def sent(self) -> list[str]:
        return lines_of(self.wire.read())


class ConversationTests(ProtocolCase):
    def test_one_read_is_passed_on_in_order_and_in_one_call(self) -> None:
        self.send("NAME one", "PING 1", "REPLICATE ")
        self.assertEqual(self.owner.received[:2], [Name("one"), Ping("1")])
        self.assertEqual(self.protocol.status().last_command, "REPLICATE")
        self.assertEqual((self.protocol.lines_in, self.protocol.bytes_in), (3, len("NAME one\nPING 1\nREPLICATE \n")))

    def test_several_commands_are_one_write(self) -> None:
        self.protocol.send(Server("example.com"), Ping("7"))
        self.assertEqual(self.sent(), ["SERVER example.com", "PING 7"])
        self.assertEqual(self.protocol.status().lines_out, 2)

    def test_small_writes_are_not_delayed(self) -> None:
        self.assertTrue(self.wire.no_delay)

    def test_commands_before_a_fault_are_passed_on(self) -> None:
        self.send("PING 1", "FOO bar", "PING 2")
        self.assertEqual(self.owner.received, [Ping("1")])
        (error,) = self.sent()
        self.assertEqual(error, "ERROR line 2: unknown command: 'FOO', in 'FOO bar'")
        self.assertEqual(self.owner.faults, [Fault(error.removeprefix("ERROR "), "unknown command")])
        self.assertTrue(self.wire.lost)

    def test_trap_3_the_peers_text_is_never_used_as_a_format(self) -> None:
        self.send("FOO 100% %s %(x)s {peer} {0}")
        self.assertEqual(self.sent(), ["ERROR line 1: unknown command: 'FOO', in 'FOO 100% %s %(x)s {peer} {0}'"])

    def test_trap_4_bytes_that_are_not_utf_8_get_an_error_line(self) -> None:
        self.protocol.dataReceived(b"NAME \xff\n")
        self.assertIn("ERROR line 1: not UTF-8 at byte 6", self.sent()[0])

    def test_an_error_line_from_the_peer_does_not_close_the_connection(self) -> None:
        self.send("ERROR something", "PING 1")
        self.assertEqual(self.owner.received, [Error("something"), Ping("1")])
        self.assertFalse(self.wire.disconnecting)

    def test_after_close_nothing_is_received_or_sent(self) -> None:
        self.protocol.close("that is all")
        self.send("PING 1")
        self.protocol.send(Ping("2"))
        self.protocol.write(b"RDATA s i 1 []\n", 1)
        self.protocol.fail(Fault("again", "again"))
        self.protocol.close("again")
        self.assertEqual(self.sent(), ["ERROR that is all"])
        self.assertEqual((self.owner.received, self.owner.faults), ([], []))

    def test_a_fault_after_a_command_at_which_the_owner_closes_is_not_reported(self) -> None:
        self.owner.closes = True
        self.send("PING 1", "FOO")
        self.assertEqual(self.sent(), ["ERROR enough"])
        self.assertEqual(self.owner.faults, [])

    def test_a_reason_that_cannot_be_encoded_is_logged_and_the_connection_closed(self) -> None:
        with logged() as lines:
            self.protocol.close("two\nlines")
        self.assertIn("two\\nlines", lines[0])
        self.assertEqual(self.sent(), [])
        self.assertTrue(self.wire.lost)

    def test_the_end_is_reported_once_at_the_close(self) -> None:
        self.protocol.close()
        self.assertEqual(self.owner.notes, ["connected", "lost"])
        self.wire.lose()
        self.assertEqual(self.owner.notes, ["connected", "lost", "gone"])

    def test_the_end_is_reported_once_at_the_loss(self) -> None:
        self.wire.lose()
        self.assertEqual(self.owner.notes, ["connected", "lost", "gone"])
        self.protocol.send(Ping("1"))


class TurnTests(ProtocolCase):
    """A connection that sends much is processed in turns, and not read before the last of them."""

    def test_the_parts_of_a_large_read_are_processed_in_order_and_nothing_is_lost(self) -> None:
        lines = [f"PING {number}" for number in range(3_000)]
        self.send(*lines)
        data = sum(len(each) + 1 for each in lines)
        turns = [self.protocol.bytes_in]
        while self.wire.producerState == "paused":
            self.assertEqual(self.owner.resting, 1)
            self.clock.advance(REST)
            turns.append(self.protocol.bytes_in)
        self.assertEqual(turns, [*range(TURN_BYTES, data, TURN_BYTES), data, data])
        self.assertEqual(self.owner.received, [Ping(str(number)) for number in range(3_000)])
        self.assertEqual(self.owner.resting, 0)
        self.send("PING small")
        self.assertEqual(self.owner.received[-1], Ping("small"))

    def test_what_tls_has_still_decrypted_waits_behind_it(self) -> None:
        self.send("PING 1", "\n" * TURN_BYTES)
        self.send("PING 2")
        self.assertEqual(self.owner.received, [Ping("1")])
        self.clock.advance(REST)
        self.assertEqual(self.owner.received, [Ping("1"), Ping("2")])

    def test_the_more_connections_wait_the_longer_each_rests(self) -> None:
        self.owner.resting = 9
        self.send("\n" * 2 * TURN_BYTES)
        self.clock.advance(9 * REST)
        self.assertEqual(self.protocol.bytes_in, TURN_BYTES)
        self.clock.advance(2 * REST)
        self.assertEqual(self.protocol.bytes_in, 2 * TURN_BYTES)
        self.wire.lose()
        self.assertEqual(self.owner.resting, 9)

    def test_after_a_fault_the_rest_is_discarded(self) -> None:
        self.send("nonsense", *["PING 1"] * TURN_BYTES)
        self.assertEqual(self.owner.received, [])
        self.assertTrue(self.sent()[0].startswith("ERROR line 1: unknown command"))


class DirectionTests(ProtocolCase):
    role = Role.WORKER

    def test_a_run_of_rdata_is_passed_on_as_one_object(self) -> None:
        self.send("RDATA s i batch [1]", "RDATA s i 3 [2]", "POSITION s i 3 4")
        rows = Rows(StreamName("s"), InstanceName("i"), [None, Token(3)], ["[1]", "[2]"])
        self.assertEqual(self.owner.received, [rows, Position(StreamName("s"), InstanceName("i"), Token(3), Token(4))])
        self.assertEqual(self.protocol.lines_in, 3)

    def test_rows_count_as_rdata(self) -> None:
        self.send("RDATA s i 3 [2]")
        self.assertEqual(self.protocol.status().last_command, "RDATA")

    def test_a_command_in_the_wrong_direction_is_a_fault(self) -> None:
        self.send("REPLICATE ")
        self.assertIn("ERROR line 1: invalid command: REPLICATE", self.sent()[0])
        self.assertEqual(self.owner.faults[0].kind, "wrong direction")


class KeepaliveTests(ProtocolCase):
    def test_ping_is_sent_5_s_after_the_last_line_sent(self) -> None:
        self.clock.advance(4.9)
        self.assertEqual(self.sent(), [])
        self.clock.advance(0.1)
        self.assertEqual(self.sent(), ["PING 1234500"])
        self.clock.pump([5.0] * 3)
        self.assertEqual(self.sent(), ["PING 1234500"] * 3)

    def test_each_line_sent_delays_the_ping(self) -> None:
        self.clock.advance(3.0)
        self.protocol.write(b"POSITION s i 1 1\n", 1)
        self.sent()
        self.clock.advance(4.9)
        self.assertEqual(self.sent(), [])
        self.clock.advance(0.1)
        self.assertEqual(words_of(self.wire.read()), ["PING"])

    def test_a_peer_that_never_pinged_may_be_silent_for_ever(self) -> None:
        self.send("NAME netcat")
        self.clock.pump([5.0] * 100)
        self.assertFalse(self.wire.disconnecting)

    def test_trap_2_a_peer_that_pinged_is_closed_after_exactly_15_s_of_silence(self) -> None:
        self.clock.advance(1.0)
        self.send("PING 1")
        self.clock.pump([1.0] * 14)
        self.assertFalse(self.wire.disconnecting)
        self.clock.advance(1.0)
        self.assertEqual(self.sent()[-1], "ERROR ping timeout: nothing received for 15 s")
        self.assertEqual(self.owner.faults[0].kind, "ping timeout")
        self.assertTrue(self.wire.lost)

    def test_every_good_line_is_a_sign_of_life_and_a_blank_line_is_not(self) -> None:
        self.send("PING 1")
        for _ in range(3):
            self.clock.advance(10.0)
            self.send("NAME x")
        self.clock.advance(10.0)
        self.assertFalse(self.wire.disconnecting)
        self.send("", " ", "\r")
        self.clock.advance(5.0)
        self.assertTrue(self.wire.disconnecting)

    def test_a_closed_connection_that_stays_open_is_aborted_after_15_s(self) -> None:
        self.wire.write(b"x" * 200)
        self.protocol.close("server stopping")
        self.clock.advance(14.9)
        self.assertFalse(self.wire.aborted)
        self.clock.advance(0.1)
        self.assertTrue(self.wire.aborted)


class MovingClock(Clock):
    """A clock that moves whenever it is read, as a real one does."""

    def seconds(self) -> float:
        self.rightNow += 1e-6
        return super().seconds()


class TimerTests(ProtocolCase):
    def setUp(self) -> None:
        super().setUp()
        self.wire.lose()
        self.clock, self.owner = MovingClock(), Owner()
        self.protocol = ReplicationProtocol(self.role, self.owner, self.clock, self.limits)
        self.wire = Wire(self.protocol, room=100)

    def test_a_line_that_changes_nothing_leaves_the_timer(self) -> None:
        self.send("PING 1")
        (timer,) = self.clock.getDelayedCalls()
        for number in range(5):
            self.clock.advance(0.1)
            self.send(f"PING {number}")
            self.assertEqual(self.clock.getDelayedCalls(), [timer])


class ShortKeepaliveTests(ProtocolCase):
    limits = Limits(keepalive=Keepalive(ping_after=100.0, give_up_after=2.0))

    def test_both_times_can_be_set_and_are_independent(self) -> None:
        self.clock.advance(50.0)
        self.send("PING 1")
        self.clock.advance(1.9)
        self.assertFalse(self.wire.disconnecting)
        self.clock.advance(0.1)
        self.assertEqual(self.sent(), ["ERROR ping timeout: nothing received for 2 s"])

    def test_the_abort_comes_after_the_time_out_that_is_set(self) -> None:
        self.wire.write(b"x" * 200)
        self.protocol.close()
        self.clock.advance(2.0)
        self.assertTrue(self.wire.aborted)


class BackpressureTests(ProtocolCase):
    limits = Limits(max_queued_bytes=400, max_queued_lines=20)

    def position(self, number: int) -> bytes:
        return b"POSITION s i %d %d\n" % (number, number)

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.protocol.write(self.position(number), 1)

    def test_queued_lines_are_sent_in_order_as_the_peer_reads(self) -> None:
        self.write(*range(100, 115))
        self.assertGreater(self.protocol.queued_bytes, 0)
        received = b""
        while data := self.wire.read(50):  # a little at a time: paused and resumed again and again
            received += data
        self.assertEqual(received, b"".join(map(self.position, range(100, 115))))
        self.assertEqual(self.protocol.queued_bytes, 0)
        self.write(115)
        self.assertEqual(self.wire.read(), self.position(115))

    def test_the_transport_may_pause_again_while_queued_lines_are_sent(self) -> None:
        self.patch(send_buffer, "JOINED_BYTES", 1)
        self.write(*range(100, 119))
        self.wire.read(21)
        self.assertGreater(self.protocol.queued_bytes, 200)
        self.assertLess(len(self.wire.value()), 150)
        self.write(119)
        received = b""
        while data := self.wire.read(70):
            received += data
        self.assertEqual(received, b"".join(map(self.position, range(101, 120))))

    def test_a_new_command_is_sent_after_the_queued_lines(self) -> None:
        self.write(*range(100, 107))
        self.protocol.send(Ping("1"))
        self.wire.read()
        self.assertEqual(self.sent()[-1], "PING 1")

    def test_trap_6_over_the_limit_the_error_is_sent_before_the_queued_lines(self) -> None:
        self.write(*range(100, 130))
        self.assertEqual(self.owner.faults, [Fault("Failed to keep up", "slow peer")])
        self.assertEqual(self.protocol.queued_bytes, 0)
        received = lines_of(self.wire.read())
        self.assertEqual(received[-1], "ERROR Failed to keep up")
        self.assertLess(len(received), 10)
        self.assertTrue(self.wire.lost)

    def test_a_peer_that_never_reads_again_is_aborted(self) -> None:
        self.write(*range(100, 130))
        self.clock.advance(15.0)
        self.assertTrue(self.wire.aborted)

    def test_lines_are_limited_as_well_as_bytes(self) -> None:
        self.wire.write(b"x" * 200)
        for _ in range(20):
            self.protocol.write(b"\n", 1)
        self.assertEqual(self.owner.faults, [])
        self.protocol.write(b"\n", 1)
        self.assertEqual(len(self.owner.faults), 1)

    def test_a_line_is_counted_when_it_is_written_to_the_transport(self) -> None:
        self.write(*range(100, 110))
        before = self.protocol.status()
        self.assertEqual(before.lines_out * 21 + before.queued_bytes, 210)
        self.wire.read()
        self.wire.read()
        after = self.protocol.status()
        self.assertEqual((after.lines_out, after.bytes_out, after.queued_bytes), (10, 210, 0))

    def test_a_loss_drops_the_queued_lines(self) -> None:
        self.write(*range(100, 110))
        self.wire.lose()
        self.assertEqual(self.protocol.queued_bytes, 0)


class SmallTests(SynchronousTestCase):
    def test_an_empty_queue_takes_no_memory(self) -> None:
        """The sizes are in the tests of the session and of the send buffer."""
        protocol = ReplicationProtocol(Role.MASTER, Owner(), Clock())
        wire = Wire(protocol)
        for _ in range(50):
            protocol.write(b"RDATA s i 1 [1]\n" * 100, 100)
            wire.read()
            protocol.dataReceived(b"PING 1\n" * 1_000)
        self.assertEqual(protocol.queued_bytes, 0)
        self.assertEqual(protocol._buffer, b"")
        wire.lose()

    def test_an_address_is_host_and_port_or_a_path(self) -> None:
        for address, text in [
            (IPv6Address("TCP", "::1", 9092), "[::1]:9092"),
            (UNIXAddress("/run/r.sock"), "unix:/run/r.sock"),
            (UNIXAddress(None), "unix:"),
        ]:
            protocol, transport = ReplicationProtocol(Role.MASTER, Owner(), Clock()), StringTransport(None, address)
            protocol.makeConnection(transport)
            self.assertEqual(protocol.status().address, text)
            protocol.connectionLost()

    def test_a_transport_that_is_lost_within_the_close_leaves_no_timer(self) -> None:
        class Abrupt(StringTransport):
            def loseConnection(self) -> None:
                super().loseConnection()
                protocol.connectionLost()

        clock = Clock()
        protocol = ReplicationProtocol(Role.MASTER, Owner(), clock)
        protocol.makeConnection(Abrupt())
        protocol.close("bye")
        self.assertEqual(clock.getDelayedCalls(), [])


@implementer(IHalfCloseableDescriptor)
class HalfCloseable(Wire):
    """A socket; it may be one with TLS."""

    ended = False  # closed for writing

    def loseWriteConnection(self) -> None:
        self.ended = True

    def readConnectionLost(self, reason: object) -> None:
        """Do nothing: only the reactor calls it."""

    def writeConnectionLost(self, reason: object) -> None:
        """Do nothing: only the reactor calls it."""


class LingerTests(SynchronousTestCase):
    def make(self, role: Role = Role.MASTER) -> None:
        self.clock, self.owner = Clock(), Owner()
        self.protocol = ReplicationProtocol(role, self.owner, self.clock)
        self.wire = HalfCloseable(self.protocol, room=100)
        self.addCleanup(self.wire.lose)

    def test_after_a_fault_input_is_discarded_until_the_peer_closes(self) -> None:
        self.make()
        self.protocol.pauseProducing()
        self.protocol.fail(Fault("Failed to keep up", "slow peer"))
        self.assertEqual(
            (self.wire.ended, self.wire.disconnecting, self.wire.producerState), (True, False, "producing")
        )
        self.protocol.dataReceived(b"PING 1\n" * 9)
        self.assertEqual((self.owner.received, self.protocol.bytes_in), ([], 0))
        self.wire.lose()
        self.assertEqual((self.owner.notes[-1], self.clock.getDelayedCalls()), ("gone", []))

    def test_a_peer_that_does_not_close_is_closed_and_then_aborted(self) -> None:
        self.make()
        self.protocol.fail(Fault("Failed to keep up", "slow peer"))
        self.clock.advance(14.9)
        self.assertFalse(self.wire.disconnecting)
        self.clock.advance(0.1)
        self.assertEqual((self.wire.disconnecting, self.wire.aborted), (True, True))

    def test_a_follower_a_closing_without_a_fault_and_tls_do_not_wait_for_the_peer(self) -> None:
        self.make(Role.WORKER)
        self.protocol.fail(Fault("Wrong remote", "wrong server name"))
        self.assertTrue(self.wire.disconnecting)
        self.make()
        self.protocol.close("server stopping")
        self.assertTrue(self.wire.disconnecting)
        self.make()
        alsoProvides(self.wire, ISSLTransport)
        self.protocol.fail(Fault("Failed to keep up", "slow peer"))
        self.assertTrue(self.wire.disconnecting)


MASTERS_LINES = [
    "SERVER example.com",
    "PING 1",
    "PING",
    "ERROR oh",
    "",
    "\r",
    " ",
    "POSITION s i 1 2",
    "RDATA s i batch [1]",
    "RDATA s i 3 [1]",
    "RDATA s i 4 {}\r",
    "RDATA s j 4 null",
    "RDATA t i 5 [1]",
    "REMOTE_SERVER_UP é",
    "PING \x00",
    "PING " + "x" * 490,
]
WRONG_LINES = [
    "FOO",
    "RDATA s i 3",
    "RDATA s i x [1]",
    "RDATA s i 3 [1",
    "REPLICATE ",
    "POSITION s i 1",
    "x" * 501,
    "\ud8ff",
]


class LineReceiverTests(SynchronousTestCase):
    """As a LineReceiver it receives and answers the same as in bulk, however the bytes are cut."""

    def receive(self, pieces: Sequence[bytes], *, by_line: bool) -> tuple[list[object], bytes, int, bool]:
        clock, owner = Clock(), Owner()
        protocol = ReplicationProtocol(Role.WORKER, owner, clock, Limits(line_limit=500))
        wire = Wire(protocol)
        for piece in pieces:
            if by_line:
                LineReceiver.dataReceived(protocol, piece)
            else:
                protocol.dataReceived(piece)
        received: list[object] = []
        for each in owner.received:
            if isinstance(each, Rows):
                received += [(each.stream, each.instance, *row) for row in zip(each.places, each.texts, strict=True)]
            else:
                received.append(each)
        answer, lines_in, closing = wire.value(), protocol.lines_in, wire.disconnecting
        wire.lose()
        self.assertEqual(clock.getDelayedCalls(), [])
        return received, answer, lines_in, closing

    def test_line_by_line_gives_the_same_as_in_bulk(self) -> None:
        chance = random.Random(10)
        endings = set()
        for _ in range(400):
            lines = chance.choices(MASTERS_LINES, k=chance.randrange(12))
            if chance.random() < 0.5:
                lines.insert(chance.randint(0, len(lines)), chance.choice(WRONG_LINES))
            data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
            if chance.random() < 0.3:
                data += b"x" * chance.choice([3, 500, 501, 2_000])
            places = sorted(chance.choices(range(len(data) + 1), k=chance.randrange(6)))
            pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
            whole = self.receive([data], by_line=False)
            self.assertEqual(self.receive(pieces, by_line=False), whole, pieces)
            self.assertEqual(self.receive(pieces, by_line=True), whole, pieces)
            endings.add(whole[1][:20])
        self.assertGreater(len(endings), 10)
