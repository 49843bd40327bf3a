"""Each warning about a mapped table has a cure, and the cure works."""

from __future__ import annotations

from typing import Any

import psycopg
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import InstanceName, StreamName
from tests.storage.on_postgres import OnPostgres

EVENTS = StreamName("events")


class CheckTests(OnPostgres, SynchronousTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.sql("CREATE TABLE events (id bigint, writer text, name text)")
        self.sql("CREATE INDEX events_id ON events (id)")

    def warnings(self, **options: Any) -> list[str]:
        """Declare the mapped stream, and return the warnings."""
        self.store.warnings.clear()
        options = {"table": "events", "id_column": "id", "row": ["name"], **options}
        self.wait(self.store.declare(StreamDefinition(EVENTS, **options)))
        return [each for each in self.store.warnings if "sequence" not in each]

    def only_warning(self, **options: Any) -> str:
        (warning,) = self.warnings(**options)
        self.assertTrue(warning.startswith("stream 'events': table 'events' "), warning)
        return warning

    def test_a_table_in_order_causes_no_warning(self) -> None:
        self.sql("INSERT INTO events VALUES (2, 'a', 'x'), (2, 'a', 'y'), (3, NULL, 'z')")
        self.assertEqual(self.warnings(), [])

    def test_rows_without_an_id_are_reported(self) -> None:
        self.sql("INSERT INTO events VALUES (NULL, 'a', 'x')")
        warning = self.only_warning()
        self.assertIn("has rows without an ID, which no follower receives", warning)
        self.sql("UPDATE events SET id = 2")
        self.sql(warning.partition(", then ")[2])
        self.assertEqual(self.warnings(), [])

    def test_a_sequence_with_steps_is_reported(self) -> None:
        """An object-relational mapper gives the IDs between them, also below published ones."""
        self.sql("CREATE SEQUENCE steps INCREMENT 50; ALTER TABLE events ALTER id SET DEFAULT nextval('steps')")
        self.warnings()
        (warning,) = [each for each in self.store.warnings if "in steps of 50" in each]
        self.sql(warning.rpartition(", and ")[2])
        self.warnings()
        self.assertFalse([each for each in self.store.warnings if "in steps" in each])

    def test_a_table_that_a_crash_empties_is_reported(self) -> None:
        self.sql("ALTER TABLE events SET UNLOGGED")
        warning = self.only_warning()
        self.assertIn("is UNLOGGED, so a crash of the server empties it", warning)
        self.sql(warning.rpartition(": ")[2])
        self.assertEqual(self.warnings(), [])

    def test_a_partition_that_a_crash_empties_is_reported(self) -> None:
        self.sql("DROP TABLE events; CREATE TABLE events (id bigint, name text) PARTITION BY RANGE (id)")
        self.sql("CREATE INDEX ON events (id)")
        self.sql('CREATE UNLOGGED TABLE "Part" PARTITION OF events FOR VALUES FROM (0) TO (9)')
        self.sql(self.only_warning().rpartition(": ")[2])
        self.assertEqual(self.warnings(), [])

    def test_a_partition_with_a_sequence_of_its_own_is_reported(self) -> None:
        self.sql("DROP TABLE events; CREATE TABLE events (id bigserial PRIMARY KEY, name text) PARTITION BY RANGE (id)")
        self.sql("CREATE TABLE old PARTITION OF events FOR VALUES FROM (0) TO (9)")
        self.sql('CREATE TABLE "New" (id bigint GENERATED ALWAYS AS IDENTITY, name text)')
        self.sql('ALTER TABLE events ATTACH PARTITION "New" FOR VALUES FROM (9) TO (99)')
        self.warnings()
        (warning,) = [each for each in self.store.warnings if "has the part" in each]
        self.assertIn("""the part "New", whose IDs come from "New_id_seq" if""", warning)
        self.sql(warning.rpartition("published ID: ")[2])
        self.warnings()
        self.assertFalse([each for each in self.store.warnings if "has the part" in each])
        self.sql("INSERT INTO old (name) VALUES ('a')")
        self.sql("SELECT setval('events_id_seq', 20)")
        self.sql("""INSERT INTO "New" (name) VALUES ('b')""")
        self.assertEqual(self.sql("SELECT id FROM events ORDER BY 1"), [(2,), (21,)])

    def test_an_id_of_two_writers_is_reported(self) -> None:
        self.sql("CREATE INDEX ON events (writer, id)")
        self.sql("INSERT INTO events VALUES (2, 'a', 'x'), (7, 'a', 'y'), (7, NULL, 'z')")
        self.assertIn("has rows of 'a' and of 'master' under the ID 7", self.only_warning(instance_column="writer"))
        self.assertEqual(self.warnings(), [])
        self.assertEqual(self.warnings(instance_column="writer", where="name <> 'z'"), [])

    def test_an_id_of_two_transactions_is_reported(self) -> None:
        for name in ("x", "y"):
            self.sql("INSERT INTO events VALUES (7, 'a', %s)", name)
        self.assertIn(
            "has rows under the ID 7 that different transactions have written or changed", self.only_warning()
        )
        self.sql("UPDATE events SET id = -7")
        self.assertEqual(self.warnings(negative=True), [])
        self.sql("UPDATE events SET name = 'z' WHERE name = 'x'")
        self.assertIn("under the ID -7", self.only_warning(negative=True))

    def test_rows_of_unknown_writers_are_reported(self) -> None:
        self.sql("CREATE INDEX ON events (writer, id)")
        self.sql("INSERT INTO events VALUES (2, 'a', 'x'), (3, 'batch', 'y'), (4, NULL, 'z')")
        warning = self.only_warning(instance_column="writer", writers=["a", "b"])
        self.assertIn("has rows of 'batch', 'master', not among the stream's writers", warning)
        self.assertEqual(self.warnings(instance_column="writer", writers=["a", "batch", "master"]), [])
        self.sql("CREATE SEQUENCE event_ids OWNED BY events.id")
        self.sql("ALTER TABLE events ALTER id SET DEFAULT nextval('event_ids')")
        self.sql("SELECT setval('event_ids', 4)")
        self.sql(warning.rpartition("passed theirs: ")[2])
        self.assertEqual(self.sql("SELECT id, writer FROM events ORDER BY 1"), [(2, "a"), (5, "a"), (6, "a")])
        self.sql("ALTER TABLE events ALTER id DROP DEFAULT")
        self.assertEqual(self.warnings(instance_column="writer", writers=["a", "b"]), [])
        self.assertEqual(self.warnings(instance_column="writer"), [])

    def test_a_missing_trigger_is_reported_if_the_table_allocates_ids(self) -> None:
        self.sql("CREATE SEQUENCE numbers")
        self.sql("ALTER TABLE events ALTER id SET DEFAULT nextval('numbers')")
        self.assertIn("replication streams install", self.only_warning())

    def test_a_table_that_allocates_shared_ids_is_refused(self) -> None:
        self.sql("ALTER TABLE events ALTER id SET NOT NULL, ALTER id ADD GENERATED BY DEFAULT AS IDENTITY")
        self.warnings()
        self.assertIsNotNone(self.store.watch())
        self.wait(self.store.declare(StreamDefinition("tags", shares=EVENTS)))
        self.assertRaisesRegex(SchemaError, "streams 'events', 'tags' share their IDs", self.store.watch)
        self.sql("ALTER TABLE events ALTER id DROP IDENTITY")
        self.warnings()
        self.assertIsNotNone(self.store.watch())

    def test_a_missing_index_for_a_writers_newest_row_is_reported(self) -> None:
        rows = "SELECT n, CASE WHEN n % 1000 = 0 THEN 'b' WHEN n % 7 = 0 THEN NULL ELSE 'a' END, 'x'"
        self.sql(f"INSERT INTO events {rows} FROM generate_series(2, 20000) AS n")
        self.sql("UPDATE events SET writer = 'gone' WHERE id = 20")
        expected = {InstanceName("a"): 19998, "b": 20000, "gone": 20, "master": 19999}
        warning = self.only_warning(instance_column="writer")
        self.assertEqual(self.wait(self.store.positions(EVENTS)), expected)
        self.assertGreater(self.rows_read(), 19_000)
        self.sql(warning.partition("reads all of it: ")[2])
        self.sql("ANALYZE events")
        self.assertEqual(self.warnings(instance_column="writer"), [])
        self.assertEqual(self.wait(self.store.positions(EVENTS)), expected)
        self.assertLess(self.rows_read(), 100)

    def rows_read(self) -> int:
        """Return how many rows of the table, or of its indexes, it takes to find the positions."""
        table = self.store._tables[EVENTS]
        with psycopg.connect(self.url, autocommit=True) as connection:
            for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
                connection.execute(f"SET {setting} = off")
            ((plan,),) = connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) {table._query.newest}")  # type: ignore[attr-defined]

        def count(node: dict[str, Any]) -> int:
            read = node["Actual Rows"] * node["Actual Loops"] if "Scan" in node["Node Type"] else 0
            return int(read) + sum(count(each) for each in node.get("Plans", []))

        return count(plan[0]["Plan"])
