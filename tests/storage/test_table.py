"""A stream that is declared, has a position, and has no table."""

from __future__ import annotations

import pytest
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.postgres.store import PostgresStore
from replication.storage.sqlite.store import SqliteStore
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

TYPING, NO_WRITER = StreamName("typing"), InstanceName("")


class NoTableContract(SynchronousTestCase):
    pump: Pump
    store: SqliteStore | PostgresStore

    def open(self, store: SqliteStore | PostgresStore) -> None:
        self.store = store
        self.pump.wait(store.open())
        self.addCleanup(lambda: self.pump.wait(store.close()))
        self.pump.wait(store.declare(StreamDefinition(TYPING, in_memory=True)))

    def check(self) -> None:
        self.assertEqual(self.pump.wait(self.store.positions(TYPING)), {})
        self.pump.wait(self.store.transaction().commit([Write(TYPING, NO_WRITER, Token(10))]))
        self.pump.wait(self.store.transaction().commit([Write(TYPING, NO_WRITER, Token(4), reset=True)]))
        self.assertEqual(self.pump.wait(self.store.positions(TYPING)), {NO_WRITER: 4})
        for refused in (
            self.store.transaction().commit([Write(TYPING, NO_WRITER, Token(5), [Fact(Token(5), ("1",))])]),
            self.store.facts(TYPING, NO_WRITER, after=Token(0), upto=Token(4), limit=1),
        ):
            with pytest.raises(StoreError, match="facts of stream 'typing' are only in the memory of their writer"):
                self.pump.wait(refused)
        self.assertEqual(self.tables(), [])

    def tables(self) -> object:
        raise NotImplementedError


class SqliteTests(NoTableContract):
    def test_the_position_is_stored_and_facts_are_refused(self) -> None:
        self.pump = Pump()
        self.open(SqliteStore(":memory:", self.pump))
        self.check()

    def tables(self) -> object:
        transaction = self.store.transaction()
        found = self.pump.wait(transaction.execute("SELECT name FROM sqlite_master WHERE name LIKE 'stream_typing%'"))
        self.pump.wait(transaction.rollback())
        return found


class PostgresTests(HasDatabase, NoTableContract):
    def test_the_position_is_stored_and_facts_are_refused(self) -> None:
        self.pump = Pump()
        self.open(PostgresStore(self.url, self.pump))
        self.check()

    def tables(self) -> object:
        return self.sql("SELECT relname FROM pg_class WHERE relname = 'stream_typing'")
