"""One connection, blocking: transactions of several batches, and what the database refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import PositionMovedError, StoreError
from replication.storage.contract import Batch
from replication.storage.interactions import Interaction
from replication.storage.receipts import DELETED_AT_ONCE, receipt_key
from replication.storage.sqlite import connection as sqlite_connection
from replication.storage.sqlite.connection import SqliteConnection
from replication.storage.sqlite.generic import GenericTable
from replication.storage.sqlite.mapped import MappedTable
from replication.storage.sqlite.session import SqliteSession
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Receipt, Write
from replication.wire.grammar import Token
from tests.contract.stream_store import ME, fact, facts, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.storage.sqlite.generic import Table
    from replication.streams.interfaces import ISqlExecutor


class ConnectionTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.connection = SqliteConnection(":memory:", read_only=False, busy_timeout=0.0)
        self.connection.open()
        self.addCleanup(self.connection.close)
        self.tables: dict[str, Table] = {
            name: GenericTable(StreamDefinition(name, negative=name == "down")) for name in ("orders", "down")
        }
        for table in self.tables.values():
            self.connection.declare([table])

    def batch(self, *writes: Write, receipt: Receipt | None = None) -> Batch:
        return Batch([(self.tables[each.stream], each) for each in writes], receipt, 1_800_000_000.0, 0.0)

    def commit_together(self, *batches: Batch) -> Sequence[type[Exception] | None]:
        outcomes = self.connection.commit_together(batches)
        return [None if each is None else type(each) for each in outcomes]

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        return self.connection.run(lambda database: database.execute(sql, parameters))

    def tokens(self) -> list[int]:
        page = self.connection.page(self.tables["orders"], ME, after=Token(0), upto=Token(999), limit=999)
        return [each.token for each in page.facts]

    def test_positions_have_the_sign_of_their_table(self) -> None:
        self.connection.commit(self.batch(write(3), write(3, facts(2, 3), stream="down")))
        self.connection.commit(self.batch(write(2), write(2, stream="down", expected=3)))
        rows = self.execute("SELECT stream_name, instance_name, stream_id FROM stream_positions")
        self.assertEqual(sorted(rows), [("down", "master", -3), ("orders", "master", 3)])

    def test_a_function_moves_its_position_with_one_statement(self) -> None:
        ran: list[str] = []
        for stream, sign in (("orders", 1), ("down", -1)):
            self.connection.commit(self.batch(write(3, stream=stream, expected=0)))  # there is no row yet
            self.connection.session.database.set_trace_callback(ran.append)
            self.connection.commit(self.batch(write(5, stream=stream, expected=3)))
            self.connection.session.database.set_trace_callback(None)
            with self.assertRaises(PositionMovedError):
                self.connection.commit(self.batch(write(6, stream=stream, expected=3)))
            rows = self.execute("SELECT stream_id FROM stream_positions WHERE stream_name = ?", (stream,))
            self.connection.rollback()
            self.assertEqual(rows, [(5 * sign,)])
        moved = [each for each in ran if "stream_positions" in each]
        self.assertEqual([each.split()[0] for each in moved], ["UPDATE", "UPDATE"], ran)

    def test_batches_share_one_transaction(self) -> None:
        outcomes = self.commit_together(*(self.batch(write(token, facts(token))) for token in range(2, 12)))
        self.assertEqual((outcomes, self.tokens()), ([None] * 10, [*range(2, 12)]))
        self.assertEqual((self.connection.commits, self.connection.transactions), (10, 1))

    def test_writers_in_one_transaction_store_each_position_once(self) -> None:
        asked: list[str] = []
        self.connection.session.database.set_trace_callback(asked.append)
        self.commit_together(*(self.batch(write(token, facts(token))) for token in (3, 4, 2)))
        self.connection.session.database.set_trace_callback(None)
        self.assertEqual(len([each for each in asked if "stream_positions" in each]), 1)
        rows = self.execute("SELECT instance_name, stream_id FROM stream_positions")
        self.assertEqual(rows, [(ME, 4)])

    def test_of_many_batches_every_bad_one_fails_alone_wherever_it_is(self) -> None:
        """The order is kept: each batch expects the position that the good one before it leaves."""
        for bad in ({0}, {15}, {7, 8}, {3, 4, 12}, set(range(16))):
            self.setUp()
            before, batches = 0, []
            for number in range(16):
                token = number + 2
                batches.append(self.batch(write(token, facts(token), expected=999 if number in bad else before)))
                before = before if number in bad else token
            outcomes = self.commit_together(*batches)
            self.assertEqual(outcomes, [PositionMovedError if number in bad else None for number in range(16)])
            self.assertEqual(self.tokens(), [number + 2 for number in range(16) if number not in bad])
            self.assertEqual(self.connection.commits, 16 - len(bad))

    def test_a_begin_that_fails_is_tried_once_and_fails_every_batch(self) -> None:
        """Another process has the lock, so halves would wait for it too."""
        with patch.object(SqliteSession, "begin", side_effect=StoreError("locked")) as begin:
            self.assertEqual(self.commit_together(*[self.batch(write(2))] * 8), [StoreError] * 8)
        self.assertEqual(begin.call_count, 1)

    def test_after_a_commit_that_failed_nothing_is_tried_again(self) -> None:
        """Its outcome is unknown: a second attempt could store it twice."""
        self.connection.session.run("PRAGMA foreign_keys = ON")
        self.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        parent = "parent REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED"  # looked at by COMMIT
        self.execute(f"CREATE TABLE children (id INTEGER PRIMARY KEY, {parent})")
        self.connection.commit(self.batch())
        children = StreamDefinition("children", table="children", id_column="id", row=["parent"])
        self.tables["children"] = MappedTable(children)
        orphan = self.batch(write(2, [fact(2, "[77]")], stream="children"))
        self.assertEqual(self.commit_together(self.batch(write(2, facts(2))), orphan), [StoreError] * 2)
        self.assertEqual((self.tokens(), self.connection.commits), ([], 1))
        self.assertEqual(self.commit_together(self.batch(write(2, facts(2)))), [None])

    def interaction(self, token: int, *, then: Callable[[], object] = lambda: None) -> Interaction:
        """Return one that inserts an order and calls ``then``; the contract has its other properties."""

        def work(database: ISqlExecutor) -> Batch:
            self.called.append(token)
            database.execute("INSERT INTO mine VALUES (?)", (token,))
            then()
            return self.batch(write(token, facts(token)))

        return Interaction(work, lambda _: None)

    def interact(self, *interactions: Interaction) -> Sequence[type[BaseException] | None]:
        """Run them with a table of their own, and check that this table and the facts agree."""
        self.called: list[int] = []
        if sqlite_connection.SHARED_TIME > 0:
            self.patch(sqlite_connection, "SHARED_TIME", 60.0)  # on a busy machine, 10 ms are soon over
        self.execute("CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY)")
        self.connection.session.commit()
        outcomes = self.connection.interact_together(interactions)
        self.assertFalse(self.connection.session.database.in_transaction)
        self.assertEqual(self.connection.session.run("SELECT id FROM mine"), [(each,) for each in self.tokens()])
        return [None if each is None else type(each) for each in outcomes]

    def test_interactions_share_one_commit_and_each_fails_alone(self) -> None:
        bad = {3: lambda: 1 // 0, 5: lambda: self.connection.session.run("SELEKT")}
        outcomes = self.interact(*(self.interaction(token, then=bad.get(token, lambda: None)) for token in range(2, 7)))
        self.assertEqual(outcomes, [None, ZeroDivisionError, None, StoreError, None])
        self.assertEqual((self.tokens(), self.called), ([2, 4, 6], [2, 3, 4, 5, 6]))
        self.assertEqual((self.connection.commits, self.connection.transactions), (3, 1))

    def test_interactions_that_all_fail_need_no_commit(self) -> None:
        self.assertEqual(self.interact(self.interaction(2, then=lambda: 1 // 0)), [ZeroDivisionError])
        self.assertEqual(self.connection.transactions, 0)

    def test_after_an_error_that_undoes_the_transaction_the_other_interactions_run_again(self) -> None:
        def undo() -> None:
            self.connection.session.run("INSERT OR ROLLBACK INTO mine VALUES (2)")

        outcomes = self.interact(
            self.interaction(2), self.interaction(3), self.interaction(4, then=undo), self.interaction(5)
        )
        self.assertEqual(outcomes, [None, None, StoreError, None])
        self.assertEqual((self.tokens(), self.called), ([2, 3, 5], [2, 3, 4, 2, 3, 5]))

    def test_a_shared_commit_that_fails_fails_all_and_nothing_is_called_again(self) -> None:
        self.connection.session.run("PRAGMA foreign_keys = ON")
        parent = "parent REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED"  # looked at by COMMIT
        self.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        self.execute(f"CREATE TABLE children ({parent})")

        def add_orphan() -> None:
            self.connection.session.run("INSERT INTO children VALUES (77)")

        outcomes = self.interact(
            self.interaction(2), self.interaction(3, then=lambda: 1 // 0), self.interaction(4, then=add_orphan)
        )
        self.assertEqual(outcomes, [StoreError, ZeroDivisionError, StoreError])
        self.assertEqual((self.tokens(), self.called), ([], [2, 3, 4]))
        self.assertEqual(self.interact(self.interaction(2)), [None])

    def test_a_begin_that_fails_calls_no_function(self) -> None:
        self.interact()
        with patch.object(SqliteSession, "begin", side_effect=StoreError("locked")):
            outcomes = self.connection.interact_together([self.interaction(2), self.interaction(3)])
        self.assertEqual(([type(each) for each in outcomes], self.called), ([StoreError] * 2, []))

    def test_when_the_time_is_over_the_rest_is_left_for_the_next_transaction(self) -> None:
        self.patch(sqlite_connection, "SHARED_TIME", -1.0)
        first, second = self.interaction(2), self.interaction(3)
        self.assertEqual((self.interact(first, second), self.called), ([None], [2]))
        self.assertEqual((self.interact(second), self.called), ([None], [3]))

    def test_a_receipt_of_0_1_0_is_found_unless_the_stream_has_its_own(self) -> None:
        for name, token in (("k", 2), (receipt_key("orders", "k"), 3)):
            self.connection.commit(Batch([], Receipt(name, [Token(token)]), 1.0, 0.0))
        found = [self.connection.find_receipt(receipt_key(each, "k"), 0.0) for each in ("notes", "orders")]
        self.assertEqual(found, [[2], [3]])
        self.assertIsNone(self.connection.find_receipt(receipt_key("notes", "other"), 0.0))

    def test_old_receipts_are_deleted_when_new_ones_come(self) -> None:
        for day in range(3):
            self.connection.commit(Batch([], Receipt(f"day {day}", [Token(2)]), day, day - 1))
        self.assertEqual(self.execute("SELECT key FROM append_receipts"), [("day 2",)])

    def test_a_commit_deletes_a_limited_number_of_old_receipts_and_that_of_its_key(self) -> None:
        old = [(f"{n}", n) for n in range(DELETED_AT_ONCE + 9)]
        self.connection.session.database.executemany("INSERT INTO append_receipts VALUES (?, '[]', ?)", old)
        last, _ = old[-1]
        self.connection.commit(Batch([], Receipt(last, [Token(2)]), 1e9, 1e6))
        self.assertEqual(self.execute("SELECT count(*) FROM append_receipts"), [(9,)])
        self.assertEqual(self.execute("SELECT tokens FROM append_receipts WHERE written_at = 1e9"), [("[2]",)])

    def test_a_value_that_cannot_be_stored_is_an_error_that_names_the_database(self) -> None:
        for value in ([1], 2**63, "\ud800"):
            message = str(self.assertRaises(StoreError, self.execute, "SELECT ?", (value,)))
            self.assertTrue(message.startswith("database ':memory:': "), message)

    def test_a_database_that_cannot_have_a_wal_is_refused(self) -> None:
        """As on some network file systems; an unnamed database is of that kind too."""
        connection = SqliteConnection("", read_only=False, busy_timeout=0.0)
        self.addCleanup(connection.close)
        self.assertIn("cannot have a WAL", str(self.assertRaises(StoreError, connection.open)))

    def test_a_closed_connection_is_an_error_and_may_be_closed_twice(self) -> None:
        self.connection.close()
        self.connection.close()
        self.assertIn("is not open", str(self.assertRaises(StoreError, self.connection.find_receipt, "k", 0.0)))
