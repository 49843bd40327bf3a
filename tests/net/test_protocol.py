"""The skin: it keeps time, holds back what a peer does not read, and says why before it hangs up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from twisted.internet.address import IPv6Address, UNIXAddress
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.protocols.basic import LineReceiver
from twisted.trial.unittest import SynchronousTestCase

from replication.net.protocol import Limits, ReplicationProtocol
from replication.session import outbox
from replication.session.connection import Fault, Keepalive, Role, Rows
from replication.wire.commands import Error, Name, Ping, Position, Server
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import Wire, lines_of, logged, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.session.connection import Heard


class Listener:
    """A conversation that takes notes; ``then`` is done when something is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.heard: list[Heard] = []
        self.faults: list[Fault] = []
        self.fault_ends_it = False

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        self.notes.append("connected")

    def peer_said(self, peer: ReplicationProtocol, heard: Sequence[Heard]) -> None:
        self.heard += heard
        if self.fault_ends_it:
            peer.close("enough")

    def peer_faulted(self, peer: ReplicationProtocol, fault: Fault) -> None:
        self.notes.append("faulted")
        self.faults.append(fault)

    def peer_lost(self, peer: ReplicationProtocol) -> None:
        self.notes.append("lost")

    def peer_gone(self, peer: ReplicationProtocol) -> None:
        self.notes.append("gone")


class ProtocolCase(SynchronousTestCase):
    role = Role.MASTER
    limits = Limits()

    def setUp(self) -> None:
        self.clock, self.listener = Clock(), Listener()
        self.protocol = ReplicationProtocol(self.role, self.listener, self.clock, self.limits, wall=lambda: 1234.5)
        self.wire = Wire(self.protocol, room=100)

    def tearDown(self) -> None:
        self.wire.lose()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.listener.notes.count("lost"), 1)
        self.assertEqual(self.listener.notes[-1], "gone")

    def say(self, *lines: str) -> None:
        self.protocol.dataReceived("".join(f"{line}\n" for line in lines).encode())

    def said(self) -> list[str]:
        return lines_of(self.wire.read())


