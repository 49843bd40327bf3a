"""The broadcast: all connections share the bytes of a reactor turn, or get only the streams that they want."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.net.broadcast import Broadcast
from replication.net.protocol import Limits, ReplicationProtocol
from replication.net.slow_peers import HOLD
from replication.session import encoder
from replication.session.connection import Role
from replication.session.encoder import EncodedLines
from replication.wire.grammar import StreamName
from tests.doubles import Wire, lines_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.session.connection import Fault, Received

ORDERS, CACHES, STOCK = StreamName("orders"), StreamName("caches"), StreamName("stock")


class Owner:
    """Adds connections to a broadcast and removes them, as a master does."""

    def __init__(self, connections: Broadcast) -> None:
        self.broadcast = connections
        self.faults: list[str] = []
        self.resting = 0

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        self.broadcast.add(peer)

    def commands_received(self, peer: ReplicationProtocol, received: Sequence[Received]) -> None:
        """Do nothing."""

    def peer_failed(self, peer: ReplicationProtocol, fault: Fault) -> None:
        self.faults.append(fault.kind)

    def peer_disconnected(self, peer: ReplicationProtocol) -> None:
        self.broadcast.remove(peer)

    def transport_closed(self, peer: ReplicationProtocol) -> None:
        """Do nothing."""


class CountedWire(Wire):
    """Counts writes."""

    writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1
        super().write(data)


class BroadcastTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.broadcast = Broadcast(self.clock)
        self.owner = Owner(self.broadcast)
        self.wires: list[CountedWire] = []

    def tearDown(self) -> None:
        self.broadcast.flush()
        for wire in self.wires:
            wire.lose()
        self.assertEqual([*self.broadcast], [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def connect(self, room: int = 64 * 1024) -> CountedWire:
        limits = Limits(max_queued_bytes=1_000)
        wire = CountedWire(ReplicationProtocol(Role.MASTER, self.owner, self.clock, limits), room)
        self.wires.append(wire)
        return wire

    def put(self, stream: StreamName, *numbers: int) -> None:
        for number in numbers:
            self.broadcast.publish(stream, EncodedLines(b"RDATA %s i %d []\n" % (stream.encode(), number), 1))

    def restrict(self, wire: Wire, *streams: StreamName) -> None:
        self.broadcast.restrict(wire.protocol, frozenset(streams) or None)

    def numbers(self, wire: Wire) -> list[str]:
        return [line.removeprefix("RDATA ").removesuffix(" []").replace(" i", "") for line in lines_of(wire.read())]

    def test_the_lines_of_one_turn_are_one_write_at_its_end(self) -> None:
        one, two = self.connect(), self.connect()
        self.put(ORDERS, 1, 2)
        self.put(CACHES, 3)
        self.assertEqual((one.value(), two.value()), (b"", b""))
        self.clock.advance(0)
        for wire in (one, two):
            self.assertEqual(wire.writes, 1)
            self.assertEqual(self.numbers(wire), ["orders 1", "orders 2", "caches 3"])

    def test_the_receivers_of_a_stream_are_known(self) -> None:
        one, two, three = self.connect(), self.connect(), self.connect()
        self.restrict(two, ORDERS, STOCK)
        self.restrict(three, CACHES)
        self.assertEqual(self.broadcast.receivers(ORDERS), [one.protocol, two.protocol])
        self.assertEqual(self.broadcast.receivers(CACHES), [one.protocol, three.protocol])

    def test_each_line_is_sent_once(self) -> None:
        wire = self.connect()
        self.put(ORDERS, 1)
        self.broadcast.flush()
        self.clock.advance(0)
        self.put(ORDERS, 2)
        self.clock.advance(0)
        self.clock.advance(1)
        self.assertEqual(self.numbers(wire), ["orders 1", "orders 2"])

    def test_trap_21_without_connections_nothing_is_kept(self) -> None:
        self.put(ORDERS, 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.numbers(self.connect()), [])

    def test_a_new_connection_gets_what_is_put_from_then_on(self) -> None:
        one = self.connect()
        self.put(ORDERS, 1)
        two = self.connect()
        self.put(ORDERS, 2)
        self.clock.advance(0)
        self.assertEqual(self.numbers(one), ["orders 1", "orders 2"])
        self.assertEqual(self.numbers(two), ["orders 2"])

    def test_a_connection_gets_only_the_streams_that_it_asked_for(self) -> None:
        everything, some, none = self.connect(), self.connect(), self.connect()
        self.restrict(some, ORDERS, STOCK)
        self.restrict(none, StreamName("unknown"))
        for number in range(3):
            self.put(ORDERS, number)
            self.put(CACHES, number)
        self.clock.advance(0)
        self.assertEqual(len(self.numbers(everything)), 6)
        self.assertEqual(self.numbers(some), ["orders 0", "orders 1", "orders 2"])
        self.assertEqual(self.numbers(none), [])

    def test_a_restriction_holds_from_the_moment_it_is_set(self) -> None:
        wire = self.connect()
        self.put(CACHES, 1)
        self.restrict(wire, ORDERS)
        self.put(CACHES, 2)
        self.restrict(wire)
        self.put(CACHES, 3)
        self.clock.advance(0)
        self.assertEqual(self.numbers(wire), ["caches 1", "caches 3"])

    def test_a_connection_that_is_slowed_down_receives_all_in_order_ten_times_a_second(self) -> None:
        fast, slow = self.connect(), self.connect()
        self.put(ORDERS, 1)
        self.broadcast.slow_down(slow.protocol)
        for number in (2, 3):
            self.put(ORDERS, number)
            self.clock.advance(0)
        self.assertEqual(self.numbers(fast), ["orders 1", "orders 2", "orders 3"])
        self.assertEqual(self.numbers(slow), ["orders 1"])
        self.clock.advance(HOLD)
        self.assertEqual(self.numbers(slow), ["orders 2", "orders 3"])
        self.put(ORDERS, 4)
        self.clock.advance(0)
        self.broadcast.speed_up(slow.protocol)
        self.assertEqual(self.numbers(slow), ["orders 4"])

    def test_whether_a_connection_is_here_is_found_without_a_look_at_all(self) -> None:
        one, two = self.connect(), self.connect()
        two.lose()
        with patch.object(Broadcast, "__iter__", side_effect=AssertionError):
            self.assertIn(one.protocol, self.broadcast)
            self.assertNotIn(two.protocol, self.broadcast)

    def test_restricting_a_lost_connection_does_not_add_it_again(self) -> None:
        wire = self.connect()
        wire.lose()
        self.restrict(wire, ORDERS)
        self.assertEqual(list(self.broadcast), [])

    def test_peers_that_want_the_same_share_the_bytes(self) -> None:
        wires = [self.connect(room=-1) for _ in range(3)]  # the transport takes nothing
        for wire in wires:
            wire.protocol._producer.pauseProducing()
            self.restrict(wire, ORDERS, CACHES)
        self.put(ORDERS, 1, 2)
        self.clock.advance(0)
        chunks = {id(wire.protocol._send_buffer._chunks[0][0]) for wire in wires}
        self.assertEqual(len(chunks), 1)

    def test_a_peer_that_cannot_keep_up_is_closed_and_the_others_get_everything(self) -> None:
        quick, slow, other = self.connect(), self.connect(room=10), self.connect()
        for number in range(200):
            self.put(ORDERS, number)
            self.clock.advance(0)
        self.assertEqual(self.owner.faults, ["slow peer"])
        self.assertEqual(list(self.broadcast), [quick.protocol, other.protocol])
        for wire in (quick, other):
            self.assertEqual(self.numbers(wire), [f"orders {number}" for number in range(200)])
        self.assertEqual(lines_of(slow.read())[-1], "ERROR Failed to keep up")

    def test_after_an_unexpected_error_each_peer_that_lacks_lines_is_disconnected(self) -> None:
        """It fetches them when it is back; before, the lines of the next turn hid that they were missing."""
        usual, slow = self.connect(), self.connect()
        self.broadcast.slow_down(slow.protocol)
        self.put(ORDERS, 1)
        with patch.object(ReplicationProtocol, "write", side_effect=ZeroDivisionError):
            self.assertRaises(ZeroDivisionError, self.clock.advance, 0)
            self.assertEqual((usual.aborted, slow.aborted), (True, True))
        slow = self.connect()
        self.broadcast.slow_down(slow.protocol)
        self.put(ORDERS, 2)
        self.clock.advance(0)
        with patch.object(ReplicationProtocol, "write", side_effect=ZeroDivisionError):
            self.assertRaises(ZeroDivisionError, self.clock.advance, HOLD)
        self.assertTrue(slow.aborted)

    def test_many_lines_of_one_turn_are_cut_into_pieces(self) -> None:
        self.patch(encoder, "PIECE_BYTES", 100)
        wire = self.connect()
        self.put(ORDERS, *range(100, 200))
        self.clock.advance(0)
        self.assertGreater(wire.writes, 10)
        self.assertEqual(self.numbers(wire), [f"orders {number}" for number in range(100, 200)])

    def test_connections_are_listed_oldest_first_and_may_change_during_iteration(self) -> None:
        wires = [self.connect() for _ in range(3)]
        for peer, wire in zip(self.broadcast, wires, strict=True):
            self.assertIs(peer, wire.protocol)
            wire.lose()
        self.assertEqual([*self.broadcast], [])
