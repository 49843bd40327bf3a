"""What is gone: the first deletion creates the table, and programs that do not know it refuse the database."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import FactsGoneError, SchemaError, StoreError
from replication.storage import open_store
from replication.storage.migrations import check_version
from replication.storage.sqlite.generic import GenericTable
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import FactSlice, Write
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.retention import forget_lost_marks
from tests.doubles import logged
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from replication.streams.interfaces import IStreamStore

ORDERS, MASTER = StreamName("orders"), InstanceName("master")
FACTS = [Fact(Token(2), ("[2]",)), Fact(Token(3), ("[3]", "[3]")), Fact(Token(5), ("[5]",))]


class KeptFactsCase(SynchronousTestCase):
    __test__ = False

    def setUp(self) -> None:
        self.pump = Pump()
        self.place = self.make_place()
        self.store = self.open(read_only=False)
        self.pump.wait(self.store.transaction().commit([Write(ORDERS, MASTER, Token(5), FACTS)]))

    def make_place(self) -> str:
        self.path = self.mktemp()
        return f"sqlite:///{self.path}"

    def open(self, *, read_only: bool) -> IStreamStore:
        store = open_store(self.place, self.pump, read_only=read_only)
        self.pump.wait(store.open())
        self.pump.wait(store.declare(StreamDefinition(ORDERS)))
        self.addCleanup(lambda: self.pump.wait(store.close()))
        return store

    def tokens(self, store: IStreamStore, after: int = 0, limit: int = 9) -> list[int]:
        page = self.pump.wait(store.facts(ORDERS, MASTER, after=Token(after), upto=Token(9), limit=limit))
        return [each.token for each in page.facts]

    def execute(self, sql: str) -> None:
        transaction = self.store.transaction()
        self.pump.wait(transaction.execute(sql))
        self.pump.wait(transaction.commit([]))

    def version(self) -> object:
        return self.pump.wait(
            self.store.read(lambda database: database.execute("SELECT version FROM replication_schema"))
        )

    def forget_lost_marks(self, *streams: StreamName) -> list[str]:
        with logged() as messages:
            self.pump.wait(forget_lost_marks(self.store, MASTER, streams))
        return messages

    def put_back(self) -> None:
        """Store the deleted facts again, as ``pg_restore`` does with a table of the dump."""
        for token in (2, 3):
            self.execute(f"INSERT INTO stream_orders VALUES ({token}, 0, 'master', '[]')")

    def test_a_mark_from_after_a_restored_backup_is_forgotten(self) -> None:
        """``pg_restore --clean`` keeps the tables that are not in the dump."""
        self.pump.wait(self.store.store_slice(ORDERS, MASTER, FactSlice(Token(9), 3, 9, 1.0)))
        self.pump.wait(self.store.forget_facts(ORDERS, MASTER, Token(3)))
        self.put_back()
        self.assertEqual(self.forget_lost_marks(), [])  # rows of an application come and go
        with self.assertRaises(FactsGoneError):
            self.tokens(self.store)
        (message,) = self.forget_lost_marks(ORDERS)
        self.assertIn("orders: a restore has undone what the retention of master had deleted and counted", message)
        self.assertEqual(self.tokens(self.store), [2, 3, 5])
        self.assertEqual(self.pump.wait(self.store.slices(ORDERS, MASTER)), [])
        self.assertEqual(self.forget_lost_marks(ORDERS), [])

    def test_a_mark_above_the_position_is_lowered(self) -> None:
        """A truncated table has no rows, and its facts up to the position are gone."""
        self.execute("DELETE FROM stream_orders")
        self.pump.wait(self.store.forget_facts(ORDERS, MASTER, Token(9), delete=False))
        self.assertEqual(len(self.forget_lost_marks(ORDERS)), 1)
        self.assertEqual(self.pump.wait(self.store.gone(ORDERS)), {MASTER: 5})

    def test_marks_and_slices_of_a_retention_stay_at_a_start(self) -> None:
        self.pump.wait(self.store.store_slice(ORDERS, MASTER, FactSlice(Token(5), 1, 3, 1.0)))
        self.pump.wait(self.store.forget_facts(ORDERS, MASTER, Token(3)))
        self.assertEqual(self.forget_lost_marks(ORDERS), [])
        self.assertEqual(self.pump.wait(self.store.gone(ORDERS)), {MASTER: 3})
        self.assertEqual(len(self.pump.wait(self.store.slices(ORDERS, MASTER))), 1)

    def test_a_reader_that_was_there_before_the_first_deletion_finds_out(self) -> None:
        reader = self.open(read_only=True)
        self.assertEqual(self.tokens(reader), [2, 3, 5])
        self.pump.wait(self.store.forget_facts(ORDERS, MASTER, Token(3)))
        with self.assertRaises(FactsGoneError):
            self.tokens(reader, after=2)
        self.assertEqual(self.tokens(reader, after=3), [5])
        self.assertEqual(dict(self.pump.wait(reader.gone(ORDERS))), {MASTER: 3})

    def test_only_the_first_deletion_makes_older_programs_refuse_the_database(self) -> None:
        self.assertEqual(self.version(), [(1,)])
        self.pump.wait(self.store.store_slice(ORDERS, MASTER, FactSlice(Token(3), 3, 9, 1.5)))
        self.assertEqual(self.version(), [(1,)])
        for upto in (2, 3):
            self.pump.wait(self.store.forget_facts(ORDERS, MASTER, Token(upto)))
            self.assertEqual(self.version(), [(2,)])
        with self.assertRaisesRegex(SchemaError, "use the newer program"):
            check_version(2, 1)  # as version 0.1 does
        self.assertEqual(self.tokens(self.open(read_only=True), after=3), [5])

    def test_a_page_that_is_read_while_a_slice_is_deleted_lacks_nothing(self) -> None:
        reader, last = self.open(read_only=True), 60
        more = [Fact(Token(each), (f"[{each}]",)) for each in range(6, last + 1)]
        self.pump.wait(self.store.transaction().commit([Write(ORDERS, MASTER, Token(last), more)]))
        whole = [2, 3, *range(5, last + 1)]
        for upto in range(2, last, 2):
            after = Token(upto - 2)
            reading = self.pump.start(reader.facts(ORDERS, MASTER, after=after, upto=Token(last), limit=last))
            forgetting = self.pump.start(self.store.forget_facts(ORDERS, MASTER, Token(upto)))
            try:
                page = self.pump.wait(reading)
            except FactsGoneError as error:
                self.assertEqual(error.upto, upto)
            else:
                self.assertEqual([each.token for each in page.facts], [each for each in whole if each > after])
            self.pump.wait(forgetting)

    def test_a_deletion_that_fails_has_deleted_nothing(self) -> None:
        """As if the process was killed before the commit: the facts, the slices and the mark go together."""
        self.pump.wait(self.store.store_slice(ORDERS, MASTER, FactSlice(Token(3), 3, 9, 1.5)))
        with self.assertRaises(StoreError):
            self.pump.wait(self.store.forget_facts(ORDERS, MASTER, Token(2**70)))
        self.assertEqual(self.tokens(self.store), [2, 3, 5])
        self.assertEqual(len(self.pump.wait(self.store.slices(ORDERS, MASTER))), 1)
        self.assertEqual(dict(self.pump.wait(self.store.gone(ORDERS))), {})

    def test_the_facts_of_a_table_that_is_missing_are_gone(self) -> None:
        """A dropped table, or a restore of some tables: followers that lack facts are refused, and skip none."""
        self.execute("DROP TABLE stream_orders")
        self.pump.wait(self.store.close())
        self.store = self.open(read_only=False)
        with self.assertRaises(FactsGoneError) as caught:
            self.tokens(self.store)
        self.assertEqual(caught.exception.upto, 5)
        self.assertEqual(self.tokens(self.store, after=5), [])
        missing = "stream 'orders': its table was missing, and is empty now, so facts are gone: of master up to 5; "
        (lost,) = [each for each in self.store.warnings if each.startswith(missing)]
        self.pump.wait(self.store.close())
        self.assertNotIn(lost, self.open(read_only=False).warnings)


class SqliteTests(KeptFactsCase):
    __test__ = True

    def test_a_reader_goes_on_after_the_restore_of_a_backup_from_before_the_first_deletion(self) -> None:
        reader, backup = self.open(read_only=True), self.mktemp()
        with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(backup)) as copy:
            source.backup(copy)
        self.pump.wait(self.store.forget_facts(ORDERS, MASTER, Token(3)))
        self.assertEqual(self.tokens(reader, after=3), [5])
        with closing(sqlite3.connect(backup)) as source, closing(sqlite3.connect(self.path)) as copy:
            source.backup(copy)
        with self.assertRaises(StoreError):
            self.tokens(reader)
        self.assertEqual(self.tokens(reader), [2, 3, 5])

    def test_a_fact_larger_than_a_page_that_is_deleted_while_it_is_read_is_no_fact_without_rows(self) -> None:
        def read(connection: Any) -> object:
            table, session = GenericTable(StreamDefinition(ORDERS)), Mock(wraps=connection.session)
            deleted: list[list[object]] = [[]]  # the answer to the second statement
            session.ask.side_effect = lambda sql, parameters: (
                deleted.pop() if sql == table._fact and deleted else connection.session.ask(sql, parameters)
            )
            return table.rows(session, MASTER, after=Token(2), upto=Token(9), limit=1).texts

        self.assertEqual(self.pump.wait(self.store._read(read)), ["[3]", "[3]"])  # type: ignore[attr-defined]

    def test_a_stream_in_tables_of_an_application_is_never_deleted(self) -> None:
        mapped = StreamDefinition("events", table="events", row=("a",), id_column="stream_id")
        self.execute("CREATE TABLE events (stream_id INTEGER PRIMARY KEY, a INTEGER)")
        self.pump.wait(self.store.declare(mapped))
        with self.assertRaisesRegex(StoreError, "not in a table of this package"):
            self.pump.wait(self.store.forget_facts(mapped.name, MASTER, Token(3)))


class PostgresTests(HasDatabase, KeptFactsCase):
    __test__ = True

    def make_place(self) -> str:
        return self.url
