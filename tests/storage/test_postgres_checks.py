"""What is amiss in a mapped table is said with its cure, and the cure works."""

from __future__ import annotations

from typing import Any

import psycopg
from twisted.trial.unittest import SynchronousTestCase

from replication.streams.registry import StreamDefinition
from replication.wire.grammar import InstanceName, StreamName
from tests.storage.on_postgres import OnPostgres

EVENTS = StreamName("events")


class CheckTests(OnPostgres, SynchronousTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.sql("CREATE TABLE events (id bigint, writer text, name text)")
        self.sql("CREATE INDEX events_id ON events (id)")

    def said(self, **options: Any) -> list[str]:
        """Map the stream, and return what is said about it."""
        self.store.warnings.clear()
        options = {"table": "events", "id_column": "id", "row": ["name"], **options}
        self.wait(self.store.declare(StreamDefinition(EVENTS, **options)))
        return [each for each in self.store.warnings if "sequence" not in each]

    def only(self, **options: Any) -> str:
        (said,) = self.said(**options)
        self.assertTrue(said.startswith("stream 'events': table 'events' "), said)
        return said

    def test_a_table_in_order_needs_no_words(self) -> None:
        self.sql(
            "INSERT INTO events VALUES (2, 'a', 'x'), (2, 'a', 'y'), (3, NULL, 'z'), (-4, 'b', 'c'), (-4, 'd', 'e')"
        )
        self.assertEqual(self.said(), [])

    def test_rows_without_an_id(self) -> None:
        self.sql("INSERT INTO events VALUES (NULL, 'a', 'x')")
        said = self.only()
        self.assertIn("has rows without an ID, which reach nobody", said)
        self.sql("UPDATE events SET id = 2")
        self.sql(said.partition(", then ")[2])
        self.assertEqual(self.said(), [])

    def test_an_id_of_two_writers(self) -> None:
        self.sql("CREATE INDEX ON events (writer, id)")
        self.sql("INSERT INTO events VALUES (2, 'a', 'x'), (7, 'a', 'y'), (7, NULL, 'z')")
        self.assertIn("has rows of 'a' and of 'master' under the ID 7", self.only(instance_column="writer"))
        self.assertEqual(self.said(), [])
        self.assertEqual(self.said(instance_column="writer", where="name <> 'z'"), [])

    def test_an_id_of_two_transactions(self) -> None:
        for name in ("x", "y"):
            self.sql("INSERT INTO events VALUES (7, 'a', %s)", name)
        self.assertIn("has rows under the ID 7 that different transactions have written or changed", self.only())
        self.sql("UPDATE events SET id = -7")
        self.assertEqual(self.said(), [])
        self.assertIn("under the ID -7", self.only(negative=True) if self.cut(7) else "")

    def cut(self, id_: int) -> bool:
        """Let the rows of an ID be of two transactions again."""
        self.sql("UPDATE events SET name = 'z' WHERE id = %s AND name = 'x'", -id_)
        return True

    def test_rows_of_writers_that_there_are_not(self) -> None:
        self.sql("CREATE INDEX ON events (writer, id)")
        self.sql("INSERT INTO events VALUES (2, 'a', 'x'), (3, 'batch', 'y'), (4, NULL, 'z')")
        said = self.only(instance_column="writer", writers=["a", "b"])
        self.assertIn("has rows of 'batch', 'master', not among the stream's writers", said)
        self.assertEqual(self.said(instance_column="writer", writers=["a", "batch", "master"]), [])
        self.assertEqual(self.said(instance_column="writer"), [])

    def test_ids_for_anybody_and_no_trigger(self) -> None:
        self.sql("CREATE SEQUENCE numbers")
        self.sql("ALTER TABLE events ALTER id SET DEFAULT nextval('numbers')")
        self.assertIn("replication streams install", self.only())

    def test_no_index_that_leads_to_a_writers_newest_row(self) -> None:
        rows = "SELECT n, CASE WHEN n % 1000 = 0 THEN 'b' WHEN n % 7 = 0 THEN NULL ELSE 'a' END, 'x'"
        self.sql(f"INSERT INTO events {rows} FROM generate_series(2, 20000) AS n")
        self.sql("UPDATE events SET writer = 'gone' WHERE id = 20")
        expected = {InstanceName("a"): 19998, "b": 20000, "gone": 20, "master": 19999}
        said = self.only(instance_column="writer")
        self.assertEqual(self.wait(self.store.positions(EVENTS)), expected)
        self.assertGreater(self.rows_read(), 19_000)
        self.sql(said.partition("reads all of it: ")[2])
        self.sql("ANALYZE events")
        self.assertEqual(self.said(instance_column="writer"), [])
        self.assertEqual(self.wait(self.store.positions(EVENTS)), expected)
        self.assertLess(self.rows_read(), 100)

    def rows_read(self) -> int:
        """Return how many rows of the table, or of its indexes, it takes to find the positions."""
        table = self.store._tables[EVENTS]
        with psycopg.connect(self.url, autocommit=True) as connection:
            for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
                connection.execute(f"SET {setting} = off")
            ((plan,),) = connection.execute(f"EXPLAIN (ANALYZE, FORMAT json) {table._newest}")  # type: ignore[attr-defined]

        def count(node: dict[str, Any]) -> int:
            read = node["Actual Rows"] * node["Actual Loops"] if "Scan" in node["Node Type"] else 0
            return int(read) + sum(count(each) for each in node.get("Plans", []))

        return count(plan[0]["Plan"])
