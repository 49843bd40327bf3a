"""No commit into a file that was exchanged, unlinked or truncated is acknowledged."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.sqlite.files import DatabaseFiles
from replication.storage.sqlite.session import SqliteSession
from replication.storage.sqlite.store import SqliteStore
from replication.streams.interfaces import Receipt
from replication.wire.grammar import Token
from tests.contract.stream_store import UsesStore, facts, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.storage.receipts import ReceiptClock

ORDERS = "orders"


def halve(path: Path) -> None:
    """Leave half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def exchange(path: Path) -> None:
    """Put a copy in the place of a file."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def move(path: Path) -> None:
    path.rename(f"{path}.away")


HARM = [Path.unlink, move, exchange, empty, halve]


class FilesTests(UsesStore, SynchronousTestCase):
    """Each harm to each of the files."""

    def make_store(self, clock: ReceiptClock) -> SqliteStore:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = str(Path(folder.name) / "app.db")
        return SqliteStore(self.path, self.pump, busy_timeout=0.1, clock=clock)

    def refusal(self, tokens: int = 100) -> str:
        return str(self.assertRaises(StoreError, self.commit, write(tokens, facts(tokens))))

    def harmed(self, harm: Callable[[Path], object], suffix: str) -> str:
        """Return why a commit is refused after ``harm`` was done to a file of a new store."""
        self.wait(self.store.close())
        self.setUp()
        for token in range(2, 12):
            self.commit(write(token, facts(token)))
        with closing(sqlite3.connect(self.path)) as other:
            other.execute("PRAGMA wal_checkpoint(PASSIVE)")
        for token in range(12, 30):
            self.commit(write(token, facts(token)))
        harm(Path(self.path + suffix))
        return self.refusal()

    def test_no_commit_into_a_file_that_is_not_in_its_place_is_acknowledged(self) -> None:
        for harm in (Path.unlink, move, exchange):
            refusal = self.harmed(harm, "")
            self.assertIn(f"database {self.path!r} was moved or deleted: restart with the file in its place", refusal)
            refusal = self.harmed(harm, "-wal")
            self.assertIn(f"database '{self.path}-wal' was moved or deleted: stop this process with SIGTERM", refusal)

    def test_no_commit_without_the_locks_of_other_programs_is_acknowledged(self) -> None:
        """They are in FILE-shm: two programs wrote the same part of the WAL, and each lost facts of the other."""
        for harm in (Path.unlink, move, exchange):
            refusal = self.harmed(harm, "-shm")
            self.assertIn(f"database '{self.path}-shm' was moved or deleted: stop this process with SIGTERM", refusal)
            self.assertRaises(StoreError, self.wait, self.store.check())
        Path(f"{self.path}-shm").unlink()
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("CREATE TABLE mine (a)")
            self.assertIn("-shm", self.refusal(101))
            other.execute("INSERT INTO mine VALUES (1)")
            self.wait(self.store.close())
            self.assertEqual(other.execute("SELECT * FROM mine").fetchall(), [(1,)])
            self.assertEqual(other.execute("SELECT max(stream_id) FROM stream_orders").fetchall(), [(29,)])

    def test_a_folder_that_may_not_be_entered_is_named_as_such(self) -> None:
        """The error was that the file was moved or deleted."""
        with mock.patch(
            "replication.storage.sqlite.files.os.stat", side_effect=PermissionError(13, "Permission denied")
        ):
            refusal = self.refusal()
        cure = "correct that, and restart this process"
        self.assertIn(f"database {self.path!r} cannot be reached: Permission denied: {cure}", refusal)

    def test_no_commit_into_a_truncated_file_is_acknowledged(self) -> None:
        for harm in (empty, halve):
            for suffix in ("", "-wal"):
                refusal = self.harmed(harm, suffix)
                cure = "was truncated: stop this process, delete FILE-wal and FILE-shm, and put a backup in place"
                self.assertIn(f"database '{self.path}{suffix}' {cure}", refusal, harm)

    def test_a_read_of_a_receipt_names_the_file_that_was_truncated(self) -> None:
        """An append with a key reads first: it was answered that the disk fails, or with "move this one away"."""
        for token in range(2, 30):
            self.commit(write(token, facts(token)))
        empty(Path(f"{self.path}-wal"))
        refusal = str(self.assertRaises(StoreError, self.wait, self.store.find_receipt("k")))
        cure = "was truncated: stop this process, delete FILE-wal and FILE-shm, and put a backup in place"
        self.assertEqual(f"database '{self.path}-wal' {cure}", refusal)

    def test_a_file_whose_wal_was_emptied_keeps_what_a_checkpoint_has_stored(self) -> None:
        """The last connection wrote the hole in the WAL into the database: it was no database any more."""
        self.harmed(empty, "-wal")
        self.wait(self.store.close())
        with closing(sqlite3.connect(self.path)) as other:
            self.assertEqual(other.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
            self.assertEqual(other.execute("SELECT max(stream_id) FROM stream_orders").fetchall(), [(11,)])

    def test_no_commit_into_a_file_over_which_a_backup_was_copied_is_acknowledged(self) -> None:
        """Before, commits went on: the file was a mixture of both, and SQLite could not read it any more."""
        for token in range(2, 12):
            self.commit(write(token, facts(token)))
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("VACUUM INTO ?", (f"{self.path}.backup",))
            for token in range(12, 200):
                self.commit(write(token, facts(token)))
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.commit(write(200, facts(200)))
        backup = Path(f"{self.path}.backup").read_bytes()
        Path(self.path).write_bytes(backup)
        refusal = self.refusal(201)
        cure = "was overwritten: stop this process, delete FILE-wal and FILE-shm, and put a backup in place"
        self.assertIn(f"database {self.path!r} {cure}", refusal)
        self.assertEqual(self.refusal(202), refusal)
        self.wait(self.store.close())
        self.assertEqual(Path(self.path).read_bytes(), backup)

    def test_a_transaction_with_statements_is_not_acknowledged_either(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute("CREATE TABLE mine (a)"))
        move(Path(self.path))
        self.assertIn("was moved or deleted", str(self.assertRaises(StoreError, self.wait, transaction.commit([]))))

    def test_after_a_commit_whose_outcome_is_unknown_nothing_is_written_until_the_restart(self) -> None:
        move(Path(self.path))
        refusal = self.refusal()
        Path(f"{self.path}.away").rename(self.path)
        self.assertEqual(self.refusal(101), refusal)
        self.assertEqual(str(self.assertRaises(StoreError, self.wait, self.store.check())), refusal)

    def test_after_a_commit_that_the_disk_does_not_let_us_check_nothing_is_written_until_the_restart(self) -> None:
        """Before, the commit was there, but its caller had an error, and a follower's stream stopped for ever."""
        failing = mock.patch("replication.storage.sqlite.files.os.pread", side_effect=OSError(5, "Input/output error"))
        self.commit(write(2, facts(2)))
        with mock.patch.object(DatabaseFiles, "check_sizes", lambda files: setattr(files, "_emptied", True)), failing:
            refusal = self.refusal()
        self.assertIn(f"database '{self.path}-wal' cannot be read: Input/output error: restart this process", refusal)
        self.assertEqual(self.refusal(101), refusal)
        self.assertEqual(str(self.assertRaises(StoreError, self.wait, self.store.check())), refusal)

    def test_a_disk_that_does_not_let_us_check_the_files_fails_the_commit_and_the_next_one_begins_anew(self) -> None:
        """Before, the next commit joined the transaction that was begun, so it was not checked."""
        failing = mock.patch("replication.storage.sqlite.files.os.pread", side_effect=OSError(5, "Input/output error"))
        self.commit(write(2, facts(2)))
        with failing:
            self.assertIn("cannot be read: Input/output error", self.refusal())
        with mock.patch.object(DatabaseFiles, "check_sizes") as check:
            self.commit(write(3, facts(3)))
        check.assert_called_once_with()

    def test_a_vacuum_and_checkpoints_of_other_processes_are_no_harm(self) -> None:
        for token in range(2, 200):
            self.commit(write(token, facts(token)))
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            for statement in ("CREATE TABLE mine AS SELECT randomblob(1000000) AS a", "DROP TABLE mine", "VACUUM"):
                other.execute(statement)
                self.commit(write(token := token + 1, facts(token)))
            sizes = []
            for how in ("PASSIVE", "RESTART", "TRUNCATE", "TRUNCATE"):
                other.execute(f"PRAGMA wal_checkpoint({how})")
                sizes.append(Path(f"{self.path}-wal").stat().st_size)
                self.commit(write(token := token + 1, facts(token)))
                self.wait(self.store.check())
            other.execute("PRAGMA journal_size_limit = 50000")
            for _ in range(3):
                other.execute("PRAGMA wal_checkpoint(RESTART)")
                other.execute("CREATE TABLE IF NOT EXISTS other (a)")
                other.execute("INSERT INTO other VALUES (1)")
                self.commit(write(token := token + 1, facts(token)))
        self.assertEqual(sizes[-2:], [0, 0])
        self.assertEqual(self.tokens()[-1], token)

    def test_a_receipt_in_a_lost_file_is_not_found(self) -> None:
        """The reading connection still has the file: with its receipt, a lost commit was acknowledged."""
        for suffix in ("", "-wal"):
            self.wait(self.store.close())
            self.setUp()
            self.commit(write(2, facts(2)), receipt=Receipt("k2", [Token(2)]))
            self.assertEqual(self.wait(self.store.find_receipt("k2")), [2])
            Path(self.path + suffix).unlink()
            self.assertIn("was moved or deleted", self.refused_receipt("k2"))
            receipt = Receipt("k3", [Token(3)])
            with mock.patch.object(DatabaseFiles, "check_sizes"):  # as if the file was lost only later
                self.assertRaises(StoreError, self.commit, write(3, facts(3)), receipt=receipt)
            self.assertIn("was moved or deleted", self.refused_receipt("k3"))

    def test_a_receipt_that_the_disk_refused_is_not_found(self) -> None:
        with mock.patch("replication.storage.sqlite.files.os.fsync", side_effect=OSError(5, "Input/output error")):
            receipt = Receipt("k2", [Token(2)])
            self.assertRaises(StoreError, self.commit, write(2, facts(2)), receipt=receipt)
        self.assertIn("cannot be written to the disk", self.refused_receipt("k2"))

    def refused_receipt(self, key: str) -> str:
        return str(self.assertRaises(StoreError, self.wait, self.store.find_receipt(key)))

    def test_a_file_that_is_named_by_a_link_is_in_its_place(self) -> None:
        self.wait(self.store.close())
        link = f"{self.path}.link"
        Path(link).symlink_to(self.path)
        self.store = SqliteStore(link, self.pump)
        self.wait(self.store.open())
        self.declare(ORDERS)
        self.commit(write(2, facts(2)))
        Path(f"{self.path}-wal").unlink()
        self.assertIn("-wal' was moved or deleted", self.refusal())

    def test_a_commit_of_another_process_that_truncates_the_wal_loses_nothing(self) -> None:
        """A large transaction restarts the WAL early, and its COMMIT truncates the file; a commit between fails."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("CREATE TABLE mine AS SELECT randomblob(4000000) AS a")
            self.commit(write(2, facts(2)))
            for statement in ("journal_size_limit = 100000", "cache_size = 5", "wal_checkpoint(RESTART)"):
                other.execute(f"PRAGMA {statement}")
            other.execute("BEGIN IMMEDIATE")
            other.execute("INSERT INTO mine SELECT randomblob(1000000)")
            self.assertIn("database is locked", self.refusal(3))
            before = Path(f"{self.path}-wal").stat().st_size
            other.execute("COMMIT")
        self.assertLess(Path(f"{self.path}-wal").stat().st_size, before)
        self.commit(write(3, facts(3)))

    def test_a_checkpoint_that_empties_the_wal_right_after_a_commit_is_accepted(self) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)) as other:

            def commit_and_empty(session: SqliteSession) -> None:
                commit(session)
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")

            commit = SqliteSession.commit
            for token in (2, 4, 6):
                self.commit(write(token, facts(token)))
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                with mock.patch.object(SqliteSession, "commit", commit_and_empty):
                    self.commit(write(token + 1, facts(token + 1)))
                self.assertEqual(Path(f"{self.path}-wal").stat().st_size, 0)
        self.commit(write(8, facts(8)))
        empty(Path(f"{self.path}-wal"))
        self.assertIn("was truncated", self.refusal())

    def test_a_wal_that_is_emptied_by_mistake_right_after_a_commit_fails_the_next_commit(self) -> None:
        def commit_and_empty(session: SqliteSession) -> None:
            commit(session)
            empty(Path(f"{self.path}-wal"))

        commit = SqliteSession.commit
        with mock.patch.object(SqliteSession, "commit", commit_and_empty):
            self.commit(write(2, facts(2)))
        self.assertIn("was truncated", self.refusal())