class ConversationTests(ProtocolCase):
    def test_what_is_read_is_told_in_order_and_in_one_piece(self) -> None:
        self.say("NAME one", "PING 1", "REPLICATE ")
        self.assertEqual(self.listener.heard[:2], [Name("one"), Ping("1")])
        self.assertEqual(self.protocol.status().last_command, "REPLICATE")
        self.assertEqual((self.protocol.lines_in, self.protocol.bytes_in), (3, len("NAME one\nPING 1\nREPLICATE \n")))

    def test_several_commands_are_one_write(self) -> None:
        self.protocol.say(Server("example.com"), Ping("7"))
        self.assertEqual(self.said(), ["SERVER example.com", "PING 7"])
        self.assertEqual(self.protocol.status().lines_out, 2)

    def test_small_writes_are_not_delayed(self) -> None:
        self.assertTrue(self.wire.no_delay)

    def test_a_fault_comes_after_what_was_right_before_it(self) -> None:
        self.say("PING 1", "FOO bar", "PING 2")
        self.assertEqual(self.listener.heard, [Ping("1")])
        (error,) = self.said()
        self.assertEqual(error, "ERROR line 2: unknown command: 'FOO', in 'FOO bar'")
        self.assertEqual(self.listener.faults, [Fault(error.removeprefix("ERROR "), "unknown command")])
        self.assertTrue(self.wire.lost)

    def test_trap_3_what_a_peer_says_is_never_a_format(self) -> None:
        self.say("FOO 100% %s %(x)s {peer} {0}")
        self.assertEqual(self.said(), ["ERROR line 1: unknown command: 'FOO', in 'FOO 100% %s %(x)s {peer} {0}'"])

    def test_trap_4_bytes_that_are_no_text_get_an_answer(self) -> None:
        self.protocol.dataReceived(b"NAME \xff\n")
        self.assertIn("ERROR line 1: not UTF-8 at byte 6", self.said()[0])

    def test_an_error_from_the_peer_closes_nothing(self) -> None:
        self.say("ERROR something", "PING 1")
        self.assertEqual(self.listener.heard, [Error("something"), Ping("1")])
        self.assertFalse(self.wire.disconnecting)

    def test_nothing_is_heard_or_said_after_the_end(self) -> None:
        self.protocol.close("that is all")
        self.say("PING 1")
        self.protocol.say(Ping("2"))
        self.protocol.write(b"RDATA s i 1 []\n", 1)
        self.protocol.fail(Fault("again", "again"))
        self.protocol.close("again")
        self.assertEqual(self.said(), ["ERROR that is all"])
        self.assertEqual((self.listener.heard, self.listener.faults), ([], []))

    def test_an_owner_that_closes_while_it_hears_hears_of_no_fault(self) -> None:
        self.listener.fault_ends_it = True
        self.say("PING 1", "FOO")
        self.assertEqual(self.said(), ["ERROR enough"])
        self.assertEqual(self.listener.faults, [])

    def test_a_reason_that_no_line_can_hold_is_logged_and_the_rest_goes_on(self) -> None:
        with logged() as said:
            self.protocol.close("two\nlines")
        self.assertIn("two\\nlines", said[0])
        self.assertEqual(self.said(), [])
        self.assertTrue(self.wire.lost)

    def test_a_loss_is_told_once_however_it_came_about(self) -> None:
        self.protocol.close()
        self.assertEqual(self.listener.notes, ["connected", "lost"])
        self.wire.lose()
        self.assertEqual(self.listener.notes, ["connected", "lost", "gone"])

    def test_a_connection_that_breaks_is_lost_and_gone_at_once(self) -> None:
        self.wire.lose()
        self.assertEqual(self.listener.notes, ["connected", "lost", "gone"])
        self.protocol.say(Ping("1"))


class DirectionTests(ProtocolCase):
    role = Role.WORKER

    def test_a_run_of_rows_is_heard_as_one(self) -> None:
        self.say("RDATA s i batch [1]", "RDATA s i 3 [2]", "POSITION s i 3 4")
        rows = Rows(StreamName("s"), InstanceName("i"), [None, Token(3)], ["[1]", "[2]"])
        self.assertEqual(self.listener.heard, [rows, Position(StreamName("s"), InstanceName("i"), Token(3), Token(4))])
        self.assertEqual(self.protocol.lines_in, 3)

    def test_rows_count_as_rdata(self) -> None:
        self.say("RDATA s i 3 [2]")
        self.assertEqual(self.protocol.status().last_command, "RDATA")

    def test_what_the_other_side_may_not_say_ends_it(self) -> None:
        self.say("REPLICATE ")
        self.assertIn("ERROR line 1: invalid command: REPLICATE", self.said()[0])
        self.assertEqual(self.listener.faults[0].kind, "wrong direction")


