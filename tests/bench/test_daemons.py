"""A master and a worker as scenarios run them."""

from __future__ import annotations

from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from replication.bench.daemons import Address, Wiring, database_in, make_worker
from replication.bench.rows import STREAM
from replication.errors import RemoteProtocolError
from replication.streams.facts import Fact
from replication.wire.grammar import Token


class WiringTests(SynchronousTestCase):
    def test_a_worker_finds_its_master(self) -> None:
        """Its wire, its HTTP, and a database beside the master's."""
        wiring = Address(9092, 9093).wire_up("/folder")
        self.assertEqual(wiring, Wiring("tcp:127.0.0.1:9092", "http://127.0.0.1:9093", "sqlite:////folder/worker.db"))
        self.assertNotEqual(wiring.database, database_in("/folder", "master"))


class WorkerTests(SynchronousTestCase):
    def test_its_function_decodes_and_counts_rows(self) -> None:
        wiring = Wiring("tcp:127.0.0.1:9092", "http://127.0.0.1:9093", "sqlite://")
        worker, taken = make_worker(MemoryReactorClock(), wiring)
        apply = worker._functions[STREAM]
        apply([Fact(Token(2), ("[1]", "[2]")), Fact(Token(3), ("{}",))], None)
        self.assertEqual(taken, [3])
        with self.assertRaisesRegex(RemoteProtocolError, "not JSON"):
            apply([Fact(Token(4), ("[",))], None)
