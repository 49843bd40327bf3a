"""What tests of a master share: a master in memory, and connections to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.net.protocol import Limits
from replication.session.connection import Keepalive
from replication.streams.definitions import StreamDefinition
from replication.writer.master import Master
from tests.doubles import FragileStore, Net, SharedStore, Wire, begin, connect, lines_of, now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.wire.grammar import Token

ORDERS = StreamDefinition("orders", row=("order_id", "state"))
POSITIONS = ["POSITION orders master 1 1", "POSITION caches master 1 1"]


class MasterCase(SynchronousTestCase):
    limits = Limits(keepalive=Keepalive(ping_after=1_000, give_up_after=3_000))

    def setUp(self) -> None:
        self.net, self.store = Net(), self.make_store()
        self.master = self.make_master()
        self.wires: list[Wire] = []

    def tearDown(self) -> None:
        self.store.gates.clear()
        self.store.errors.clear()
        stopped = begin(self.master.stop())
        for wire in self.wires:
            if not wire.lost:
                wire.read()
                wire.lose()
        self.assertEqual(stopped, [None])
        self.assertEqual(self.net.getDelayedCalls(), [])

    def make_store(self) -> FragileStore:
        return FragileStore()

    def make_master(self, **options: Any) -> Master:
        given: dict[str, Any] = {"server_name": "example.com", "streams": [ORDERS], "limits": self.limits, **options}
        return Master(database=self.store, reactor=self.net, wall=lambda: 1_700.5, **given)

    def connect(self, *lines: str, room: int = 64 * 1024) -> Wire:
        wire = connect(self.master.factory(), room)
        self.wires.append(wire)
        self.send(wire, *lines)
        return wire

    def send(self, wire: Wire, *lines: str) -> None:
        wire.protocol.dataReceived("".join(f"{line}\n" for line in lines).encode())

    def new_lines(self, wire: Wire) -> list[str]:
        self.net.advance(0)
        return lines_of(wire.read())

    def greeted(self, *lines: str) -> Wire:
        """Connect, and drop the greeting."""
        wire = self.connect(*lines)
        self.new_lines(wire)
        return wire

    def append(self, *states: str) -> Sequence[Token]:
        return now(self.master.stream("orders").append([[["o", state]] for state in states]))

    def hold(self, stream: str = "orders") -> Any:
        reservation = self.master.stream(stream).reserve()
        return reservation, now(reservation.__aenter__())


class SharedCase(MasterCase):
    """A started master on a database that other processes write too."""

    def make_store(self) -> SharedStore:
        self.shared = SharedStore()
        return self.shared

    def setUp(self) -> None:
        super().setUp()
        now(self.master.start())