class KeepaliveTests(ProtocolCase):
    def test_we_ping_after_five_seconds_of_our_own_silence(self) -> None:
        self.clock.advance(4.9)
        self.assertEqual(self.said(), [])
        self.clock.advance(0.1)
        self.assertEqual(self.said(), ["PING 1234500"])
        self.clock.pump([5.0] * 3)
        self.assertEqual(self.said(), ["PING 1234500"] * 3)

    def test_whatever_we_say_puts_the_ping_off(self) -> None:
        self.clock.advance(3.0)
        self.protocol.write(b"POSITION s i 1 1\n", 1)
        self.said()
        self.clock.advance(4.9)
        self.assertEqual(self.said(), [])
        self.clock.advance(0.1)
        self.assertEqual(words_of(self.wire.read()), ["PING"])

    def test_a_peer_that_never_pinged_may_be_silent_for_ever(self) -> None:
        self.say("NAME netcat")
        self.clock.pump([5.0] * 100)
        self.assertFalse(self.wire.disconnecting)

    def test_trap_2_a_peer_that_pinged_is_given_up_after_fifteen_seconds_of_silence_and_no_less(self) -> None:
        self.clock.advance(1.0)
        self.say("PING 1")
        self.clock.pump([1.0] * 14)
        self.assertFalse(self.wire.disconnecting)
        self.clock.advance(1.0)
        self.assertEqual(self.said()[-1], "ERROR ping timeout: nothing heard for 15 s")
        self.assertEqual(self.listener.faults[0].kind, "ping timeout")
        self.assertTrue(self.wire.lost)

    def test_any_right_command_is_a_sign_of_life_and_a_blank_line_is_none(self) -> None:
        self.say("PING 1")
        for _ in range(3):
            self.clock.advance(10.0)
            self.say("NAME x")
        self.clock.advance(10.0)
        self.assertFalse(self.wire.disconnecting)
        self.say("", " ", "\r")
        self.clock.advance(5.0)
        self.assertTrue(self.wire.disconnecting)

    def test_a_connection_that_we_close_and_that_lingers_is_aborted(self) -> None:
        self.wire.write(b"x" * 200)
        self.protocol.close("server stopping")
        self.clock.advance(14.9)
        self.assertFalse(self.wire.aborted)
        self.clock.advance(0.1)
        self.assertTrue(self.wire.aborted)


class ShortKeepaliveTests(ProtocolCase):
    limits = Limits(keepalive=Keepalive(ping_after=100.0, give_up_after=2.0))

    def test_both_times_can_be_set_and_neither_waits_for_the_other(self) -> None:
        self.clock.advance(50.0)
        self.say("PING 1")
        self.clock.advance(1.9)
        self.assertFalse(self.wire.disconnecting)
        self.clock.advance(0.1)
        self.assertEqual(self.said(), ["ERROR ping timeout: nothing heard for 2 s"])

    def test_lingering_is_as_long_as_silence(self) -> None:
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

    def test_what_a_peer_does_not_read_waits_and_goes_on_in_order(self) -> None:
        self.write(*range(100, 115))
        self.assertGreater(self.protocol.queued_bytes, 0)
        received = b""
        while data := self.wire.read(50):  # a little at a time: paused and resumed again and again
            received += data
        self.assertEqual(received, b"".join(map(self.position, range(100, 115))))
        self.assertEqual(self.protocol.queued_bytes, 0)
        self.write(115)
        self.assertEqual(self.wire.read(), self.position(115))

    def test_it_may_be_paused_again_halfway_through_what_waits(self) -> None:
        self.patch(outbox, "JOINED_BYTES", 1)
        self.write(*range(100, 119))
        self.wire.read(21)
        self.assertGreater(self.protocol.queued_bytes, 200)
        self.assertLess(len(self.wire.value()), 150)
        self.write(119)
        received = b""
        while data := self.wire.read(70):
            received += data
        self.assertEqual(received, b"".join(map(self.position, range(101, 120))))

    def test_what_is_said_stays_behind_what_waits(self) -> None:
        self.write(*range(100, 107))
        self.protocol.say(Ping("1"))
        self.wire.read()
        self.assertEqual(self.said()[-1], "PING 1")

    def test_trap_6_over_the_bound_the_error_goes_past_what_waits(self) -> None:
        self.write(*range(100, 130))
        self.assertEqual(self.listener.faults, [Fault("Failed to keep up", "slow peer")])
        self.assertEqual(self.protocol.queued_bytes, 0)
        received = lines_of(self.wire.read())
        self.assertEqual(received[-1], "ERROR Failed to keep up")
        self.assertLess(len(received), 10)
        self.assertTrue(self.wire.lost)

    def test_a_peer_that_never_reads_again_is_aborted(self) -> None:
        self.write(*range(100, 130))
        self.clock.advance(15.0)
        self.assertTrue(self.wire.aborted)

    def test_lines_count_as_well_as_bytes(self) -> None:
        self.wire.write(b"x" * 200)
        for _ in range(20):
            self.protocol.write(b"\n", 1)
        self.assertEqual(self.listener.faults, [])
        self.protocol.write(b"\n", 1)
        self.assertEqual(len(self.listener.faults), 1)

    def test_every_line_is_counted_when_it_leaves(self) -> None:
        self.write(*range(100, 110))
        before = self.protocol.status()
        self.assertEqual(before.lines_out * 21 + before.queued_bytes, 210)
        self.wire.read()
        self.wire.read()
        after = self.protocol.status()
        self.assertEqual((after.lines_out, after.bytes_out, after.queued_bytes), (10, 210, 0))

    def test_a_loss_forgets_what_waits(self) -> None:
        self.write(*range(100, 110))
        self.wire.lose()
        self.assertEqual(self.protocol.queued_bytes, 0)


