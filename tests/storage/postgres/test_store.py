"""The PostgreSQL store: both contracts, waiting, and what survives a server that is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psycopg
from twisted.internet.defer import CancelledError, Deferred, gatherResults
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CommitsLostError, ConfigError, SchemaError, StoreError
from replication.storage.memory import MemoryStore
from replication.storage.postgres import store as postgres_store
from replication.storage.postgres.connection import PostgresConnection
from replication.storage.postgres.ids import END_SESSIONS, LOCK_SHARED
from replication.storage.postgres.session import OutcomeUnknownError
from replication.storage.postgres.store import PostgresStore
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Receipt, Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.contract.stream_store import (
    ME,
    ORDERS,
    OTHER,
    SqlTransactionContract,
    StreamStoreContract,
    fact,
    facts,
    write,
)
from tests.storage.on_postgres import OTHERS, OnPostgres
from tests.storage.pump import PATIENCE, threads_of
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replication.storage.receipts import ReceiptClock
    from replication.streams.interfaces import ISqlExecutor, IStreamStore

_T = TypeVar("_T")

ROOT = Path(__file__).parents[3]

APPEND = """
import sys
from replication.storage.postgres.store import PostgresStore
from replication.streams.facts import Fact
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Write
from tests.storage.pump import Pump

pump = Pump()
store = PostgresStore(sys.argv[1], pump)
pump.wait(store.open())
pump.wait(store.declare(StreamDefinition("orders")))
sequence = store.sequence("orders")
while True:
    asked = {}
    for token in pump.wait(sequence.allocate(7)):
        texts = tuple(str(token + place) for place in range(token % 3 + 1))
        write = Write("orders", "master", token, [Fact(token, texts)])
        asked[token] = pump.start(store.transaction().commit([write]))
    for acknowledged, commit in asked.items():
        pump.wait(commit)
        print(acknowledged, flush=True)
