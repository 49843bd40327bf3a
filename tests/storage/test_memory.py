"""The store in memory, which other tests compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError, StoreError
from replication.storage.memory import MemoryStore
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import Token
from tests.contract.stream_store import ME, ORDERS, StreamStoreContract, facts, write

if TYPE_CHECKING:
    from replication.storage.receipts import ReceiptClock


class MemoryStoreTests(StreamStoreContract, SynchronousTestCase):
    def make_store(self, clock: ReceiptClock) -> MemoryStore:
        return MemoryStore(clock)

    def test_there_is_no_sql(self) -> None:
        transaction = self.store.transaction()
        self.assertRaises(StoreError, self.wait, transaction.execute("SELECT 1"))
        self.assertRaises(StoreError, self.wait, transaction.executemany("SELECT 1", [()]))

    def test_a_stream_cannot_be_mapped_onto_a_table(self) -> None:
        mapped = StreamDefinition("events", table="events", row=["event_id"])
        self.assertIn("events", str(self.assertRaises(SchemaError, self.wait, self.store.declare(mapped))))

    def test_the_writers_of_a_range_of_facts(self) -> None:
        self.commit(write(3, facts(2, 3)))
        self.store.note_former(ORDERS, [ME])
        found = [self.wait(self.store.writers(ORDERS, after=Token(1), upto=Token(upto))) for upto in (1, 2, 9)]
        self.assertEqual(found, [{}, {ME: 2}, {ME: 3}])

    def test_what_was_kept_is_there_after_closing_and_opening(self) -> None:
        self.commit(write(2, facts(2)))
        self.wait(self.store.close())
        self.wait(self.store.open())
        self.assertEqual(self.tokens(), [2])
