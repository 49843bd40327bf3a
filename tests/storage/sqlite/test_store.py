"""The SQLite store: the contracts on files and in memory, threads, waiting, and files that do not fit."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError, StoreError
from replication.storage import proof
from replication.storage.memory import MemoryStore
from replication.storage.sqlite.connection import SqliteConnection
from replication.storage.sqlite.session import SqliteSession
from replication.storage.sqlite.store import SqliteStore
from replication.storage.transactions import run_transaction
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Receipt, Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.contract.stream_store import (
    FOLLOWER,
    ME,
    ORDERS,
    OTHER,
    SqlTransactionContract,
    StreamStoreContract,
    UsesStore,
    fact,
    facts,
    write,
)
from tests.storage.pump import PATIENCE, threads_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replication.storage.receipts import ReceiptClock
    from replication.streams.interfaces import IStreamStore

_T = TypeVar("_T")

ROOT = Path(__file__).parents[3]

APPEND = """
import sys
from replication.storage.sqlite.store import SqliteStore
from replication.streams.facts import Fact
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Write
from tests.storage.pump import Pump

pump = Pump()
store = SqliteStore(sys.argv[1], pump)
pump.wait(store.open())
pump.wait(store.declare(StreamDefinition("orders")))
token = max([1, *pump.wait(store.positions("orders")).values()])
while True:
    asked = {}
    for token in range(token + 1, token + 8):
        texts = tuple(str(token + place) for place in range(token % 3 + 1))
        write = Write("orders", "master", token, [Fact(token, texts)])
        asked[token] = pump.start(store.transaction().commit([write]))
    for acknowledged, commit in asked.items():
        pump.wait(commit)
        print(acknowledged, flush=True)
"""


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run as the user with the ID 65534 if the tests run as root, because root may write each file."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


class OnFile(UsesStore):
    """A store on a file in a folder of its own, and other ways to that file."""

    store: SqliteStore

    def make_store(self, clock: ReceiptClock) -> SqliteStore:
        if not hasattr(self, "path"):
            folder = tempfile.TemporaryDirectory()
            self.addCleanup(folder.cleanup)
            self.path = f"{folder.name}/facts.db"
        return SqliteStore(self.path, self.pump, busy_timeout=0.0, clock=clock)

    def sql(self, sql: str, parameters: tuple[object, ...] = ()) -> list[Any]:
        """Run SQL on another program's connection."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as database:
            return database.execute(sql, parameters).fetchall()

    def run_on_writer(self, work: Callable[[SqliteConnection], _T]) -> Deferred[_T]:
        """Run ``work`` on the writing thread."""
        assert self.store._writer is not None
        return self.store._writer.run(work)

    def stop_writer(self) -> threading.Event:
        """Block the writing thread until the event is set."""
        gate = threading.Event()
        self.run_on_writer(lambda _: gate.wait(PATIENCE))
        return gate

    def reopen(self) -> None:
        """Replace the store by a new one on the same file."""
        self.wait(self.store.close())
        self.store = self.make_store(self.make_clock())
        self.wait(self.store.open())
        self.declare(ORDERS)

    def open_error(self, path: str | None = None, kind: type[StoreError] = StoreError, **options: Any) -> str:
        """Return the error of a file that cannot be opened, the same at the second attempt."""
        store = SqliteStore(path or self.path, self.pump, busy_timeout=0.0, **options)
        first = str(self.assertRaises(kind, self.wait, store.open()))
        self.assertEqual(str(self.assertRaises(kind, self.wait, store.open())), first)
        self.assertIn(path or self.path, first)
        self.wait(store.close())
        return first


class SqliteFileTests(OnFile, StreamStoreContract, SqlTransactionContract, SynchronousTestCase):
    """Both contracts on a file."""


class SqliteMemoryTests(StreamStoreContract, SqlTransactionContract, SynchronousTestCase):
    """Both contracts in memory."""

    def make_store(self, clock: ReceiptClock) -> SqliteStore:
        return SqliteStore(":memory:", self.pump, clock=clock)

    def test_uncommitted_facts_are_not_read(self) -> None:
        """There is one connection: a read waits for the transaction that has it."""
        transaction = self.store.transaction()
        self.wait(transaction.execute("INSERT INTO stream_orders VALUES (2, 0, 'master', '1')"))
        page = self.begin(self.store.facts(ORDERS, ME, after=Token(0), upto=Token(9), limit=9))
        self.wait(transaction.rollback())
        self.assertEqual(list(self.wait(page).facts), [])


