"""A watch of an SQLite file finds what other processes write."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from replication.storage.sqlite.store import SqliteStore
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.streams.interfaces import IWatch, SequenceState
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
        return {name: (reach.settled, reach.last_value) for name, reach in self.pump.wait(watch.poll()).items()}

    def test_ids_that_another_program_sets_back_are_moved_forward_with_a_warning(self) -> None:
        """SQLite has no TRUNCATE: programs empty a table and the table of last IDs."""
        for again, last in (([], 3), (["INSERT INTO events (name) VALUES ('reused')"], 6)):
            with self.subTest(again=again):
                watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
                self.sql("INSERT INTO events (name) VALUES ('a'), ('b')")
                self.assertEqual(self.reached(watch), {"events": (last, last)})
                for each in ("DELETE FROM events", "DELETE FROM sqlite_sequence", *again):
                    self.sql(each)
                self.reached(watch)
                self.sql("INSERT INTO events (name) VALUES ('new')")
                self.assertEqual(self.reached(watch), {"events": (last + 1, last + 1)})
                warning = self.store.warnings.pop()
                self.assertIn(f"behind ID {last}, which is stored: moved forward; rows inserted between", warning)
                self.sql("DELETE FROM events")
                self.reached(watch)
                self.assertEqual(self.store.warnings, [], "the last ID is still known")

    def test_ids_that_sqlite_allocates_again_are_reported(self) -> None:
        """Without AUTOINCREMENT, a row that has the ID of a deleted last row reached no follower, without a word."""
        self.sql("CREATE TABLE plain (id INTEGER PRIMARY KEY, name TEXT)")
        plain = StreamDefinition("plain", table="plain", id_column="id", row=["name"])
        watch = self.watch(plain)
        self.sql("INSERT INTO plain (id, name) VALUES (2, 'a'), (3, 'b'), (4, 'c')")
        self.assertEqual(self.reached(watch), {"plain": (4, 4)})
        self.sql("DELETE FROM plain WHERE id = 3")
        self.reached(watch)
        self.assertEqual(self.store.warnings, [], "the ID of another row is not allocated again")
        for _ in range(2):
            self.sql("DELETE FROM plain WHERE id = 4")
            self.reached(watch)
            (warning,) = self.store.warnings
            self.assertIn("table 'plain' ends at ID 2, and IDs up to 4 were published: without AUTOINCREMENT", warning)
        self.store.warnings.clear()
        self.sql("INSERT INTO stream_positions (stream_name, instance_name, stream_id) VALUES ('plain', 'master', 4)")
        self.reached(self.watch(plain))
        self.assertIn("ends at ID 2, and IDs up to 4 were published", self.store.warnings[0])

    def test_rows_are_on_the_disk_before_they_are_published(self) -> None:
        """A function of the same process may write them; its transactions do not wait for the disk."""
        watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.reached(watch)
        transaction = self.store.transaction(synchronous=False)
        self.pump.wait(transaction.execute("INSERT INTO events (name) VALUES ('a')"))
        self.pump.wait(transaction.commit([]))
        synced: list[int] = []  # bytes of the WAL
        with mock.patch.object(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size)):
            self.assertEqual(self.reached(watch), {"events": (2, 2)})
        self.assertEqual(synced, [Path(f"{self.path}-wal").stat().st_size])

    def test_rows_of_another_program_are_on_the_disk_before_they_are_published(self) -> None:
        watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.reached(watch)
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("PRAGMA synchronous = NORMAL")  # its COMMIT does not wait for the disk
            database.execute("INSERT INTO events (name) VALUES ('a')")
            database.commit()
        with mock.patch.object(os, "fsync") as fsync:
            for _ in range(2):
                self.assertEqual(self.reached(watch), {"events": (2, 2)})
                self.assertEqual(fsync.call_count, 1, "once for each change")

    def test_the_last_committed_id_is_complete(self) -> None:
        watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"], where="name > ''"))
        self.assertEqual(self.reached(watch), {"events": (1, 1)}, "ID 1 is used up")
        self.sql("INSERT INTO events (name) VALUES ('a'), ('')")
        self.assertEqual(self.reached(watch), {"events": (3, 3)})
        before = self.pump.wait(watch.poll())
        self.assertEqual(self.reached(watch), {"events": (3, 3)})
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("INSERT INTO events (name) VALUES ('b')")
            self.assertEqual(self.reached(watch), {"events": (3, 3)})
            database.commit()
        self.assertEqual(self.reached(watch), {"events": (4, 4)})
        self.assertEqual(before, {EVENTS: SequenceState(Token(3), Token(3))}, "what was returned stays as it is")

    def test_commits_of_the_store_itself_are_read_too(self) -> None:
        watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.reached(watch)
        transaction = self.store.transaction()
        self.pump.wait(transaction.execute("INSERT INTO events (name) VALUES ('a')"))
        self.pump.wait(transaction.commit([]))
        self.assertEqual(self.reached(watch), {"events": (2, 2)})

    def test_tables_that_count_down_and_joined_tables(self) -> None:
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

    def test_a_table_whose_last_id_cannot_be_read_stops_no_other_stream(self) -> None:
        self.sql("CREATE TABLE odd (id, name TEXT)")
        self.sql("CREATE TABLE gone (id INTEGER PRIMARY KEY, name TEXT)")
        watch = self.watch(
            StreamDefinition("odd", table="odd", id_column="id", row=["name"]),
            StreamDefinition("gone", table="gone", id_column="id", row=["name"]),
            StreamDefinition("events", table="events", id_column="id", row=["name"]),
        )
        self.sql("INSERT INTO odd VALUES (3, 'a')")
        self.assertEqual(self.reached(watch)["odd"], (3, 3))
        for wrong in ("3.5", "'zz'", "x'ff'", "CAST(x'ff' AS TEXT)"):
            self.sql(f"INSERT INTO odd VALUES ({wrong}, 'b')")
            self.sql("INSERT INTO events (name) VALUES ('a')")
            states = self.pump.wait(watch.poll())
            self.assertEqual((states[StreamName("odd")].settled, states[EVENTS].error), (3, None))
            self.assertRegex(str(states[StreamName("odd")].error), "stream_id|not an integer|Could not decode")
        self.assertEqual(states[EVENTS].settled, 5)
        self.sql("DROP TABLE gone")
        self.assertIn("no such table", str(self.pump.wait(watch.poll())[StreamName("gone")].error))
        self.sql("DELETE FROM odd WHERE typeof(id) <> 'integer'")
        self.assertEqual(self.pump.wait(watch.poll())[StreamName("odd")], SequenceState(Token(3), Token(3)))

    def test_an_unchanged_file_is_not_read(self) -> None:
        watch = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.assertIs(self.pump.wait(watch.poll())[EVENTS], self.pump.wait(watch.poll())[EVENTS])
        self.assertEqual(self.pump.wait(watch.poll())[EVENTS], SequenceState(Token(1), Token(1)))

    def test_there_is_no_watch_in_memory_or_of_generic_tables(self) -> None:
        self.pump.wait(self.store.declare(StreamDefinition("own")))
        self.assertIsNone(self.store.watch())
        memory = self.open(":memory:")
        self.pump.wait(memory.transaction().commit([]))
        self.assertIsNone(memory.watch())