"""


class LostCommitsTests(OnPostgres, SynchronousTestCase):
    def test_the_database_is_not_ready_from_the_loss_on(self) -> None:
        """Although it was a moment before, and although it can be written."""
        self.commit(write(2, facts(2)))
        self.wait(self.store.check())
        self.sql("DELETE FROM commit_marks")
        self.end_sessions()
        error = self.assertRaises(CommitsLostError, self.commit, write(3, facts(3)))
        for refused in (self.store.check, self.store.stored_positions):
            self.assertIs(self.assertRaises(CommitsLostError, self.wait, refused()), error)


class PostgresTests(OnPostgres, StreamStoreContract, SqlTransactionContract, SynchronousTestCase):
    """Both contracts."""

    mark = "%s"

    def test_no_comment_hides_a_statement_that_ends_the_transaction(self) -> None:
        """A line ends at CR, and comments may be nested."""

        def work(database: ISqlExecutor, _: object) -> Sequence[Write]:
            database.execute(self.insert, (1, "placed"))
            database.execute("/* so */ -- so\r SELECT /* /* so */ */ 1")
            for sql in ("-- so\rCOMMIT", "/* /* so */ */ COMMIT", "-- so\n/**//*/*/*/*/*/COMMIT", "/*/**/*/COMMIT"):
                self.assertRaises(StoreError, database.execute, sql)
            raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, self.wait, self.interact(work))
        self.assertEqual(self.orders(), [])

    def test_transactions_take_turns_in_the_order_in_which_they_began(self) -> None:
        """Here they run side by side: each has its own session, and each statement a snapshot of its own."""
        first, second = self.store.transaction(), self.store.transaction()
        self.wait(first.execute(self.insert, (1, "first")))
        self.wait(second.execute("UPDATE orders SET state = 'second'"))
        self.commit(write(2, facts(2)))
        self.wait(first.commit([write(3, facts(3))]))
        self.assertEqual(self.wait(second.execute("SELECT state FROM orders")), [("first",)])
        self.wait(second.commit([write(4, facts(4))]))
        self.assertEqual(self.tokens(), [2, 3, 4])


class UsesThreads(OnPostgres):
    def run_on_writer(self, work: Callable[[PostgresConnection], _T]) -> Deferred[_T]:
        """Run ``work`` on the thread of the group commit."""
        assert self.store._writer is not None
        return self.store._writer.run(work)

    def stop_writer(self) -> threading.Event:
        """Block that thread until the event is set."""
        gate = threading.Event()
        self.run_on_writer(lambda _: gate.wait(PATIENCE))
        return gate

    def reopen(self) -> None:
        """Replace the store by a new one on the same database."""
        self.wait(self.store.close())
        self.store = self.make_store(self.make_clock())
        self.wait(self.store.open())
        self.declare(ORDERS)


class StoreTests(UsesThreads, SynchronousTestCase):
    """The contents of the database, and other processes."""

    def test_everything_is_there_after_closing_and_opening(self) -> None:
        self.commit(write(3, facts(2, 3)), write(7, writer=OTHER), receipt=Receipt("k", [Token(2), Token(3)]))
        self.reopen()
        self.assertEqual(
            (self.tokens(), self.positions(), self.wait(self.store.find_receipt("k"))),
            ([2, 3], {ME: 3, OTHER: 7}, [2, 3]),
        )

    def test_a_store_may_read_what_another_process_writes(self) -> None:
        self.commit(write(2, facts(2)))
        reader = self.another_store(read_only=True)
        self.commit(write(3, facts(3)))
        page = self.wait(reader.facts(ORDERS, ME, after=Token(0), upto=Token(3), limit=9))
        self.assertEqual([each.token for each in page.facts], [2, 3])
        self.assertEqual(self.wait(reader.positions(ORDERS)), {ME: 3})
        self.wait(reader.check())
        self.assertIsNone(reader.sequence(ORDERS))
        self.assertIn(
            "others", str(self.assertRaises(SchemaError, self.wait, reader.declare(StreamDefinition("others"))))
        )
        refused = (reader.transaction().commit([]), reader.transaction().execute("SELECT 1"), reader.claim(ME))
        for each in refused:
            self.assertIn("reading only", str(self.assertRaises(StoreError, self.wait, each)))
        self.assertEqual((reader.commits, reader.transactions), (0, 0))

    def test_trap_34_a_second_process_of_one_name_does_not_write(self) -> None:
        self.wait(self.store.claim(ME))
        other = self.another_store()
        self.assertIn("writes as 'master'", str(self.assertRaises(StoreError, self.wait, other.claim(ME))))
        self.wait(other.claim(OTHER))
        self.wait(self.store.close())
        self.wait(other.claim(ME))

    def test_several_processes_write_one_stream(self) -> None:
        other = self.another_store()
        for store, writer in ((self.store, ME), (other, OTHER)) * 3:
            (token,) = self.wait(self.sequence(store).allocate(1))
            self.wait(store.transaction().commit([write(token, facts(token), writer=writer)]))
        self.assertEqual((self.tokens(), self.tokens(writer=OTHER)), ([2, 4, 6], [3, 5, 7]))
        self.assertEqual(self.positions(), {ME: 6, OTHER: 7})

    def test_settings_that_lose_commits_are_a_warning(self) -> None:
        self.assertIn("fsync", self.store.warnings[0])
        self.sql("INSERT INTO stream_orders VALUES (50, 0, 'master', '1')")
        self.declare(ORDERS)
        self.assertIn("behind ID 50", self.store.warnings[-1])
        self.sql("SELECT setval('stream_orders_seq', 1)")
        self.wait(self.sequence().allocate(1))

    def test_a_database_that_is_not_there_is_named_and_may_be_tried_again(self) -> None:
        store = PostgresStore(self.server.url("nowhere"), self.pump)
        for _ in range(2):
            message = str(self.assertRaises(StoreError, self.wait, store.open()))
            self.assertIn("create it with createdb", message)
        self.wait(store.close())
        self.assertEqual(threads_of("nowhere"), [])

    def test_a_url_that_is_none_is_refused_before_anything_is_done(self) -> None:
        self.assertRaises(ConfigError, PostgresStore, "postgresql://me:pass@word@here/x", self.pump)

    def test_opening_twice_at_once_opens_once(self) -> None:
        store = PostgresStore(self.url, self.pump)
        with capturedLogs() as logged:
            both = [self.begin(store.open()), self.begin(store.open())]
            for each in both:
                self.wait(each)
        self.assertEqual([formatEvent(each) for each in logged], [f"database {store.address.name} is open"])
        self.wait(store.check())
        self.wait(store.close())
        self.assertIn("closed", str(self.assertRaises(StoreError, self.wait, store.open())))

    def test_no_thread_and_no_session_outlives_its_store(self) -> None:
        self.wait(self.sequence().allocate(1))
        transaction = self.store.transaction()
        self.wait(transaction.execute("SELECT 1"))
        self.wait(transaction.rollback())
        mine = [each.name for each in threading.enumerate() if self.database in each.name]
        self.assertEqual(len(mine), 4)
        self.wait(self.store.close())
        self.assertEqual(threads_of(self.database), [])


class WaitingTests(UsesThreads, SynchronousTestCase):
    """What waits for what."""

    def test_commits_that_are_asked_for_in_one_turn_of_the_reactor_share_one_transaction(self) -> None:
        asked = [self.begin(self.store.transaction().commit([write(token, facts(token))])) for token in range(2, 52)]
        for each in asked:
            self.wait(each)
        self.assertEqual(self.tokens(), [*range(2, 52)])
        self.wait(self.store.close())
        self.assertEqual((self.store.commits, self.store.transactions), (50, 1))

    def test_commits_that_wait_share_one_transaction(self) -> None:
        gate = self.stop_writer()
        asked = []
        for token in range(2, 12):
            asked.append(self.begin(self.store.transaction().commit([write(token, facts(token))])))
            self.wait(self.store.end_of_turn())
        gate.set()
        for each in asked:
            self.wait(each)
        self.assertEqual((self.tokens(), self.store.transactions), ([*range(2, 12)], 2))

    def test_calls_for_ids_during_a_round_trip_share_the_next_one(self) -> None:
        trips: list[int] = []
        allocate = self.store.allocate

        def count_trip(name: str, count: int) -> Deferred[list[int]]:
            trips.append(count)
            return allocate(name, count)

        self.patch(self.store, "allocate", count_trip)
        sequence = self.sequence()
        asked = [self.begin(sequence.allocate(count)) for count in (1, 3, 2)]
        self.wait(self.store.end_of_turn())
        asked += [self.begin(sequence.allocate(count)) for count in (2, 1)]
        self.assertEqual([self.wait(each) for each in asked], [[2], [3, 4, 5], [6, 7], [8, 9], [10]])
        self.assertEqual(trips, [6, 3])

    def test_a_call_for_ids_that_is_cancelled_takes_none_from_others(self) -> None:
        sequence = self.sequence()
        asked = [self.begin(sequence.allocate(1)) for _ in range(3)]
        asked[1].cancel()
        self.failureResultOf(asked[1], CancelledError)
        self.assertEqual([self.wait(asked[0]), self.wait(asked[2]), self.wait(sequence.allocate(1))], [[2], [4], [5]])

    def test_every_call_for_ids_fails_with_the_round_trip_and_the_next_one_works(self) -> None:
        sequence = self.sequence()
        self.sql("ALTER SEQUENCE stream_orders_seq RENAME TO away")
        for each in [self.begin(sequence.allocate(1)) for _ in range(3)]:
            self.assertRaises(StoreError, self.wait, each)
        self.sql("ALTER SEQUENCE away RENAME TO stream_orders_seq")
        self.assertEqual(self.wait(sequence.allocate(1)), [2])

    def test_a_commit_of_something_impossible_fails_alone(self) -> None:
        """Also an exception that has nothing to do with the database."""
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
        self.wait(asked[0])
        self.assertRaises(TypeError, self.wait, asked[1])
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

    def test_checks_and_reads_do_not_wait_for_writes(self) -> None:
        """A commit whose outcome is being asked for delays no health check."""
        self.commit(write(2, facts(2)))
        gate = self.stop_writer()
        self.wait(self.store.check())
        self.assertEqual((self.tokens(), self.positions()), ([2], {ME: 2}))
        gate.set()

    def test_a_sequence_without_further_ids_is_no_health(self) -> None:
        """That of a serial column ends at 2**31 - 1: each append failed, and the check went on to succeed."""
        (token,) = self.wait(self.sequence().allocate(1))
        self.sql(f"ALTER SEQUENCE stream_orders_seq MAXVALUE {token}")
        self.wait(self.store.check())
        refused = self.assertRaises(StoreError, self.wait, self.sequence().allocate(1))
        self.assertIn("reached maximum value", str(refused))
        self.assertIs(self.assertRaises(StoreError, self.wait, self.store.check()), refused)
        self.commit(write(token, facts(token)))
        self.wait(self.store.check())

    def test_any_exception_on_the_thread_reaches_the_callers(self) -> None:
        self.patch(PostgresConnection, "commit_together", lambda *_: 1 // 0)
        self.assertRaises(ZeroDivisionError, self.commit, write(2, facts(2)))
        self.assertRaises(ZeroDivisionError, self.commit, write(3, facts(3)))

    def test_close_waits_for_what_runs(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute("CREATE TABLE mine (a integer)"))
        gate = self.stop_writer()
        waiting = self.begin(self.store.transaction().commit([write(2, facts(2))]))
        closed = self.begin(self.store.close())
        self.assertRaises(StoreError, self.wait, self.store.transaction().commit([]))
        gate.set()
        self.wait(transaction.execute("INSERT INTO mine VALUES (1)"))
        self.assertNoResult(closed)
        self.wait(transaction.commit([write(3, facts(3))]))
        self.wait(waiting)
        self.wait(closed)
        self.assertEqual(self.sql("SELECT stream_id FROM stream_orders ORDER BY 1"), [(2,), (3,)])

    def test_a_statement_and_a_commit_that_wait_for_a_lock_name_the_session_that_holds_it(self) -> None:
        self.commit(write(2, facts(2)))
        waiting = f"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND {OTHERS}"
        with psycopg.connect(self.url, application_name="backup") as other:
            other.execute("LOCK TABLE stream_orders IN ACCESS EXCLUSIVE MODE")
            reading, committing = self.store.transaction(), self.store.transaction()
            asked = self.begin(reading.execute("SELECT * FROM stream_orders"))
            committed = self.begin(committing.commit([write(3, facts(3))]))
            self.pump.run_call()  # the end of the turn
            until(lambda: self.sql(waiting) == [(2,)], "both wait")
            for each in (reading, committing):
                (holder,) = self.wait(each.blockers())
                self.assertRegex(holder, rf"^session {other.info.backend_pid} of \w+ \(backup\) since 20")
        self.wait(asked)
        self.wait(committed)
        self.assertEqual(self.wait(reading.blockers()), [])
        self.wait(reading.rollback())

    def test_a_transaction_that_waits_for_a_connection_names_the_others(self) -> None:
        open_ones = [self.store.transaction() for _ in range(8)]
        for each in open_ones:
            self.wait(each.execute("SELECT 1"))
        late = self.store.transaction()
        asked = self.begin(late.execute("SELECT 1"))
        self.assertEqual(self.wait(late.blockers()), [PostgresStore.ALL_USED])
        for each in open_ones:
            self.wait(each.rollback())
        self.wait(asked)
        self.wait(late.rollback())

    def test_close_does_not_wait_for_a_server_that_does_not_answer(self) -> None:
        """A table is locked, and a server process is stopped: the outcome of what it was sent is not known."""
        self.patch(postgres_store, "PATIENCE", 0.5)
        self.commit(write(2, facts(2)))
        ids = [pid for (pid,) in self.sql(f"SELECT pid FROM pg_stat_activity WHERE {OTHERS} AND query <> ''")]
        with psycopg.connect(self.url) as other:
            other.execute("LOCK TABLE stream_orders IN ACCESS EXCLUSIVE MODE")
            locked = self.begin(self.store.transaction().commit([write(3, facts(3))]))
            self.pump.run_call()  # the end of the turn
            waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            until(lambda: self.sql(waiting), "the commit waits")
            stopped = [pid for pid in ids if (pid,) not in self.sql(waiting)]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            try:
                reading = self.begin(self.store.positions(ORDERS))
                self.wait(self.store.close())
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            self.failureResultOf(locked, OutcomeUnknownError)
            self.failureResultOf(reading, StoreError)
        self.assertEqual(threads_of(self.store.name), [])


class ConnectionPoolTests(UsesThreads, SynchronousTestCase):
    """Transactions with statements: each has a session of its own, up to a limit."""

    def make_store(self, clock: ReceiptClock) -> PostgresStore:
        return PostgresStore(self.url, self.pump, connections=2, clock=clock)

    def setUp(self) -> None:
        super().setUp()
        self.sql("CREATE TABLE mine (a integer)")

    def test_f14_a_transaction_waits_if_all_connections_are_used(self) -> None:
        transactions = [self.store.transaction() for _ in range(5)]
        asked = [
            self.begin(each.execute("INSERT INTO mine VALUES (%s)", (number,)))
            for number, each in enumerate(transactions)
        ]
        self.wait(asked[0])
        self.wait(asked[1])
        self.commit(write(2, facts(2)))  # the others go on
        self.assertEqual(self.tokens(), [2])
        for number in (2, 3, 4):
            self.assertNoResult(asked[number])
            self.wait(transactions[number - 2].commit([]))
            self.wait(asked[number])
        for each in transactions[3:]:
            self.wait(each.rollback())
        self.assertEqual(self.sql("SELECT a FROM mine ORDER BY a"), [(0,), (1,), (2,)])

    def test_a_transaction_that_is_cancelled_while_it_waits_blocks_no_other(self) -> None:
        taken = [self.store.transaction() for _ in range(2)]
        for each in taken:
            self.wait(each.execute("SELECT 1"))
        late = self.store.transaction()
        asked = self.begin(late.execute("INSERT INTO mine VALUES (1)"))
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        for each in taken:
            self.wait(each.commit([]))
        self.wait(late.rollback())
        self.assertEqual(self.sql("SELECT * FROM mine"), [])

    def test_f14_when_the_server_takes_no_more_sessions_the_transaction_fails_and_nothing_else(self) -> None:
        self.server.sql(f"ALTER DATABASE {self.database} CONNECTION LIMIT 0")
        self.server.sql("CREATE ROLE plain LOGIN")
        self.addCleanup(lambda: self.server.sql("DROP ROLE plain"))
        self.addCleanup(lambda: self.server.sql(f"ALTER DATABASE {self.database} CONNECTION LIMIT -1"))
        store = PostgresStore(self.server.url(self.database, "plain"), self.pump)
        self.assertIn("too many connections", str(self.assertRaises(StoreError, self.wait, store.open())))
        self.wait(store.close())

    def test_a_write_that_leaves_the_position_does_not_wait_for_one_that_moves_it(self) -> None:
        self.commit(write(2, facts(2)))
        mover = self.store.transaction()
        self.wait(mover.execute("UPDATE stream_positions SET stream_id = 3"))
        transaction = self.store.transaction()
        self.wait(transaction.execute("INSERT INTO mine VALUES (1)"))
        self.wait(transaction.commit([write(0, facts(4))]))
        self.wait(mover.rollback())
        self.assertEqual(self.sql("SELECT stream_id FROM stream_positions"), [(2,)])
        self.assertEqual(self.positions(), {ME: 4})

    def test_a_cancelled_statement_can_be_rolled_back(self) -> None:
        transaction = self.store.transaction()
        asked = self.begin(transaction.execute("INSERT INTO mine VALUES (1)"))
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.wait(transaction.rollback())
        self.assertEqual(self.sql("SELECT * FROM mine"), [])

    def test_a_cancelled_commit_of_statements_goes_on_and_cannot_be_rolled_back(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute("INSERT INTO mine VALUES (1)"))
        asked = self.begin(transaction.commit([write(2, facts(2))]))
        asked.cancel()
        self.failureResultOf(asked, CancelledError)
        self.assertRaises(StoreError, self.wait, transaction.rollback())
        self.wait(self.store.close())
        self.assertEqual(self.sql("SELECT * FROM mine"), [(1,)])

    def test_a_session_that_ends_in_a_transaction_fails_it_and_the_next_one_works(self) -> None:
        for last in ("execute", "commit"):
            transaction = self.store.transaction()
            self.wait(transaction.execute("INSERT INTO mine VALUES (1)"))
            self.end_sessions()
            if last == "execute":
                self.assertRaises(StoreError, self.wait, transaction.execute("INSERT INTO mine VALUES (2)"))
                self.assertRaises(StoreError, self.wait, transaction.execute("INSERT INTO mine VALUES (2)"))
                self.wait(transaction.rollback())
            else:
                self.assertRaises(StoreError, self.wait, transaction.commit([write(2, facts(2))]))
            self.assertEqual((self.sql("SELECT * FROM mine"), self.sql("SELECT * FROM stream_orders")), ([], []))
            after = self.store.transaction()
            self.wait(after.execute("SELECT 1"))
            self.wait(after.commit([]))

    def test_after_a_statement_that_failed_nothing_is_committed(self) -> None:
        """As in PostgreSQL: a caller that ignores the error does not store half of its work."""
        transaction = self.store.transaction()
        self.wait(transaction.execute("INSERT INTO mine VALUES (1)"))
        self.assertRaises(StoreError, self.wait, transaction.execute("INSERT INTO nowhere VALUES (1)"))
        self.assertIn("undone", str(self.assertRaises(StoreError, self.wait, transaction.commit([]))))
        self.assertEqual(self.sql("SELECT * FROM mine"), [])

    def test_an_application_may_not_end_the_transaction_nor_leave_anything_in_the_session(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute("SET LOCAL work_mem = '64kB'"))
        refused = ("ABORT", "START TRANSACTION", "PREPARE TRANSACTION 'x'", "SET work_mem = '1MB'", "reset all")
        for sql in (
            *refused,
            "LISTEN mine",
            "DISCARD ALL",
            "DEALLOCATE ALL",
            "COPY mine TO STDOUT",
            "SELECT 1; COMMIT",
        ):
            self.assertRaises(StoreError, self.wait, transaction.execute(sql))
        self.wait(transaction.rollback())


class TroubleTests(UsesThreads, SynchronousTestCase):
    """The server stops."""

    def test_f14_a_server_that_is_away_is_named_and_the_store_goes_on_when_it_is_back(self) -> None:
        self.wait(self.store.claim(ME))
        (first,) = self.wait(self.sequence().allocate(1))
        self.commit(write(first, facts(first)))
        transaction = self.store.transaction()
        self.server.stop("immediate")
        try:
            for ask in (
                self.store.check,
                lambda: self.store.transaction().commit([write(3, facts(3))]),
                lambda: transaction.execute("SELECT 1"),
                lambda: self.store.positions(ORDERS),
                lambda: self.sequence().allocate(1),
            ):
                message = str(self.assertRaises(StoreError, self.wait, ask()))
                self.assertIn(f"/{self.database}'", message)
        finally:
            self.server.start()
        half_of_it = transaction.commit([write(9, facts(9))])
        self.assertIn("undone", str(self.assertRaises(StoreError, self.wait, half_of_it)))
        (second,) = self.wait(self.sequence().allocate(1))
        self.commit(write(second, facts(second)))
        self.wait(self.store.check())
        self.assertEqual(self.tokens(), [first, second])

    def test_f14_f10_under_load_a_commit_is_there_if_it_succeeded_and_is_not_if_it_failed(self) -> None:
        """The server is killed several times; each of ten callers retries what failed."""
        acknowledged: list[int] = []
        failed: list[int] = []

        async def append(times: int) -> None:
            while times:
                try:
                    (token,) = await self.sequence().allocate(1)
                except StoreError:
                    await self.store.end_of_turn()
                    continue
                stored = fact(token, *(str(token + place) for place in range(token % 3 + 1)))
                transaction = self.store.transaction()
                try:
                    if token % 2:
                        await transaction.execute("INSERT INTO mine VALUES (%s)", (token,))
                    await transaction.commit([write(token, [stored])])
                except StoreError:
                    failed.append(token)
                    await transaction.rollback()
                else:
                    acknowledged.append(token)
                    times -= 1

        self.sql("CREATE TABLE mine (a integer)")
        self.wait(self.store.claim(ME))
        callers = [self.begin(append(60)) for _ in range(10)]
        killer = threading.Thread(target=self.kill_server, args=(lambda: len(acknowledged),))
        killer.start()
        for each in callers:
            self.wait(each)
        killer.join()
        page = self.page(upto=10**9, limit=10**6)
        stored = {each.token for each in page.facts}
        self.assertEqual(set(acknowledged) - stored, set(), "acknowledged, but not there")
        self.assertEqual(stored - set(acknowledged), set(), "failed, but there")
        self.assertEqual(len(acknowledged + failed), len(set(acknowledged + failed)), "no ID was given twice")
        self.assertEqual(
            [each.texts for each in page.facts],
            [tuple(str(each.token + place) for place in range(each.token % 3 + 1)) for each in page.facts],
        )
        self.assertEqual(
            self.sql("SELECT a FROM mine ORDER BY a"), [(token,) for token in sorted(acknowledged) if token % 2]
        )

    def kill_server(self, progress: Callable[[], int]) -> None:
        for mark in (100, 250, 400):
            until(lambda mark=mark: progress() >= mark, "some are acknowledged")  # type: ignore[misc]
            self.server.restart("immediate")

    def test_f9_what_was_acknowledged_outlives_a_process_that_is_killed(self) -> None:
        self.wait(self.store.close())
        acknowledged: list[int] = []
        for _ in range(3):
            with subprocess.Popen(
                [sys.executable, "-c", APPEND, self.url], cwd=ROOT, stdout=subprocess.PIPE, text=True
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


class DifferentialTests(OnPostgres, SynchronousTestCase):
    """Hundreds of random operations have the same outcome as in the reference store."""

    streams = (StreamName("up"), StreamName("down"))

    def test_the_database_does_what_the_reference_does(self) -> None:
        reference = MemoryStore(self.make_clock())
        self.wait(reference.open())
        for store in (self.store, reference):
            for name in self.streams:
                self.wait(store.declare(StreamDefinition(name, negative=name == "down")))
        for step in range(600):
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


class ClaimTests(OnPostgres, SynchronousTestCase):
    """A process with a claim is connected as long as one of its sessions is."""

    def claims(self) -> Mapping[InstanceName, bool]:
        return self.wait(self.store.claimed_elsewhere([ME, OTHER]))

    def other(self) -> PostgresStore:
        """Return the store of another process, which has claimed its name."""
        other = self.another_store()
        self.wait(other.claim(OTHER))
        return other

    def end_sessions_of(self, other: PostgresStore) -> None:
        """End the sessions of a process; it does not notice."""
        self.sql(END_SESSIONS, other._holder.id)
        until(lambda: self.claims()[OTHER] is False, "its sessions have ended")

    def test_a_process_is_connected_until_its_sessions_have_ended(self) -> None:
        other = self.other()
        self.assertEqual(self.claims(), {OTHER: True})
        self.wait(other.close())
        until(lambda: self.claims() == {OTHER: False}, "its sessions have ended")

    def test_f17_a_process_whose_name_was_taken_over_neither_commits_nor_allocates(self) -> None:
        """Another process has published a position beyond its open ID."""
        other = self.other()
        (token,) = self.wait(self.sequence(other).allocate(1))
        self.end_sessions_of(other)
        self.assertTrue(self.wait(self.store.take_over(OTHER)))
        self.assertEqual(self.claims(), {})
        late = other.transaction().commit([write(token, facts(token), writer=OTHER)])
        for work in (late, other.claim(OTHER), self.sequence(other).allocate(1)):
            with self.assertRaisesRegex(StoreError, "taken over the name 'worker2' .*: restart this process"):
                self.wait(work)
        self.assertEqual(self.sql("SELECT * FROM stream_orders"), [])

    def test_f17_the_name_of_a_connected_process_is_not_taken_over(self) -> None:
        """Not even if the session that has claimed the name is lost."""
        other = self.other()
        self.assertFalse(self.wait(self.store.take_over(OTHER)))
        exclusive = "FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
        self.server.end_sessions(exclusive, database=self.database)
        until(lambda: self.sql(f"SELECT pid {exclusive}") == [], "it is lost")
        self.assertEqual((self.wait(self.store.take_over(OTHER)), self.claims()), (False, {OTHER: True}))
        self.wait(other.transaction().commit([write(2, facts(2), writer=OTHER)]))

    def test_f17_a_name_that_was_taken_over_may_be_claimed_at_once(self) -> None:
        """The process that took it over goes on: its sessions are not ended."""
        self.wait(self.store.claim(ME))
        self.end_sessions_of(self.other())
        transaction = self.store.transaction()
        self.wait(transaction.execute("SELECT 1"))
        self.wait(self.store.take_over(OTHER))
        self.other()
        self.assertEqual(self.claims(), {ME: True, OTHER: True})
        self.assertFalse(self.wait(self.store.take_over(OTHER)))
        self.wait(transaction.commit([write(2, facts(2))]))
        self.assertEqual(self.sql("SELECT count(*) FROM writer_claims"), [(2,)])

    def test_f17_several_processes_take_over_a_name_at_once(self) -> None:
        self.end_sessions_of(self.other())
        stores = [self.store, self.another_store(), self.another_store()]
        taken = self.wait(gatherResults([self.begin(each.take_over(OTHER)) for each in stores]))
        self.assertIn(True, taken)
        self.assertEqual(self.claims(), {})
        self.other()

    def test_f17_a_name_is_not_claimed_while_it_is_taken_over(self) -> None:
        """The start of its process tries again: the error is temporary."""
        late = self.another_store()
        with psycopg.connect(self.url, autocommit=True) as taking:
            pid = taking.info.backend_pid
            taking.execute(LOCK_SHARED, (OTHER,))
            with self.assertRaisesRegex(StoreError, "has just ended: try again") as refused:
                self.wait(late.claim(OTHER))
            self.assertTrue(refused.exception.temporary)
        until(lambda: not self.sql("SELECT FROM pg_stat_activity WHERE pid = %s", pid), "the session has ended")
        self.wait(late.claim(OTHER))

    def test_it_still_is_when_only_the_session_that_claimed_its_name_is_lost(self) -> None:
        self.other()
        self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
        )
        exclusive = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
        until(lambda: self.sql(exclusive) == [], "it is lost")
        self.assertEqual(self.claims(), {OTHER: True})


class FillTests(OnPostgres, SynchronousTestCase):
    """Where several processes share a database, no follower copies facts into the table where they are written."""

    def fill(self, instance: str, *, copy: bool) -> None:
        self.wait(self.store.claim_tables([ORDERS], InstanceName(instance), copy=copy))

    def test_what_is_written_is_not_copied_to(self) -> None:
        self.commit(write(1), write(1, writer=OTHER))
        why = f"stream 'orders' is written here, by {ME}, {OTHER}: give the worker a database of its own"
        with self.assertRaisesRegex(StoreError, why):
            self.fill("worker1", copy=True)
        self.fill("another", copy=False)

    def test_what_is_a_copy_is_kept_by_one_worker_and_not_written(self) -> None:
        self.fill("worker1", copy=True)
        self.commit(write(5, facts(5), expected=0))
        self.fill("worker1", copy=True)
        for instance, copy in (("worker2", True), ("worker1", False), ("master", False)):
            with self.assertRaisesRegex(StoreError, "stream 'orders' is a copy here, which worker 'worker1' keeps"):
                self.fill(instance, copy=copy)
        self.sql("DELETE FROM stream_copies WHERE stream_name = 'orders'")
        self.fill("master", copy=False)

    def test_each_follower_has_positions_of_its_own(self) -> None:
        one, two = InstanceName("one"), InstanceName("two")
        self.commit(write(5, expected=0, follower=one), write(7, expected=0, follower=two), write(9, facts(9)))
        self.assertEqual(self.wait(self.store.applied_positions(ORDERS, one)), {ME: 5})
        self.assertEqual(self.wait(self.store.applied_positions(ORDERS, two)), {ME: 7})
        self.assertEqual(self.positions(), {ME: 9})
        self.assertEqual(self.wait(self.store.stored_positions()), {ORDERS: {ME: 9}})