class SmallTests(SynchronousTestCase):
    def test_a_connection_with_nothing_waiting_holds_no_memory_for_it(self) -> None:
        """So much for what is ours; how much that is, the session's and outbox' own tests say."""
        protocol = ReplicationProtocol(Role.MASTER, Listener(), Clock())
        wire = Wire(protocol)
        for _ in range(50):
            protocol.write(b"RDATA s i 1 [1]\n" * 100, 100)
            wire.read()
            protocol.dataReceived(b"PING 1\n" * 1_000)
        self.assertEqual(protocol.queued_bytes, 0)
        self.assertEqual(protocol._buffer, b"")
        wire.lose()

    def test_addresses_are_written_as_people_write_them(self) -> None:
        for address, text in [
            (IPv6Address("TCP", "::1", 9092), "[::1]:9092"),
            (UNIXAddress("/run/r.sock"), "unix:/run/r.sock"),
            (UNIXAddress(None), "unix:"),
        ]:
            protocol, transport = ReplicationProtocol(Role.MASTER, Listener(), Clock()), StringTransport(None, address)
            protocol.makeConnection(transport)
            self.assertEqual(protocol.status().address, text)
            protocol.connectionLost()

    def test_a_transport_that_is_gone_as_soon_as_it_is_closed_leaves_no_timer(self) -> None:
        class Abrupt(StringTransport):
            def loseConnection(self) -> None:
                super().loseConnection()
                protocol.connectionLost()

        clock = Clock()
        protocol = ReplicationProtocol(Role.MASTER, Listener(), clock)
        protocol.makeConnection(Abrupt())
        protocol.close("bye")
        self.assertEqual(clock.getDelayedCalls(), [])


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
    """Driven as the LineReceiver that it is, it hears and answers the same as in bulk, however the bytes are cut."""

    def hear(self, pieces: Sequence[bytes], *, by_line: bool) -> tuple[list[object], bytes, int, bool]:
        clock, listener = Clock(), Listener()
        protocol = ReplicationProtocol(Role.WORKER, listener, clock, Limits(line_limit=500))
        wire = Wire(protocol)
        for piece in pieces:
            if by_line:
                LineReceiver.dataReceived(protocol, piece)
            else:
                protocol.dataReceived(piece)
        heard: list[object] = []
        for each in listener.heard:
            if isinstance(each, Rows):
                heard += [(each.stream, each.instance, *row) for row in zip(each.places, each.texts, strict=True)]
            else:
                heard.append(each)
        answer, lines_in, closing = wire.value(), protocol.lines_in, wire.disconnecting
        wire.lose()
        self.assertEqual(clock.getDelayedCalls(), [])
        return heard, answer, lines_in, closing

    def test_by_the_line_is_as_in_bulk(self) -> None:
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
            whole = self.hear([data], by_line=False)
            self.assertEqual(self.hear(pieces, by_line=False), whole, pieces)
            self.assertEqual(self.hear(pieces, by_line=True), whole, pieces)
            endings.add(whole[1][:20])
        self.assertGreater(len(endings), 10)
