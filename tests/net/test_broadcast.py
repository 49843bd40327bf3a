"""Who is told what: everybody the same bytes, once a reactor turn, or only the streams that they asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.net import broadcast
from replication.net.broadcast import Broadcast
from replication.net.protocol import Limits, ReplicationProtocol
from replication.session.connection import Role
from replication.session.feed import Chunk
from replication.wire.grammar import StreamName
from tests.doubles import Wire, lines_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.session.connection import Fault, Heard

ORDERS, CACHES, STOCK = StreamName("orders"), StreamName("caches"), StreamName("stock")


class Notebook:
    """A conversation that keeps a broadcast's list of connections right, as a master does."""

    def __init__(self, told: Broadcast) -> None:
        self.told = told
        self.faults: list[str] = []

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        self.told.add(peer)

    def peer_said(self, peer: ReplicationProtocol, heard: Sequence[Heard]) -> None:
        """It says nothing here."""

    def peer_faulted(self, peer: ReplicationProtocol, fault: Fault) -> None:
        self.faults.append(fault.kind)

    def peer_lost(self, peer: ReplicationProtocol) -> None:
        self.told.remove(peer)

    def peer_gone(self, peer: ReplicationProtocol) -> None:
        """Nothing is kept of it."""


class CountedWire(Wire):
    """Counts writes."""

    writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1
        super().write(data)


class BroadcastTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.told = Broadcast(self.clock)
        self.notebook = Notebook(self.told)
        self.wires: list[CountedWire] = []

    def tearDown(self) -> None:
        self.told.flush()
        for wire in self.wires:
            wire.lose()
        self.assertEqual(len(self.told), 0)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def connect(self, room: int = 64 * 1024) -> CountedWire:
        limits = Limits(max_queued_bytes=1_000)
        wire = CountedWire(ReplicationProtocol(Role.MASTER, self.notebook, self.clock, limits), room)
        self.wires.append(wire)
        return wire

    def put(self, stream: StreamName, *numbers: int) -> None:
        for number in numbers:
            self.told.put(stream, Chunk(b"RDATA %s i %d []\n" % (stream.encode(), number), 1))

    def restrict(self, wire: Wire, *streams: StreamName) -> None:
        self.told.restrict(wire.protocol, streams)

    def numbers(self, wire: Wire) -> list[str]:
        return [line.removeprefix("RDATA ").removesuffix(" []").replace(" i", "") for line in lines_of(wire.read())]

    def test_what_one_turn_brings_goes_out_together_at_its_end(self) -> None:
        one, two = self.connect(), self.connect()
        self.put(ORDERS, 1, 2)
        self.put(CACHES, 3)
        self.assertEqual((one.value(), two.value()), (b"", b""))
        self.clock.advance(0)
        for wire in (one, two):
            self.assertEqual(wire.writes, 1)
            self.assertEqual(self.numbers(wire), ["orders 1", "orders 2", "caches 3"])

    def test_each_turn_is_told_once(self) -> None:
        wire = self.connect()
        self.put(ORDERS, 1)
        self.told.flush()
        self.clock.advance(0)
        self.put(ORDERS, 2)
        self.clock.advance(0)
        self.clock.advance(1)
        self.assertEqual(self.numbers(wire), ["orders 1", "orders 2"])

    def test_trap_21_with_nobody_there_nothing_is_kept(self) -> None:
        self.put(ORDERS, 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.numbers(self.connect()), [])

    def test_who_comes_late_is_told_what_is_new(self) -> None:
        one = self.connect()
        self.put(ORDERS, 1)
        two = self.connect()
        self.put(ORDERS, 2)
        self.clock.advance(0)
        self.assertEqual(self.numbers(one), ["orders 1", "orders 2"])
        self.assertEqual(self.numbers(two), ["orders 2"])

    def test_who_asks_for_some_streams_gets_those_and_the_others_all(self) -> None:
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

    def test_a_restriction_begins_and_ends_where_it_is_asked_for(self) -> None:
        wire = self.connect()
        self.put(CACHES, 1)
        self.restrict(wire, ORDERS)
        self.put(CACHES, 2)
        self.restrict(wire)
        self.put(CACHES, 3)
        self.clock.advance(0)
        self.assertEqual(self.numbers(wire), ["caches 1", "caches 3"])

    def test_restricting_who_is_gone_does_not_bring_it_back(self) -> None:
        wire = self.connect()
        wire.lose()
        self.restrict(wire, ORDERS)
        self.assertEqual(list(self.told), [])

    def test_peers_that_want_the_same_share_the_bytes(self) -> None:
        wires = [self.connect(room=-1) for _ in range(3)]  # the transport takes nothing
        for wire in wires:
            wire.protocol._valve.pauseProducing()
            self.restrict(wire, ORDERS, CACHES)
        self.put(ORDERS, 1, 2)
        self.clock.advance(0)
        chunks = {id(wire.protocol._outbox._chunks[0][0]) for wire in wires}
        self.assertEqual(len(chunks), 1)

    def test_who_cannot_keep_up_goes_and_the_others_are_told_all(self) -> None:
        quick, slow, other = self.connect(), self.connect(room=10), self.connect()
        for number in range(200):
            self.put(ORDERS, number)
            self.clock.advance(0)
        self.assertEqual(self.notebook.faults, ["slow peer"])
        self.assertEqual(list(self.told), [quick.protocol, other.protocol])
        for wire in (quick, other):
            self.assertEqual(self.numbers(wire), [f"orders {number}" for number in range(200)])
        self.assertEqual(lines_of(slow.read())[-1], "ERROR Failed to keep up")

    def test_a_long_turn_is_cut_into_pieces_that_a_slow_peers_queue_can_measure(self) -> None:
        self.patch(broadcast, "CHUNK_BYTES", 100)
        wire = self.connect()
        self.put(ORDERS, *range(100, 200))
        self.clock.advance(0)
        self.assertGreater(wire.writes, 10)
        self.assertEqual(self.numbers(wire), [f"orders {number}" for number in range(100, 200)])

    def test_connections_are_listed_oldest_first_and_the_list_may_change_meanwhile(self) -> None:
        wires = [self.connect() for _ in range(3)]
        for peer, wire in zip(self.told, wires, strict=True):
            self.assertIs(peer, wire.protocol)
            wire.lose()
        self.assertEqual(len(self.told), 0)
