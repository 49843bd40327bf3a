"""What other processes write into a file is seen."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from replication.storage.sqlite import SqliteStore
from replication.streams.registry import SourceTable, StreamDefinition
from replication.streams.seams import IWatch, Reach
from replication.wire.grammar import StreamName, Token
from tests.storage.pump import Pump

EVENTS = StreamName("events")


class SqliteWatchTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = str(Path(folder.name) / "app.db")
        self.sql("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT)")
        self.pump = Pump()
        self.store = self.open(self.path)

    def open(self, path: str) -> SqliteStore:
        store = SqliteStore(path, self.pump)
        self.pump.wait(store.open())
        self.addCleanup(lambda: self.pump.wait(store.close()))
        return store

    def sql(self, sql: str) -> None:
        with closing(sqlite3.connect(self.path)) as database:
            database.execute(sql)
            database.commit()

    def watch(self, *definitions: StreamDefinition) -> IWatch:
        for each in definitions:
            self.pump.wait(self.store.declare(each))
        watch = self.store.watch()
        assert watch is not None
        return watch

    def reached(self, watch: IWatch) -> dict[str, tuple[int | None, int]]:
        return {name: (reach.complete, reach.drawn) for name, reach in self.pump.wait(watch.look()).items()}

    def test_the_last_id_that_anybody_has_committed_is_complete(self) -> None:
        watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"], where="name > ''"))
        self.assertEqual(self.reached(watch), {"events": (0, 0)})
        self.sql("INSERT INTO events (name) VALUES ('a'), ('')")
        self.assertEqual(self.reached(watch), {"events": (3, 3)})
        before = self.pump.wait(watch.look())
        self.assertEqual(self.reached(watch), {"events": (3, 3)})
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("INSERT INTO events (name) VALUES ('b')")
            self.assertEqual(self.reached(watch), {"events": (3, 3)})
            database.commit()
        self.assertEqual(self.reached(watch), {"events": (4, 4)})
        self.assertEqual(before, {EVENTS: Reach(Token(3), Token(3))}, "what was returned stays as it is")

    def test_what_we_commit_ourselves_is_seen_too(self) -> None:
        watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.reached(watch)
        transaction = self.store.transaction()
        self.pump.wait(transaction.execute("INSERT INTO events (name) VALUES ('a')"))
        self.pump.wait(transaction.commit([]))
        self.assertEqual(self.reached(watch), {"events": (2, 2)})

    def test_tables_that_count_down_and_those_that_are_gathered(self) -> None:
        self.sql("CREATE TABLE past (id INTEGER PRIMARY KEY, name TEXT)")
        watch = self.watch(
            StreamDefinition("past", table="past", id_column="id", row=["name"], negative=True),
            StreamDefinition("both", row=["name"], tables=[SourceTable(table="events", row=["name"], id_column="id")]),
            StreamDefinition("own"),
        )
        self.assertEqual(list(watch.streams), ["past", "both"])
        self.assertEqual(self.reached(watch), {"past": (0, 0), "both": (0, 0)})
        self.sql("INSERT INTO past VALUES (-7, 'a'), (9, 'b')")
        self.sql("INSERT INTO events (name) VALUES ('a')")
        self.assertEqual(self.reached(watch), {"past": (7, 7), "both": (1, 1)})

    def test_a_file_that_nobody_has_changed_is_not_read(self) -> None:
        watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.assertIs(self.pump.wait(watch.look())[EVENTS], self.pump.wait(watch.look())[EVENTS])
        self.assertEqual(self.pump.wait(watch.look())[EVENTS], Reach(Token(0), Token(0)))

    def test_nobody_else_writes_to_memory_or_to_tables_of_ours(self) -> None:
        self.pump.wait(self.store.declare(StreamDefinition("own")))
        self.assertIsNone(self.store.watch())
        memory = self.open(":memory:")
        self.pump.wait(memory.transaction().commit([]))
        self.assertIsNone(memory.watch())
