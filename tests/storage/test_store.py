"""What the SQL stores do alike, on SQLite."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError, UnknownStreamError
from replication.storage.sqlite.store import SqliteStore
from replication.streams.definitions import StreamDefinition
from tests.contract.stream_store import ORDERS, OTHER, write
from tests.storage.pump import Pump


class SharedTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = SqliteStore(":memory:", self.pump)

    def error(self) -> str:
        return str(self.assertRaises(StoreError, self.pump.wait, self.store.positions(ORDERS)))

    def test_a_store_is_used_after_it_is_opened_and_before_it_is_closed(self) -> None:
        self.store._tables[ORDERS] = self.store._table_of(StreamDefinition(ORDERS))
        self.assertEqual(self.error(), "database ':memory:' is not open")
        self.pump.wait(self.store.open())
        self.pump.wait(self.store.declare(StreamDefinition(ORDERS)))
        self.assertEqual(self.pump.wait(self.store.positions(ORDERS)), {})
        self.pump.wait(self.store.close())
        self.assertEqual(self.error(), "database ':memory:' is closed")
        self.assertIn("is closed", str(self.assertRaises(StoreError, self.pump.wait, self.store.open())))

    def test_a_batch_has_the_tables_of_declared_streams_only(self) -> None:
        """The position of a follower needs no declared stream."""
        self.assertRaises(UnknownStreamError, self.store.batch, [write(2)], None)
        ((table, _),) = self.store.batch([write(2, follower=OTHER)], None).writes
        self.assertEqual(table.definition.name, "followed")