class FileTests(OnFile, SynchronousTestCase):
    """The contents of the file, and their durability."""

    def test_everything_is_there_after_closing_and_opening(self) -> None:
        self.commit(write(3, facts(2, 3)), write(7, writer=OTHER), receipt=Receipt("k", [Token(2), Token(3)]))
        self.reopen()
        self.assertEqual(
            (self.tokens(), self.positions(), self.wait(self.store.find_receipt("k"))),
            ([2, 3], {ME: 3, OTHER: 7}, [2, 3]),
        )

    def test_positions_of_a_copy_are_not_those_of_a_function(self) -> None:
        self.assertEqual(self.wait(self.store.applied_positions(ORDERS, FOLLOWER)), {})
        self.commit(write(3, facts(2, 3), expected=0))
        self.assertEqual(self.wait(self.store.applied_positions(ORDERS, ME)), {ME: 3})  # its own facts
        error = self.assertRaises(StoreError, self.wait, self.store.applied_positions(ORDERS, FOLLOWER))
        self.assertIn("a function would miss facts", str(error))
        self.sql(str(error)[str(error).index("DROP") :])
        self.assertEqual(self.wait(self.store.applied_positions(ORDERS, FOLLOWER)), {ME: 3})

    def test_a_commit_is_on_the_disk_when_it_returns(self) -> None:
        """synchronous = FULL (2) on the connection that writes, and a WAL, so that readers do not wait."""
        pragmas = self.wait(
            self.run_on_writer(
                lambda connection: [
                    connection.session.run(f"PRAGMA {name}") for name in ("synchronous", "journal_mode")
                ]
            )
        )
        self.assertEqual(pragmas, [[(2,)], [("wal",)]])

    def apply(self, token: int, *, synchronous: bool) -> None:
        """Apply a fact as a function does: an effect and the position, in one transaction."""
        transaction = self.store.transaction(synchronous=synchronous)
        self.wait(transaction.execute("INSERT INTO effects VALUES (?)", (token,)))
        self.wait(transaction.commit([write(token, expected=token - 1 if token > 2 else 0)]))

    def test_a_power_loss_undoes_the_last_effects_together_with_the_position(self) -> None:
        """Any part of the WAL after the last synchronous commit may be missing."""
        self.sql("CREATE TABLE effects (token INTEGER)")
        self.apply(2, synchronous=True)
        database, wal = Path(self.path), Path(f"{self.path}-wal")
        synced = len(wal.read_bytes())
        for token in range(3, 10):
            self.apply(token, synchronous=False)
        whole = wal.read_bytes()
        found = set()
        for end in range(synced, len(whole) + 1, 700):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "facts.db").write_bytes(database.read_bytes())
                Path(folder, "facts.db-wal").write_bytes(whole[:end] + bytes(len(whole) - end))
                with closing(sqlite3.connect(f"{folder}/facts.db")) as left:
                    effects = [token for (token,) in left.execute("SELECT token FROM effects ORDER BY token")]
                    ((position,),) = left.execute("SELECT stream_id FROM stream_positions")
            self.assertEqual(effects, [*range(2, position + 1)])
            found.add(position)
        self.assertLessEqual({2, 5, 8}, found)

    def statements(self) -> list[str]:
        """Return the list to which the writer adds its commits, and how they wait for the disk."""
        found: list[str] = []

        def trace(sql: str) -> None:
            if sql.startswith(("PRAGMA synchronous", "COMMIT")):
                found.append(sql.removeprefix("PRAGMA synchronous = "))

        self.wait(self.run_on_writer(lambda connection: connection.session.database.set_trace_callback(trace)))
        return found

    def test_sync_waits_for_the_disk_if_a_commit_did_not(self) -> None:
        synced: list[int] = []  # bytes of the WAL
        with mock.patch.object(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size)):
            self.wait(self.store.sync())  # an earlier process may have left commits that are not on the disk
            self.wait(self.store.sync())
            self.assertEqual(len(synced), 1)
            for token in (2, 3):
                self.wait(self.store.transaction(synchronous=False).commit([write(token)]))
            self.wait(self.store.sync())
            self.wait(self.store.sync())
        self.assertEqual(synced[1:], [Path(f"{self.path}-wal").stat().st_size])

    def refuse_sync(self) -> mock._patch[Any]:
        """Let the disk fail once: Linux takes the pages for written, and reports the error to each descriptor once."""
        return mock.patch.object(os, "fsync", side_effect=[OSError(5, "Input/output error"), *[None] * 9])

    def test_after_a_sync_that_fails_nothing_is_acknowledged_until_the_restart(self) -> None:
        """A later sync that succeeds does not write the missing pages: after a power loss the WAL would end there."""
        self.wait(self.store.transaction(synchronous=False).commit([write(2, facts(2))]))
        why = f"database '{self.path}-wal' cannot be written to the disk: Input/output error"
        with self.refuse_sync():
            for ask in (
                self.store.sync(),
                self.store.sync(),
                self.store.transaction().commit([write(3, facts(3))]),
                self.store.transaction(synchronous=False).commit([write(3, facts(3))]),
                self.store.check(),
            ):
                self.assertIn(why, str(self.assertRaises(StoreError, self.wait, ask)))
        self.reopen()
        self.commit(write(3, facts(3)))
        self.assertEqual(self.tokens(), [2, 3])

    def test_a_start_leaves_nothing_in_the_wal_of_a_killed_process(self) -> None:
        """A part of it may be missing on the disk, although the process that was killed could read it."""
        self.commit(write(2, facts(2)))
        files = Path(self.path), Path(f"{self.path}-wal")
        killed, wal = (each.read_bytes() for each in files)
        self.wait(self.store.close())
        for path, content in zip(files, (killed, wal), strict=True):
            path.write_bytes(content)
        self.store = self.make_store(self.make_clock())
        self.wait(self.store.open())
        files[0].with_name("alone.db").write_bytes(files[0].read_bytes())
        with closing(sqlite3.connect(files[0].with_name("alone.db"))) as alone:
            self.assertEqual(alone.execute("SELECT stream_id FROM stream_orders").fetchall(), [(2,)])

    def test_a_commit_is_not_acknowledged_if_an_earlier_one_did_not_reach_the_disk(self) -> None:
        """SQLite reports no error of a checkpoint's sync, and that of a failed commit only once."""
        self.commit(write(2, facts(2)))
        with self.refuse_sync() as fsync:
            self.commit(write(3, facts(3)))
            self.assertEqual(fsync.call_count, 0, "every earlier commit is on the disk")
            self.wait(self.store.transaction(synchronous=False).commit([write(4, facts(4))]))
            error = self.assertRaises(StoreError, self.commit, write(5, facts(5)))
        self.assertIn("cannot be written to the disk: Input/output error", str(error))

    def test_a_group_of_commits_waits_for_the_disk_if_one_of_them_does(self) -> None:
        found, gate = self.statements(), self.stop_writer()
        every = [self.store.transaction(synchronous=each == 3).commit([write(each)]) for each in (2, 3, 4)]
        asked = [self.begin(each) for each in every]
        gate.set()
        for each in asked:
            self.wait(each)
        self.assertEqual(found, ["NORMAL", "COMMIT", "FULL", "COMMIT"])  # 2, which was alone, then 3 and 4

    def test_a_transaction_whose_caller_is_cancelled_during_its_commit_is_committed(self) -> None:
        """The caller receives the CancelledError, and no other error, as when a worker is stopped."""
        running = self.pump.start(run_transaction(self.store, lambda _: None, [write(2)]))
        self.pump.run_call()  # the function has returned, so the commit begins
        running.cancel()
        self.assertRaises(CancelledError, self.wait, running)
        self.reopen()
        self.assertEqual(self.positions(), {ME: 2})

    def test_every_other_transaction_waits_for_the_disk(self) -> None:
        self.wait(self.store.transaction(synchronous=False).commit([write(2)]))
        found = self.statements()
        self.wait(self.store.declare(StreamDefinition(StreamName("stock"))))
        self.assertEqual(found[0], "FULL")
        self.wait(self.store.transaction(synchronous=False).commit([write(3)]))
        del found[:]
        self.wait(run_transaction(self.store, lambda database: database.execute("SELECT 1"), [write(4)]))
        self.assertEqual(found, ["FULL", "COMMIT"])

    def test_reading_does_not_wait_for_an_open_transaction(self) -> None:
        self.commit(write(2, facts(2)))
        transaction = self.store.transaction()
        self.wait(transaction.execute("INSERT INTO stream_orders VALUES (3, 0, 'master', '1')"))
        self.assertEqual((self.tokens(), self.positions()), ([2], {ME: 2}))
        self.wait(transaction.rollback())

    def test_a_store_may_read_what_another_process_writes(self) -> None:
        self.commit(write(2, facts(2)))
        reader = SqliteStore(self.path, self.pump, read_only=True)
        self.wait(reader.open())
        self.addCleanup(lambda: self.wait(reader.close()))
        self.wait(reader.declare(StreamDefinition(ORDERS)))
        self.commit(write(3, facts(3)))
        page = self.wait(reader.facts(ORDERS, ME, after=Token(0), upto=Token(3), limit=9))
        self.assertEqual([each.token for each in page.facts], [2, 3])
        self.assertEqual(self.wait(reader.positions(ORDERS)), {ME: 3})
        self.wait(reader.check())
        self.assertIn(
            "others", str(self.assertRaises(SchemaError, self.wait, reader.declare(StreamDefinition("others"))))
        )
        for refused in (reader.transaction().commit([]), reader.transaction().execute("SELECT 1")):
            self.assertIn("reading only", str(self.assertRaises(StoreError, self.wait, refused)))
        self.assertEqual((reader.commits, reader.transactions), (0, 0))

    def test_opening_twice_at_once_opens_once(self) -> None:
        self.wait(self.store.close())
        store = SqliteStore(os.path.relpath(self.path), self.pump)
        with capturedLogs() as logged:
            both = [self.begin(store.open()), self.begin(store.open())]
            for each in both:
                self.wait(each)
        message = f"database {Path(self.path).resolve()} is open"  # wherever the process was started
        self.assertEqual([formatEvent(each) for each in logged], [message])
        self.wait(store.check())
        self.wait(store.close())


