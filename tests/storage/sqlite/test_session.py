"""One connection of the driver: transactions, and its errors as StoreError."""

from __future__ import annotations

import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError, ValueRefusedError
from replication.storage.sqlite.session import CURES, SqliteSession, UndecodedError


class SessionTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.session = SqliteSession(":memory:")
        self.session.connect()
        self.addCleanup(self.session.close)

    def test_an_error_of_the_driver_names_the_database(self) -> None:
        for refused in (
            lambda: self.session.run("SELECT nothing"),
            lambda: self.session.executemany("SELECT ?", [()]),
            lambda: self.session.run("SELECT 1; SELECT 2"),
        ):
            self.assertTrue(str(self.assertRaises(StoreError, refused)).startswith("database ':memory:': "))

    def test_a_value_that_no_database_can_store_has_an_error_of_its_own(self) -> None:
        self.session.run("CREATE TABLE counted (n INTEGER CHECK (n > 0))")
        for value in (2**63, "\ud800", 0):
            self.assertRaises(ValueRefusedError, self.session.run, "INSERT INTO counted VALUES (?)", (value,))

    def test_a_text_that_is_not_utf_8_is_refused_with_the_statement_that_reads_it(self) -> None:
        self.session.run("CREATE TABLE shop (name TEXT)")
        self.session.run("INSERT INTO shop VALUES ('ok'), (CAST(x'ff' AS TEXT))")
        with self.assertRaisesRegex(UndecodedError, "not UTF-8; this statement reads it: SELECT name FROM shop"):
            self.session.run("SELECT name FROM shop")

    def test_an_error_that_may_pass_is_temporary(self) -> None:
        """A lock of another process, a disk that is full; but not a file that is no database."""
        with TemporaryDirectory() as folder, closing(sqlite3.connect(f"{folder}/a.db", isolation_level=None)) as other:
            other.execute("CREATE TABLE mine (a)")
            other.execute("BEGIN EXCLUSIVE")
            session = SqliteSession(f"{folder}/a.db", busy_timeout=0.0)
            session.connect()
            self.assertTrue(self.assertRaises(StoreError, session.run, "SELECT * FROM mine").temporary)
            other.execute("ROLLBACK")
            session.run("PRAGMA max_page_count = 2")
            session.run("INSERT INTO mine VALUES (1)")
            full = self.assertRaises(StoreError, session.run, "INSERT INTO mine VALUES (zeroblob(10000))")
            self.assertTrue(full.temporary)
            session.close()
            Path(folder, "b.db").write_bytes(b"no database " * 1000)
            session = SqliteSession(f"{folder}/b.db")
            session.connect()
            self.assertFalse(self.assertRaises(StoreError, session.run, "SELECT * FROM mine").temporary)
            session.close()
        self.assertFalse(self.assertRaises(StoreError, self.session.run, "SELECT nothing").temporary)

    def test_a_limit_of_the_size_of_files_is_named(self) -> None:
        """SQLite has the same error for a disk that fails."""
        with TemporaryDirectory() as folder:
            session = SqliteSession(f"{folder}/a.db")
            session.connect()
            session.run("CREATE TABLE mine (a)")
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
            try:
                full = self.assertRaises(StoreError, session.run, "INSERT INTO mine VALUES (zeroblob(1000000))")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                session.close()
        self.assertIn("disk I/O error; the disk fails, see the system's log; or a limit of files", str(full))

    def test_a_table_of_this_package_that_is_gone_has_a_cure(self) -> None:
        for table, cure in (
            ("stream_positions", "If it is, restore it from a backup"),
            ("mine", "no such table: mine"),
        ):
            error = self.session.refusal(sqlite3.OperationalError(f"no such table: {table}"))
            self.assertTrue(str(error).endswith(cure), error)

    def test_every_cure_belongs_to_an_error_of_sqlite(self) -> None:
        for name in CURES:
            self.assertIsInstance(getattr(sqlite3, name), int)

    def test_a_transaction_is_undone_or_kept(self) -> None:
        self.session.run("CREATE TABLE mine (a)")
        for end, rows in ((self.session.rollback, []), (self.session.commit, [(1,)])):
            self.session.begin()
            self.assertTrue(self.session.begun)
            self.session.run("INSERT INTO mine VALUES (1)")
            end()
            self.assertFalse(self.session.begun)
            self.assertEqual(self.session.run("SELECT a FROM mine"), rows)
        self.session.rollback()  # there is none, which is no error

    def test_a_transaction_that_sqlite_has_undone_is_an_error(self) -> None:
        self.session.begin()
        self.session.run("ROLLBACK")  # as after an I/O error
        self.assertIn("has undone this transaction", str(self.assertRaises(StoreError, lambda: self.session.begun)))

    def test_a_transaction_whose_rollback_has_failed_is_undone_before_the_next_one(self) -> None:
        """Before, each later transaction failed until the restart, as one within a transaction."""
        self.session.run("CREATE TABLE mine (a)")
        self.session.begin()
        self.session.run("INSERT INTO mine VALUES (1)")
        with patch.object(self.session, "run", side_effect=StoreError("disk I/O error")):
            self.assertRaises(StoreError, self.session.rollback)
        self.session.begin()
        self.session.run("INSERT INTO mine VALUES (2)")
        self.session.commit()
        self.assertEqual(self.session.run("SELECT a FROM mine"), [(2,)])

    def test_a_closed_session_is_named_and_may_be_closed_twice(self) -> None:
        self.session.close()
        self.session.close()
        self.assertEqual(
            str(self.assertRaises(StoreError, self.session.run, "SELECT 1")), "database ':memory:' is not open"
        )
