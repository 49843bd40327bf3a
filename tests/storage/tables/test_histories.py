"""The table of histories: created by the first that is stored, and missing in databases of version 0.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage import open_store
from replication.storage.tables.histories import get_timeline
from replication.streams.history import Epoch
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from replication.streams.interfaces import IStreamStore

ORDERS, MASTER = StreamName("orders"), InstanceName("master")
HISTORY = [Epoch("a", Token(1), Token(1)), Epoch("b", Token(4), Token(6))]


class SqliteTests(SynchronousTestCase):
    TIMELINE = ""
    RENAMED: ClassVar[list[Epoch]] = HISTORY  # what a follower that was renamed finds: positions have no name in SQLite

    def setUp(self) -> None:
        self.pump = Pump()
        self.place = self.make_place()
        self.store = self.open(read_only=False)

    def make_place(self) -> str:
        return f"sqlite:///{self.mktemp()}"

    def open(self, *, read_only: bool) -> IStreamStore:
        store = open_store(self.place, self.pump, read_only=read_only)
        self.pump.wait(store.open())
        self.addCleanup(lambda: self.pump.wait(store.close()))
        return store

    def test_a_reader_of_a_database_without_the_table_finds_no_history(self) -> None:
        reader = self.open(read_only=True)
        self.assertEqual([*self.pump.wait(reader.history(ORDERS, MASTER))], [])
        self.pump.wait(self.store.store_histories(MASTER, {ORDERS: HISTORY}))
        self.assertEqual([*self.pump.wait(reader.history(ORDERS, MASTER))], HISTORY)

    def test_a_history_that_cannot_be_read_is_named(self) -> None:
        self.pump.wait(self.store.store_histories(MASTER, {ORDERS: HISTORY}))
        transaction = self.store.transaction()
        self.pump.wait(transaction.execute("UPDATE stream_histories SET epochs = '[1]'"))
        self.pump.wait(transaction.commit([]))
        with self.assertRaises(StoreError) as caught:
            self.pump.wait(self.store.history(ORDERS, MASTER))
        self.assertIn("the history of 'master' in stream 'orders' cannot be read", str(caught.exception))

    def test_the_history_of_a_follower_that_was_renamed(self) -> None:
        """Without it, a function trusted a writer that was restored meanwhile, and kept the effects of lost facts."""
        store = self.store
        self.pump.wait(store.store_histories(MASTER, {ORDERS: HISTORY}, "old"))
        self.assertEqual([*self.pump.wait(store.history(ORDERS, MASTER, "new"))], self.RENAMED)
        self.assertEqual([*self.pump.wait(store.history(ORDERS, MASTER))], [])
        self.pump.wait(store.store_histories(MASTER, {ORDERS: HISTORY[:1]}, "new"))
        self.assertEqual([*self.pump.wait(store.history(ORDERS, MASTER, "new"))], HISTORY[:1])
        back = HISTORY[:1] if self.RENAMED else HISTORY
        self.assertEqual([*self.pump.wait(store.history(ORDERS, MASTER, "old"))], back)

    def test_the_timeline_of_the_server(self) -> None:
        self.assertEqual(self.pump.wait(self.store.read(get_timeline)), self.TIMELINE)


class PostgresTests(HasDatabase, SqliteTests):
    TIMELINE = "00000001"
    RENAMED: ClassVar[list[Epoch]] = []  # it begins anew

    def make_place(self) -> str:
        return self.url
