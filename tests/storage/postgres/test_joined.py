"""Joined streams on PostgreSQL, through a store."""

from __future__ import annotations

from threading import Event

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError
from replication.storage.postgres.address import Address
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.joined import JoinedTable
from replication.storage.postgres.session import PostgresSession
from replication.storage.postgres.store import READ_ONLY
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import Token
from tests.contract.joined import PETS, JoinedContract
from tests.contract.stream_store import ME, fact
from tests.storage.on_postgres import OnPostgres


class JoinedTests(OnPostgres, JoinedContract, SynchronousTestCase):
    """The contract on PostgreSQL."""

    DIALECT = "postgresql"
    MARK = "%s"

    def sql(self, sql: str, *parameters: object) -> list[tuple[object, ...]]:
        return OnPostgres.sql(self, sql.replace("?", "%s"), *parameters)

    def test_an_expression_is_in_a_row_what_a_column_of_its_type_is(self) -> None:
        row = ["ARRAY['a', NULL]", "'{\"b\": 1}'::jsonb", "'[1.50]'::json", "date '2026-11-20'", "1.50", "(true)"]
        self.map_pets(self.source(row=row), row=[f"c{place}" for place in range(len(row))])
        self.add("cats", (2, "a"))
        self.assertEqual(self.pets(), [fact(2, '[["a",null],{"b":1},[1.5],"2026-11-20","1.50",true]')])

    def test_expressions_that_change_their_types_are_read_as_after_a_restart(self) -> None:
        """Before, a table that was retyped while it was served had other texts live than after a restart."""
        self.sql("CREATE TABLE typed (id bigint PRIMARY KEY, a json, b timestamptz)")
        self.map_pets(self.source("typed", row=["a", "source.b"]), row=["a", "b"])
        self.sql("""INSERT INTO typed VALUES (2, '{"k":1}', '2020-01-01 10:00+00')""")
        for _ in range(7):  # more often than a statement is used that is not prepared
            self.assertEqual(self.pets(), [fact(2, '[{"k":1},"2020-01-01T10:00:00+00:00"]')])
        self.sql("ALTER TABLE typed ALTER a TYPE text, ALTER b TYPE timestamp")
        self.assertEqual(self.pets(), [fact(2, '["{\\"k\\":1}","2020-01-01T10:00:00"]')])

    def test_a_view_is_refused_because_its_rows_lie_nowhere(self) -> None:
        self.sql("CREATE VIEW birds AS SELECT * FROM cats")
        self.assertIn("a view or the like", self.refusal(self.source("birds")))

    def test_an_id_that_is_no_integer_is_refused(self) -> None:
        self.assertIn("'name' is not an integer", self.refusal(self.source(id_column="name")))

    def test_ids_come_from_the_sequence_that_is_named_and_go_on_after_the_newest_fact(self) -> None:
        self.sql("CREATE SEQUENCE pet_ids")
        self.add("cats", (7, "a"))
        self.map_pets(sequence="pet_ids")
        sequence = self.store.sequence(PETS)
        assert sequence is not None
        self.assertEqual(self.wait(sequence.allocate(2)), [8, 9])
        self.assertEqual(self.sql("SELECT last_value FROM pet_ids"), [(9,)])

    def test_a_sequence_that_is_something_else_is_refused(self) -> None:
        with self.assertRaises(SchemaError):
            self.map_pets(sequence="cats")

    def test_each_table_is_sought_by_its_own_index(self) -> None:
        joins = "LEFT JOIN owners ON owners.id = source.owner"
        table = JoinedTable(StreamDefinition(PETS, row=["n"], tables=[self.source(joins=joins)]))
        self.sql("INSERT INTO cats SELECT n, NULL, 'x', n FROM generate_series(1, 5000) AS n")
        self.sql("ANALYZE")
        (part,) = table.queries
        plan = self.sql(f"EXPLAIN {part.page}", *part.parameters(ME, Token(9), Token(4000), 9))
        self.assertTrue(any("Index Scan using cats_id" in str(step) for (step,) in plan), plan)

    def test_a_table_that_is_altered_while_we_run_is_read_on(self) -> None:
        self.map_pets()
        for token in range(2, 12):  # so often that the driver prepares the statement
            self.add("cats", (token, "a"))
            self.pets()
        before = self.pets()
        self.sql("ALTER TABLE cats ALTER name TYPE integer USING 7")
        self.assertEqual([each.token for each in self.pets()], [each.token for each in before])
        self.assertNotEqual(self.pets(), before)

    def test_a_session_that_only_reads_plans_a_page_once(self) -> None:
        self.add("cats", (2, "a"))
        table = JoinedTable(StreamDefinition(PETS, row=["name"], tables=[self.source()]))
        session = PostgresSession(Address.parse(self.url, read_only=True), Event(), Holder(), READ_ONLY)
        self.addCleanup(session.close)
        for _ in range(9):
            self.assertEqual(table.rows(session, ME, after=Token(1), upto=Token(2), limit=9).tokens, [2])
        plans = "SELECT generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE '%cats%'"
        self.assertEqual([custom for _, custom in session.run(plans)], [0])
