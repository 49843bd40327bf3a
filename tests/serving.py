"""What tests of a process that writes and is followed begin with: one in memory, and peers that speak to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.master import Master
from replication.net.protocol import Limits
from replication.session.connection import Keepalive
from replication.streams.registry import StreamDefinition
from tests.doubles import FragileStore, Net, Wire, begin, connect, lines_of, now

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
        self.say(wire, *lines)
        return wire

    def say(self, wire: Wire, *lines: str) -> None:
        wire.protocol.dataReceived("".join(f"{line}\n" for line in lines).encode())

    def news(self, wire: Wire) -> list[str]:
        self.net.advance(0)
        return lines_of(wire.read())

    def greeted(self, *lines: str) -> Wire:
        """Connect, and take no notice of the greeting."""
        wire = self.connect(*lines)
        self.news(wire)
        return wire

    def append(self, *states: str) -> Sequence[Token]:
        return now(self.master.stream("orders").append([[["o", state]] for state in states]))

    def hold(self, stream: str = "orders") -> Any:
        reservation = self.master.stream(stream).reserve()
        return reservation, now(reservation.__aenter__())
