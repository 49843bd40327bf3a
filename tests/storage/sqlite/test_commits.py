"""A backup that is restored into the open file is noticed before the next commit."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CommitsLostError, PositionMovedError
from replication.storage.sqlite.commits import KnownCommits
from replication.storage.sqlite.session import SqliteSession
from replication.storage.sqlite.store import SqliteStore
from replication.streams.definitions import StreamDefinition
from replication.streams.history import Epoch
from replication.wire.grammar import StreamName, Token
from tests.contract.stream_store import ME, ORDERS, UsesStore, empty, facts, write

if TYPE_CHECKING:
    from replication.storage.receipts import ReceiptClock
    from replication.streams.interfaces import Write

DOWN = StreamName("down")


class RestoreTests(UsesStore, SynchronousTestCase):
    def make_store(self, clock: ReceiptClock) -> SqliteStore:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = str(Path(folder.name) / "app.db")
        return SqliteStore(self.path, self.pump, clock=clock)

    def back_up(self) -> None:
        with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(f"{self.path}-copy")) as target:
            source.backup(target)

    def restore(self) -> None:
        """Do what ``sqlite3 FILE ".restore COPY"`` does."""
        with closing(sqlite3.connect(f"{self.path}-copy")) as source, closing(sqlite3.connect(self.path)) as target:
            source.backup(target)

    def start_again(self) -> None:
        """Open the file as the next process does."""
        self.wait(self.store.close())
        self.store = SqliteStore(self.path, self.pump)
        self.wait(self.store.open())
        self.declare(ORDERS)
        self.wait(self.store.claim(ME))

    def put(self, history: list[Epoch], follower: str) -> None:
        self.wait(self.store.store_histories(ME, {ORDERS: history}, follower))

    def other(self, *statements: str) -> None:
        """Run statements as another process."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as database:
            for each in statements:
                database.execute(each)

    def is_lost(self) -> None:
        with capturedLogs() as logs:
            error = self.assertRaises(CommitsLostError, self.commit, write(99, facts(99)))
        self.assertEqual(str(error), f"database {self.path!r} has lost commits of this process: restart it")
        self.assertIs(self.successResultOf(self.store.commits_lost), error)
        self.assertEqual(len([each for each in logs if each["log_level"].name == "critical"]), 1)
        for refused in (self.store.check, self.store.stored_positions, self.store.verify, lambda: self.store.claim(ME)):
            self.assertIs(self.assertRaises(CommitsLostError, self.wait, refused()), error)
        with closing(sqlite3.connect(self.path)) as database:
            self.assertEqual(database.execute("SELECT 1 FROM stream_orders WHERE stream_id = 99").fetchall(), [])

    def loses(self, *lost: Write) -> None:
        """Commit, back up, commit what is lost, and restore."""
        self.commit(write(2, facts(2)))
        self.back_up()
        for each in lost:
            self.commit(each)
        self.wait(self.store.check())  # counts for a second, but not after a loss
        self.restore()
        self.is_lost()

    def test_a_lost_fact_is_noticed(self) -> None:
        self.loses(write(3, facts(3)))

    def test_a_lost_position_without_a_fact_is_noticed(self) -> None:
        self.loses(write(3))

    def test_a_lost_fact_of_a_stream_that_counts_down_is_noticed(self) -> None:
        self.wait(self.store.declare(StreamDefinition(DOWN, negative=True)))
        self.commit(write(2, facts(2), stream=DOWN))
        self.loses(write(3, facts(3), stream=DOWN))

    def test_a_lost_fact_above_an_open_id_is_noticed(self) -> None:
        """The position stays below it."""
        self.loses(write(2, facts(5)))

    def test_a_history_that_is_stored_and_not_noted_yet_is_not_lost(self) -> None:
        """Another call may begin in between, and a table may be new."""
        first, second = Epoch("first", Token(1), Token(1)), Epoch("second", Token(2), Token(2))
        self.wait(self.store.store_histories(ME, {ORDERS: [first]}))
        self.commit(write(1, facts(1)))
        note = KnownCommits.note_histories

        def check_first(known: KnownCommits, *args: Any) -> None:
            known._version = known._schema = 0  # another process has committed, and there is a new table
            with closing(SqliteSession(self.path)) as session:
                session.connect()
                known.check(session)
            note(known, *args)

        self.patch(KnownCommits, "note_histories", check_first)
        self.wait(self.store.store_histories(ME, {ORDERS: [first, second]}))
        self.wait(self.store.raise_position(write(2), [first, second, second], [first, second]))

    def test_a_lost_history_is_noticed(self) -> None:
        """A backup from before the last start may have all facts and positions."""
        first = Epoch("first", Token(1), Token(1))
        self.wait(self.store.store_histories(ME, {ORDERS: [first]}))
        self.back_up()
        self.restore()
        self.wait(self.store.verify())
        self.wait(self.store.store_histories(ME, {ORDERS: [first, Epoch("second", Token(2), Token(2))]}))
        self.restore()
        self.is_lost()

    def test_a_position_above_one_that_this_process_has_lowered_is_noticed(self) -> None:
        """The backup of a copy is from before its writer went back.

        The worker could store the writer's new history over the restored position, and trust that after a restart.
        """
        self.commit(write(9, facts(9)))
        self.back_up()
        self.commit(write(4, reset=True))
        self.restore()
        self.is_lost()

    def test_a_position_above_that_of_a_write_is_not_lost(self) -> None:
        """A fact without rows raises it, also while a smaller ID is open; VACUUM looks as a restore does."""
        self.commit(write(4, facts(4)))
        self.commit(write(4, [empty(6)]))
        self.other("VACUUM")
        self.commit(write(7, facts(5, 7)))

    def test_a_lost_position_from_before_this_start_is_noticed(self) -> None:
        """A worker that had stored nothing since its start never ended: it reported for ever that a position moved."""
        self.commit(write(2, facts(2)))
        self.back_up()
        self.commit(write(3, facts(3)))
        self.start_again()
        self.restore()
        self.is_lost()

    def test_a_lost_history_from_before_this_start_is_noticed(self) -> None:
        first, second = Epoch("first", Token(1), Token(1)), Epoch("second", Token(2), Token(2))
        for follower in ("", "worker"):
            self.wait(self.store.close())
            self.setUp()
            self.put([first], follower)
            self.back_up()
            self.put([first, second], follower)
            self.start_again()
            self.restore()
            self.is_lost()

    def test_a_lost_history_is_noticed_before_it_is_replaced(self) -> None:
        """The new history would be that of the restored position, and facts that the writer has lost would stay."""
        first, second = Epoch("first", Token(1), Token(1)), Epoch("second", Token(2), Token(2))
        self.put([first], "worker")
        self.back_up()
        self.put([first, second], "worker")
        self.restore()
        third = second._replace(name="third")
        self.assertRaises(CommitsLostError, self.put, [first, second, third], "worker")

    def test_a_history_that_a_worker_has_stored_under_a_former_name_is_not_lost(self) -> None:
        first, second = Epoch("first", Token(1), Token(1)), Epoch("second", Token(2), Token(2))
        self.put([first], "before")
        self.start_again()
        self.put([first, second], "after")
        self.other("CREATE TABLE mine (a)")
        self.commit(write(5, facts(5)))

    def test_a_lost_fact_is_noticed_by_a_look(self) -> None:
        self.back_up()
        self.commit(write(2, facts(2)))
        self.restore()
        self.assertRaises(CommitsLostError, self.wait, self.store.verify())

    def test_a_lost_fact_is_noticed_by_a_transaction_with_statements(self) -> None:
        self.back_up()
        self.commit(write(2, facts(2)))
        self.restore()
        transaction = self.store.transaction()
        self.assertRaises(CommitsLostError, self.wait, transaction.execute("CREATE TABLE mine (a)"))
        self.wait(transaction.rollback())
        self.assertRaises(CommitsLostError, self.commit, write(3, facts(3)))

    def test_a_restore_without_a_loss_ends_nothing(self) -> None:
        self.commit(write(2, facts(2)), write(2, facts(5)))
        self.back_up()
        self.restore()
        self.commit(write(3, facts(3)))

    def test_a_position_that_this_process_has_lowered_is_not_lost(self) -> None:
        self.commit(write(9, facts(9)))
        self.commit(write(4, reset=True))
        self.other("CREATE TABLE mine (a)")
        self.commit(write(5, facts(5)))

    def test_what_other_processes_write_and_delete_is_no_loss(self) -> None:
        self.commit(write(2, facts(2)))
        self.commit(write(2, facts(5)))
        for statement in (
            "CREATE TABLE mine (a)",
            "INSERT INTO mine VALUES (1)",
            "DELETE FROM stream_orders WHERE stream_id = 2",
            "VACUUM",
            "PRAGMA wal_checkpoint(TRUNCATE)",
            "DELETE FROM stream_orders",
        ):
            self.other(statement)
            self.commit(write(token := 6 + len(statement), facts(token)))
            self.wait(self.store.verify())

    def test_a_fact_that_failed_is_not_looked_for(self) -> None:
        self.commit(write(2, facts(2)))
        self.assertRaises(PositionMovedError, self.commit, write(7, facts(7), expected=6))
        self.back_up()
        self.restore()
        self.commit(write(3, facts(3)))

    def test_a_look_does_not_wait_for_a_transaction_in_progress(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute("CREATE TABLE mine (a)"))
        self.wait(self.store.verify())
        self.wait(transaction.rollback())