class WaitingTests(OnFile, SynchronousTestCase):
    """What waits for what."""

    def test_commits_that_wait_share_one_transaction(self) -> None:
        gate = self.stop_writer()
        asked = [self.begin(self.store.transaction().commit([write(token, facts(token))])) for token in range(2, 52)]
        gate.set()
        for each in asked:
            self.wait(each)
        self.assertEqual(self.tokens(), [*range(2, 52)])
        self.wait(self.store.close())
        self.assertEqual((self.store.commits, self.store.transactions), (50, 2))  # the first one did not have to wait

    def test_a_bad_commit_costs_its_group_a_few_transactions_and_nothing_else(self) -> None:
        gate = self.stop_writer()
        asked = [self.begin(self.store.transaction().commit([write(token, facts(token))])) for token in range(2, 66)]
        bad = self.begin(self.store.transaction().commit([write(70, facts(70), expected=1)]))
        gate.set()
        self.assertRaises(StoreError, self.wait, bad)
        for each in asked:
            self.wait(each)
        self.assertLess(self.store.transactions, 10)
        self.assertEqual(self.tokens(), [*range(2, 66)])

    def test_a_commit_of_something_impossible_fails_alone(self) -> None:
        """Also an exception that has nothing to do with the database."""
        gate = self.stop_writer()
        asked = [
            self.begin(self.store.transaction().commit([each]))
            for each in (
                write(1),
                write(2, [Fact(Token(2), (object(),))]),  # type: ignore[arg-type]
                write(3, [7]),  # type: ignore[list-item]
                write(2**70),
                write(4, facts(4)),
            )
        ]
        gate.set()
        self.wait(asked[0])
        self.assertRaises(StoreError, self.wait, asked[1])
        self.assertRaises(TypeError, self.wait, asked[2])
        self.assertRaises(StoreError, self.wait, asked[3])
        self.wait(asked[4])
        self.assertEqual((self.tokens(), self.positions()), ([4], {ME: 4}))

    def test_a_cancelled_commit_goes_on(self) -> None:
        gate = self.stop_writer()
        asked, waiting = (self.begin(self.store.transaction().commit([write(token, facts(token))])) for token in (2, 3))
        for each in (asked, waiting):
            each.cancel()
            self.failureResultOf(each, CancelledError)
        gate.set()
        self.commit(write(4, facts(4)))
        self.assertEqual(self.tokens(), [2, 3, 4])

    def test_a_cancelled_commit_of_statements_goes_on_and_cannot_be_rolled_back(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute("CREATE TABLE mine (a)"))
        gate = self.stop_writer()
        asked = self.begin(transaction.commit([write(2, facts(2))]))
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assertRaises(StoreError, self.wait, transaction.rollback())
        gate.set()
        self.commit(write(3, facts(3)))
        self.assertEqual(self.tokens(), [2, 3])
        self.assertEqual(self.sql("SELECT count(*) FROM mine"), [(0,)])

    def test_a_cancelled_statement_can_be_rolled_back(self) -> None:
        transaction = self.store.transaction()
        gate = self.stop_writer()
        asked = self.begin(transaction.execute("CREATE TABLE mine (a)"))
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        gate.set()
        self.wait(transaction.rollback())
        self.commit(write(3, facts(3)))
        self.assertEqual(self.sql("SELECT count(*) FROM sqlite_master WHERE name = 'mine'"), [(0,)])

    def test_a_transaction_that_is_cancelled_while_it_waits_blocks_no_other(self) -> None:
        first, second = self.store.transaction(), self.store.transaction()
        self.wait(first.execute("CREATE TABLE mine (a)"))
        asked = self.begin(second.execute("CREATE TABLE mine (b)"))
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.wait(first.commit([]))
        self.commit(write(2, facts(2)))
        self.wait(second.rollback())
        self.assertEqual(self.sql("SELECT name FROM pragma_table_info('mine')"), [("a",)])

    def test_a_transaction_that_waits_for_another_one_names_it(self) -> None:
        first, second = self.store.transaction(), self.store.transaction()
        self.wait(first.execute("CREATE TABLE mine (a)"))
        waiting = self.begin(second.execute("INSERT INTO mine VALUES (1)"))
        self.assertEqual(self.wait(second.blockers()), [SqliteStore.ALL_USED])
        self.assertEqual([*self.wait(first.blockers())], [])
        self.wait(first.commit([]))
        self.wait(waiting)
        self.wait(second.commit([]))

    def test_close_waits_for_what_runs(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute("CREATE TABLE mine (a)"))
        waiting = self.begin(self.store.transaction().commit([write(2, facts(2))]))
        closed = self.begin(self.store.close())
        self.assertRaises(StoreError, self.wait, self.store.transaction().commit([]))
        self.wait(transaction.execute("INSERT INTO mine VALUES (1)"))
        self.assertNoResult(closed)
        self.wait(transaction.commit([write(3, facts(3))]))
        self.wait(waiting)
        self.wait(closed)
        self.assertEqual(self.sql("SELECT stream_id FROM stream_orders"), [(2,), (3,)])
        self.assertEqual(sorted(Path(self.path).parent.iterdir()), [Path(self.path)], "no WAL is left behind")

    def test_a_second_instance_name_on_one_store_is_refused(self) -> None:
        """As of a Worker on a Master's store: it would take the master's positions for its own, and miss facts."""
        self.wait(self.store.claim(ME))
        error = self.assertRaises(StoreError, self.wait, self.store.claim(OTHER))
        self.assertEqual(
            str(error), f"database {self.path!r} holds the positions of {ME!r}: give {OTHER!r} a database of its own"
        )
        self.wait(self.store.claim(ME))

    def test_a_closed_store_is_not_opened_again(self) -> None:
        self.wait(self.store.close())
        self.assertIn("closed", str(self.assertRaises(StoreError, self.wait, self.store.open())))

    def test_closing_while_it_opens_closes_what_was_opened(self) -> None:
        self.wait(self.store.close())
        store = SqliteStore(self.path, self.pump)
        opened, closed = self.begin(store.open()), self.begin(store.close())
        self.wait(opened)
        self.wait(closed)
        self.assertRaises(StoreError, self.wait, store.check())

    def test_any_exception_on_the_thread_reaches_the_callers(self) -> None:
        self.patch(SqliteConnection, "commit_together", lambda *_: 1 // 0)
        self.assertRaises(ZeroDivisionError, self.commit, write(2, facts(2)))
        self.assertRaises(ZeroDivisionError, self.commit, write(3, facts(3)))

    def test_a_second_connection_that_fails_takes_the_first_one_along(self) -> None:
        connect = SqliteSession.connect

        def connect_to_write_only(connection: SqliteSession) -> None:
            if connection._read_only:
                raise StoreError("too many open files")
            connect(connection)

        self.wait(self.store.close())
        store = SqliteStore(self.path, self.pump)
        patch = self.patch(SqliteSession, "connect", connect_to_write_only)
        self.assertRaises(StoreError, self.wait, store.open())
        self.assertEqual(threads_of(self.path), [])
        patch.restore()
        self.wait(store.open())
        self.wait(store.close())

    def test_no_thread_outlives_its_store(self) -> None:
        self.wait(self.store.close())
        self.assertEqual(threads_of(self.path), [])


class TroubleTests(OnFile, SynchronousTestCase):
    """Files that do not fit; each error names the file and the cure."""

    def test_one_process_writes_a_file_and_the_next_one_is_refused_with_its_id(self) -> None:
        """Two masters on one file would each count IDs, and followers would miss the other's facts."""
        self.wait(self.store.claim(ME))
        self.wait(self.store.claim(ME))
        self.assertIn(f"is written by process {os.getpid()} already: stop that", self.open_error())
        self.wait(self.store.close())
        other = self.make_store(self.make_clock())
        self.wait(other.open())
        self.wait(other.claim(InstanceName("other")))
        self.wait(other.close())

    def test_a_file_that_is_no_database_is_refused(self) -> None:
        path = f"{self.path}.txt"
        Path(path).write_text("Dear diary, " * 1000)
        self.assertIn("file is not a database; give the path of another file", self.open_error(path))
        self.assertEqual(Path(path).read_text(), "Dear diary, " * 1000)

    def test_a_folder_is_refused(self) -> None:
        """SQLite opens it to read, and reports an error of the disk."""
        self.assertIn("it is a folder", self.open_error(str(Path(self.path).parent), read_only=True))

    def test_a_folder_that_is_not_there_is_named(self) -> None:
        self.assertIn("does its folder exist", self.open_error(f"{self.path}/nowhere/facts.db"))

    def test_reading_only_makes_no_file(self) -> None:
        self.assertIn("unable to open", self.open_error(f"{self.path}.new", read_only=True))
        self.assertFalse(Path(f"{self.path}.new").exists())

    def test_tables_of_a_newer_version_are_left_alone(self) -> None:
        self.wait(self.store.close())
        self.sql("UPDATE replication_schema SET version = 99")
        for read_only in (False, True):
            message = self.open_error(kind=SchemaError, read_only=read_only)
            self.assertIn("version 99", message)
        self.assertEqual(self.sql("SELECT version FROM replication_schema"), [(99,)])

    def test_a_database_of_another_program_is_left_alone(self) -> None:
        path = f"{self.path}.other"
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE stream_positions (stream_name, instance_name, stream_id)")
        self.assertIn("its tables are not ours: ON CONFLICT clause does not match", self.open_error(path, SchemaError))
        self.assertIn("no such table: replication_schema", self.open_error(path, SchemaError, read_only=True))
        with closing(sqlite3.connect(path)) as other:
            self.assertEqual(other.execute("SELECT name FROM sqlite_master").fetchall(), [("stream_positions",)])

    def test_a_database_that_another_process_locks_is_named_and_works_again_afterwards(self) -> None:
        self.commit(write(2, facts(2)))
        with closing(sqlite3.connect(self.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            transaction = self.store.transaction()
            for refused in (
                self.store.transaction().commit([write(3, facts(3))]),
                self.store.check(),
                transaction.execute("CREATE TABLE mine (a)"),
            ):
                message = str(self.assertRaises(StoreError, self.wait, refused))
                self.assertIn(f"{self.path!r}: database is locked; another process", message)
            self.wait(transaction.rollback())
            self.assertEqual(self.tokens(), [2], "reading goes on")
            self.wait(self.store.close())
            self.assertIn("locked", self.open_error())
        self.reopen()
        self.commit(write(3, facts(3)))
        self.wait(self.store.check())
        self.assertEqual(self.tokens(), [2, 3])

    def test_a_file_that_may_not_be_written_is_named(self) -> None:
        self.wait(self.store.close())
        Path(self.path).chmod(0o444)
        Path(self.path).parent.chmod(0o555)
        try:
            with unprivileged():
                message = self.open_error()
        finally:
            Path(self.path).parent.chmod(0o755)
        self.assertIn("Permission denied", message)
        self.assertIn("may this process write there?", message)

    def test_a_check_writes_a_page_and_changes_nothing(self) -> None:
        """SQLite writes no page whose bytes stay the same: an UPDATE to the same value proves nothing."""
        self.commit(write(2, facts(2)))
        tables = self.sql("SELECT * FROM replication_schema"), self.sql("SELECT * FROM stream_positions")
        log = Path(f"{self.path}-wal")
        self.patch(proof, "PROOF_LIFE", 0.0)
        for _ in range(3):
            before = log.stat().st_size
            self.wait(self.store.check())
            self.assertGreater(log.stat().st_size, before)
        self.assertEqual(
            tables, (self.sql("SELECT * FROM replication_schema"), self.sql("SELECT * FROM stream_positions"))
        )
        self.assertEqual(self.tokens(), [2])

    def test_a_commit_of_facts_that_failed_fails_the_check(self) -> None:
        refused = Write(ORDERS, ME, Token(2), facts(2), expected=Token(9))
        self.assertRaises(StoreError, self.wait, self.store.transaction().commit([refused]))
        self.assertIn("not 9", str(self.assertRaises(StoreError, self.wait, self.store.check())))
        self.commit(write(2, facts(2)))
        self.wait(self.store.check())

    def test_a_file_that_was_deleted_or_replaced_is_noticed_by_check(self) -> None:
        for replacement in (None, "something else"):
            Path(self.path).rename(f"{self.path}.{replacement}")
            if replacement is not None:
                Path(self.path).write_text(replacement)
            self.assertIn("moved or deleted", str(self.assertRaises(StoreError, self.wait, self.store.check())))
            Path(f"{self.path}.{replacement}").rename(self.path)
        self.wait(self.store.check())

    def fill_disk(self) -> None:
        """Stop the file from growing."""
        self.wait(self.run_on_writer(lambda connection: connection.session.run("PRAGMA max_page_count = 1")))

    def make_room(self) -> None:
        self.wait(self.run_on_writer(lambda connection: connection.session.run("PRAGMA max_page_count = 1000000")))

    def test_f19_a_full_disk_fails_what_does_not_fit_and_the_store_goes_on(self) -> None:
        self.commit(write(2, facts(2)))
        self.fill_disk()
        gate = self.stop_writer()
        big = [fact(token, '"' + "x" * 9000 + '"') for token in (3, 4)]
        asked = [
            self.begin(self.store.transaction().commit([each]))
            for each in (write(5, facts(5)), write(3, big[:1]), write(4, big[1:]), write(6, facts(6)))
        ]
        gate.set()
        self.wait(asked[0])
        for each in asked[1:3]:
            self.assertIn("full; make room on the disk", str(self.assertRaises(StoreError, self.wait, each)))
        self.wait(asked[3])
        self.assertEqual((self.tokens(), self.positions()), ([2, 5, 6], {ME: 6}))
        self.make_room()
        self.commit(write(7, big))
        self.assertEqual(self.tokens(), [2, 3, 4, 5, 6])

    def test_f19_a_full_disk_in_a_transaction_of_statements_undoes_all_of_it(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute("CREATE TABLE mine (a)"))
        self.fill_disk()
        refused = transaction.execute("INSERT INTO mine VALUES (?)", ["x" * 100_000])
        self.assertRaises(StoreError, self.wait, refused)
        self.wait(transaction.rollback())
        self.make_room()
        self.commit(write(2, facts(2)))
        self.assertEqual((self.tokens(), self.sql("PRAGMA table_info(mine)")), ([2], []))

    def test_a_transaction_that_the_database_has_undone_cannot_go_on_as_if_nothing_happened(self) -> None:
        """After some errors SQLite rolls back by itself; later statements must not become a new transaction."""
        for last in ("execute", "commit"):
            transaction = self.store.transaction()
            self.wait(transaction.execute("CREATE TABLE mine (a)"))
            self.wait(
                self.run_on_writer(lambda connection: connection.session.run("ROLLBACK"))
            )  # as after an I/O error
            if last == "execute":
                refused = transaction.execute("CREATE TABLE others (a)")
                self.assertIn("undone", str(self.assertRaises(StoreError, self.wait, refused)))
                self.wait(transaction.rollback())
            else:
                refused_commit = transaction.commit([write(2, facts(2))])
                self.assertIn("undone", str(self.assertRaises(StoreError, self.wait, refused_commit)))
        self.commit(write(3, facts(3)))
        self.assertEqual(self.tokens(), [3])

    def test_f9_what_was_acknowledged_outlives_a_process_that_is_killed(self) -> None:
        self.wait(self.store.close())
        acknowledged: list[int] = []
        for _ in range(4):
            with subprocess.Popen(
                [sys.executable, "-c", APPEND, self.path], cwd=ROOT, stdout=subprocess.PIPE, text=True
            ) as child:
                assert child.stdout is not None
                acknowledged += [int(line) for line in islice(child.stdout, 60)]
                child.kill()
                acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
            self.assertEqual(child.returncode, -signal.SIGKILL)
        self.reopen()
        page = self.page(upto=10**9, limit=10**6)
        kept = {each.token: each.texts for each in page.facts}
        self.assertEqual(len(acknowledged), len(set(acknowledged)), "no ID was given twice")
        self.assertEqual(
            {token: kept[Token(token)] for token in acknowledged},
            {token: tuple(str(token + place) for place in range(token % 3 + 1)) for token in acknowledged},
        )
        self.assertEqual(self.sql("PRAGMA integrity_check"), [("ok",)])


class DifferentialTests(OnFile, SynchronousTestCase):
    """Hundreds of random operations have the same outcome as in the reference store."""

    streams = (StreamName("up"), StreamName("down"))

    def test_a_file_gives_the_same_outcomes_as_the_store_in_memory(self) -> None:
        reference = MemoryStore(self.make_clock())
        self.wait(reference.open())
        for store in (self.store, reference):
            for name in self.streams:
                self.wait(store.declare(StreamDefinition(name, negative=name == "down")))
        for step in range(800):
            one, other = (self.outcome(store, random.Random(step)) for store in (self.store, reference))
            self.assertEqual(one, other, f"step {step}")
            self.time += 5_000

    def outcome(self, store: IStreamStore, chance: random.Random) -> object:
        """Run one operation, determined by ``chance``, and return its outcome."""
        stream, writer = chance.choice(self.streams), chance.choice([ME, OTHER])
        match chance.randrange(10):
            case 0:
                return dict(self.wait(store.positions(stream)))
            case 1:
                return self.wait(store.find_receipt(f"key {chance.randrange(9)}"))
            case 2 | 3 | 4:
                after, limit = chance.randrange(90), chance.choice([1, 2, 3, 5, 8, 50])
                asked = store.facts(stream, writer, after=Token(after), upto=Token(after + 30), limit=limit)
                page = self.wait(asked)
                return list(page.facts), page.upto, page.limited
            case _:
                writes = [self.some_write(chance) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
                receipt = Receipt(f"key {chance.randrange(9)}", [Token(7)]) if chance.random() < 0.2 else None
                try:
                    self.wait(store.transaction().commit(writes, receipt))
                except StoreError as error:
                    return type(error)
                return None

    def some_write(self, chance: random.Random) -> Write:
        tokens = sorted(chance.sample(range(2, 120), chance.choice([0, 1, 1, 2, 6])))
        rows = [Fact(Token(token), tuple(map(str, range(chance.choice([0, 1, 1, 1, 2, 4]))))) for token in tokens]
        return write(
            chance.randrange(120),
            rows,
            stream=chance.choice(self.streams),
            writer=chance.choice([ME, OTHER]),
            expected=chance.randrange(60) if chance.random() < 0.05 else None,
            reset=chance.random() < 0.15,
        )
