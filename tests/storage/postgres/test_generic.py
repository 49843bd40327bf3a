"""The generic table of PostgreSQL, blocking and without a store."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError, StoreError
from replication.storage.postgres.address import Address
from replication.storage.postgres.connection import PAGING
from replication.storage.postgres.generic import GenericTable
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.session import PostgresSession
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import Token
from tests.contract.stream_store import ME, OTHER, empty, fact, facts
from tests.storage.on_postgres import HasDatabase

if TYPE_CHECKING:
    from collections.abc import Sequence


class GenericTableTests(HasDatabase, SynchronousTestCase):
    def setUp(self) -> None:
        self.session = PostgresSession(Address.parse(self.url), Event(), Holder(), dict.fromkeys(PAGING, "off"))
        self.addCleanup(self.session.close)
        self.table = self.make_table()

    def make_table(self, *, negative: bool = False) -> GenericTable:
        table = GenericTable(StreamDefinition("backfill" if negative else "orders", negative=negative))
        table.declare(self.session, may_create=True)
        return table

    def plan(self, sql: str, *parameters: object) -> str:
        return "\n".join(step for (step,) in self.session.run(f"EXPLAIN {sql}", parameters))

    def test_the_table_is_as_documented(self) -> None:
        """The replay on Spark reads it, too, and so do people."""
        self.table.insert(self.session, [(ME, [fact(2, '"a"', '"b"'), fact(3, "{}")]), (OTHER, facts(4))])
        rows = self.sql('SELECT stream_id, ord, instance_name, "row" FROM "stream_orders" ORDER BY 1, 2')
        self.assertEqual(
            rows,
            [
                (2, 0, "master", '"a"'),
                (2, 1, "master", '"b"'),
                (3, 0, "master", "{}"),
                (4, 0, "worker2", '["row of",4]'),
            ],
        )
        keys = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype <> 'n' AND conrelid = %s::regclass"
        self.assertEqual(self.sql(keys, "stream_orders"), [("PRIMARY KEY (stream_id, ord)",)])

    def test_a_negative_stream_is_stored_with_negative_ids(self) -> None:
        self.make_table(negative=True).insert(self.session, [(ME, [fact(2, '"a"', '"b"'), fact(3)])])
        rows = self.sql("SELECT stream_id, ord FROM stream_backfill ORDER BY 1, 2")
        self.assertEqual(rows, [(-3, 0), (-2, 0), (-2, 1)])

    def test_two_writers_with_the_same_ids_are_no_writers_of_one_database(self) -> None:
        self.table.insert(self.session, [(OTHER, facts(2, 3))])
        with self.assertRaisesRegex(StoreError, "Key .stream_id, ord.=.2, 0. already exists.; after a restore"):
            self.table.insert(self.session, [(ME, facts(2, 3))])
            self.session.ask("SELECT 1", ())

    def test_facts_without_rows_are_no_statement(self) -> None:
        self.table.insert(self.session, [(ME, [empty(2)])])
        self.assertEqual(self.sql("SELECT * FROM stream_orders"), [])

    def test_a_page_goes_along_an_index_before_the_server_has_counted_anything(self) -> None:
        """Without the settings it would sort the rest of a freshly filled table for every page."""
        for negative in (False, True):
            table = self.make_table(negative=negative)
            sign = -1 if negative else 1
            self.sql(
                f"INSERT INTO \"{table.name}\" SELECT {sign} * i, 0, 'master', '1' FROM generate_series(2, 20000) i"
            )
            plan = self.plan(table._page, ME, sign * 5, sign * 10**9, 100)
            self.assertIn("Index Scan", plan)
            self.assertNotIn("  Sort", plan.replace("Incremental Sort", ""))
            page = table.rows(self.session, ME, after=Token(5), upto=Token(10**9), limit=100).page()
            self.assertEqual([each.token for each in page.facts], [*range(6, 106)])

    def test_the_newest_facts_of_all_writers_are_found_by_the_index(self) -> None:
        """The length of the history does not matter, nor the age of a writer's last fact."""
        for negative in (False, True):
            table = self.make_table(negative=negative)
            self.assertEqual(table.newest(self.session, {}), {})
            table.insert(self.session, [(OTHER, facts(4)), (ME, facts(2, 3, 9))])
            self.assertEqual(table.newest(self.session, {}), {ME: 9, OTHER: 4})
            self.assertNotIn("Seq Scan", self.plan(table.select_newest))

    def test_a_row_that_is_no_json_is_refused_instead_of_pairing_rows_wrongly(self) -> None:
        for bad in ([*facts(2, 3), fact(4, "two\x1etexts")], [fact(4, "")], [fact(4, "nul \x00")]):
            with self.assertRaises(StoreError):
                self.table.insert(self.session, [(ME, bad)])
        self.assertEqual(self.sql("SELECT * FROM stream_orders"), [])

    def test_a_row_of_another_program_that_is_no_json_is_named(self) -> None:
        self.table.insert(self.session, [(ME, facts(2, 3))])
        self.sql("INSERT INTO stream_orders VALUES (4, 0, 'master', E'two\x1etexts')")
        with self.assertRaisesRegex(StoreError, "'stream_orders' has a row between 2 and 4 that is not JSON"):
            self.table.rows(self.session, ME, after=Token(0), upto=Token(99), limit=20).page()

    def test_a_page_too_large_for_one_value_of_the_database_becomes_a_shorter_one(self) -> None:
        """The limit is a gigabyte, too much for rows of a test."""
        self.table.insert(self.session, [(ME, facts(*range(2, 30)))])
        ask = self.session.ask

        def ask_little(sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
            if parameters[-1] > 6:  # type: ignore[operator]
                return ask("SELECT repeat('x', 2000000000)", ())
            return ask(sql, parameters)

        self.patch(self.session, "ask", ask_little)
        page = self.table.rows(self.session, ME, after=Token(0), upto=Token(99), limit=20).page()
        self.assertEqual((list(page.facts), page.upto, page.limited), ([*facts(2, 3, 4, 5, 6)], 6, True))

    def test_a_table_of_that_name_that_is_not_ours_is_refused(self) -> None:
        self.sql("CREATE TABLE stream_mine (stream_id bigint, something text)")
        with self.assertRaisesRegex(SchemaError, "'stream_mine' has the columns stream_id, something"):
            GenericTable(StreamDefinition("mine")).declare(self.session, may_create=True)

    def test_no_stream_takes_the_table_of_the_positions(self) -> None:
        """A stream named ``positions`` would have the table ``stream_positions``."""
        self.sql("CREATE TABLE stream_positions (stream_name text, instance_name text, stream_id bigint)")
        with self.assertRaisesRegex(SchemaError, "'stream_positions' has the columns"):
            GenericTable(StreamDefinition("positions")).declare(self.session, may_create=True)

    def test_a_table_that_may_not_be_created_must_be_there(self) -> None:
        self.table.declare(self.session, may_create=False)
        with self.assertRaisesRegex(SchemaError, "no table 'stream_others'"):
            GenericTable(StreamDefinition("others")).declare(self.session, may_create=False)
