"""The generic table, blocking and without a store."""

from __future__ import annotations

import sqlite3

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError, StoreError
from replication.storage.sqlite.generic import GenericTable
from replication.storage.sqlite.session import SqliteSession
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import Token
from tests.contract.stream_store import ME, OTHER, fact, facts

SEARCH = "SEARCH stream_orders USING INDEX sqlite_autoindex_stream_orders_1"


class GenericTableTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.session = SqliteSession(":memory:")
        self.session.connect()
        self.addCleanup(self.session.close)
        self.table = self.make_table()

    def make_table(self, *, negative: bool = False) -> GenericTable:
        table = GenericTable(StreamDefinition("backfill" if negative else "orders", negative=negative))
        table.declare(self.session, may_create=True)
        return table

    def plan(self, sql: str, *parameters: object) -> list[str]:
        return [step for *_, step in self.session.run(f"EXPLAIN QUERY PLAN {sql}", parameters)]

    def test_the_table_is_as_documented(self) -> None:
        """The replay on Spark reads it, too, and so do people."""
        self.table.insert(self.session, [(ME, [fact(2, '"a"', '"b"'), fact(3, "{}")])])
        rows = self.session.run('SELECT stream_id, ord, instance_name, "row" FROM "stream_orders"')
        self.assertEqual(rows, [(2, 0, "master", '"a"'), (2, 1, "master", '"b"'), (3, 0, "master", "{}")])

    def test_facts_of_several_writers_lie_in_the_order_of_their_ids(self) -> None:
        """A page that is read in this order reads each place of the table once."""
        self.table.insert(self.session, [(ME, [fact(2), fact(4, '"a"', '"b"')]), (OTHER, facts(3, 5))])
        rows = self.session.run("SELECT stream_id, ord FROM stream_orders ORDER BY rowid")
        self.assertEqual(rows, [(2, 0), (3, 0), (4, 0), (4, 1), (5, 0)])

    def test_a_negative_stream_is_stored_with_negative_ids(self) -> None:
        self.make_table(negative=True).insert(self.session, [(ME, [fact(2, '"a"', '"b"'), fact(3)])])
        rows = self.session.run("SELECT stream_id, ord FROM stream_backfill")
        self.assertEqual(rows, [(-3, 0), (-2, 0), (-2, 1)])

    def test_two_writers_with_the_same_ids_are_no_writers_of_one_database(self) -> None:
        self.table.insert(self.session, [(OTHER, facts(2, 3))])
        why = "; fact 2 of master has the ID of a fact of worker2; after a restore, .* was emptied or exchanged, delete"
        with self.assertRaisesRegex(StoreError, why):
            self.table.insert(self.session, [(ME, facts(2, 3))])
            self.session.ask("SELECT 1", ())

    def test_a_page_is_read_by_the_primary_key_and_not_sorted(self) -> None:
        plan = self.plan(self.table._page, 0, 9, ME, 9)
        self.assertIn(f"{SEARCH} (stream_id>? AND stream_id<?)", plan)
        self.assertFalse([step for step in plan if "TEMP B-TREE" in step])

    def test_the_newest_facts_are_read_above_the_lowest_stored_position_only(self) -> None:
        self.assertIn(f"{SEARCH} (stream_id>?)", self.plan(self.table._newest, 5))
        self.table.insert(self.session, [(ME, facts(2, 3, 9))])
        self.table.insert(self.session, [(OTHER, facts(4))])
        self.assertEqual(self.table.newest(self.session, {}), {ME: 9, OTHER: 4})
        self.assertEqual(self.table.newest(self.session, {ME: Token(8), OTHER: Token(5)}), {ME: 9})

    def test_a_page_too_large_for_one_value_of_the_database_becomes_a_shorter_one(self) -> None:
        stored = [fact(token, '"' + "x" * 300 + '"') for token in range(2, 30)]
        self.table.insert(self.session, [(ME, stored)])
        self.session.database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2000)
        page = self.table.rows(self.session, ME, after=Token(0), upto=Token(99), limit=20).page()
        self.assertEqual((list(page.facts), page.upto, page.limited), (stored[:5], 6, True))

    def test_a_single_row_too_large_for_the_database_is_an_error(self) -> None:
        self.table.insert(self.session, [(ME, [fact(2, '"' + "x" * 300 + '"')])])
        self.session.database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 250)
        with self.assertRaisesRegex(StoreError, "too big"):
            self.table.rows(self.session, ME, after=Token(0), upto=Token(99), limit=20).page()

    def test_a_row_that_is_no_json_is_named_instead_of_pairing_rows_wrongly(self) -> None:
        self.table.insert(self.session, [(ME, [*facts(2, 3), fact(4, "two\x1etexts")])])
        with self.assertRaisesRegex(StoreError, "'stream_orders' has a row between 2 and 4 that is not JSON"):
            self.table.rows(self.session, ME, after=Token(0), upto=Token(99), limit=20).page()

    def test_a_table_of_that_name_that_is_not_ours_is_refused(self) -> None:
        self.session.run("CREATE TABLE stream_mine (stream_id, something)")
        with self.assertRaisesRegex(SchemaError, "'stream_mine' has the columns stream_id, something"):
            GenericTable(StreamDefinition("mine")).declare(self.session, may_create=True)

    def test_no_stream_takes_the_table_of_the_positions(self) -> None:
        """A stream named ``positions`` would have the table ``stream_positions``."""
        self.session.run("CREATE TABLE stream_positions (stream_name, instance_name, stream_id)")
        for name in ("positions", "POSITIONS"):
            with self.assertRaisesRegex(SchemaError, f"stream_{name}"):
                GenericTable(StreamDefinition(name)).declare(self.session, may_create=True)

    def test_a_table_that_may_not_be_created_must_be_there(self) -> None:
        self.table.declare(self.session, may_create=False)
        with self.assertRaisesRegex(SchemaError, "no table 'stream_others'"):
            GenericTable(StreamDefinition("others")).declare(self.session, may_create=False)
