"""What connections of all databases do, on SQLite."""

from __future__ import annotations

from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError, StoreError
from replication.storage.sqlite.connection import SqliteConnection
from replication.storage.tables.applied_counts import CREATE, GET, STATE
from replication.wire.grammar import InstanceName, StreamName


class SharedTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.connection = SqliteConnection(":memory:", read_only=False, busy_timeout=0.0)
        self.connection.open()
        self.addCleanup(self.connection.close)

    def test_a_function_that_reads_leaves_no_transaction(self) -> None:
        self.assertEqual(self.connection.read(lambda database: database.execute("SELECT 1")), [(1,)])
        self.assertRaises(StoreError, self.connection.read, lambda database: database.execute("SELECT nothing"))
        self.assertFalse(self.connection.session.begun)

    def test_an_exclusive_transaction_is_undone_by_an_exception(self) -> None:
        def fail() -> None:
            with self.connection.exclusive():
                self.connection.session.run("CREATE TABLE mine (a)")
                raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, fail)
        with self.connection.exclusive():
            self.connection.session.run("CREATE TABLE mine (a)")
        self.assertFalse(self.connection.session.begun)

    def test_an_error_about_a_table_names_the_database(self) -> None:
        def refuse() -> None:
            with self.connection.naming():
                raise SchemaError("there is no table")

        self.assertEqual(str(self.assertRaises(SchemaError, refuse)), "database ':memory:': there is no table")

    def test_whether_there_are_counts_is_asked_until_the_table_is_found_and_not_for_each_stream(self) -> None:
        asked: list[str] = []
        session, run = self.connection.session, self.connection.session.run
        self.assertEqual(self.connection.applied_counts(StreamName("orders"), "worker1"), {})
        session.run(CREATE["sqlite"])
        session.run("INSERT INTO applied_counts VALUES ('orders', 'master', '', 'at 3')")

        def ask(sql: str, parameters: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
            asked.append(sql)
            return run(sql, parameters)

        with patch.object(session, "ask", ask):
            found = [self.connection.applied_counts(StreamName(each), "worker1") for each in ("orders", "b", "c")]
        self.assertEqual(found, [{InstanceName("master"): "at 3"}, {}, {}])
        self.assertEqual(asked, [STATE["sqlite"], GET["sqlite"], GET["sqlite"], GET["sqlite"]])
