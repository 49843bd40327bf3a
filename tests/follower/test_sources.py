"""A database as a source of missed facts and of an audit."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.follower import sources
from replication.follower.sources import IDLE, DatabaseCatchUp, described_streams
from replication.storage import open_store
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.streams.facts import Fact
from replication.streams.history import Epoch
from replication.streams.interfaces import Page, Write
from replication.synapse import since_1_159
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.pump import PumpedClock, threads_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.streams.definitions import Dialect

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


class DatabaseTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = PumpedClock()
        folder = TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name, "app.db")
        self.url = f"sqlite:///{self.path}"
        self.source = DatabaseCatchUp(self.url, self.pump)

    def tearDown(self) -> None:
        self.pump.wait(self.source.close())

    def write(self, *facts: Fact, upto: int) -> None:
        async def work() -> None:
            store = open_store(self.url, self.pump)
            await store.open()
            await store.declare(StreamDefinition("orders"))
            await store.transaction().commit([Write(ORDERS, MASTER, Token(upto), facts)])
            await store.close()

        self.pump.wait(work())

    def ask(self, after: int, upto: int, limit: int = 100) -> tuple[Sequence[Fact], int]:
        got = self.pump.wait(self.source.facts(ORDERS, MASTER, after=Token(after), upto=Token(upto), limit=limit))
        return [*got.facts], got.upto

    def test_facts_of_another_process_are_read(self) -> None:
        two, three = Fact(Token(2), ("[1]",)), Fact(Token(3), ("[2]", "[3]"))
        self.write(two, three, upto=5)
        self.assertEqual(self.ask(0, 5), ([two, three], 5))
        self.assertEqual(self.ask(2, 3), ([three], 3))
        self.assertEqual(self.ask(0, 5, limit=1), ([two], 2))

    def test_tables_of_another_program_are_read_up_to_the_published_position(self) -> None:
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE orders (stream_id INTEGER PRIMARY KEY, writer, item)")
            database.execute("INSERT INTO orders VALUES (2, 'master', 'a'), (3, 'other', 'b'), (4, 'master', 'c')")
            database.commit()
        before = self.path.read_bytes()
        definition = StreamDefinition("orders", table="orders", row=["item"], instance_column="writer")
        self.source = DatabaseCatchUp(self.url, self.pump, [definition])
        two, four = Fact(Token(2), ('["a"]',)), Fact(Token(4), ('["c"]',))
        self.assertEqual(self.ask(0, 9), ([two, four], 9))
        self.assertEqual(self.ask(0, 9, limit=1), ([two], 2))
        self.assertEqual([*self.pump.wait(self.source.history(ORDERS, MASTER))], [])
        with self.assertRaises(StoreError):
            self.pump.wait(self.source.facts(StreamName("stock"), MASTER, after=Token(0), upto=Token(1), limit=5))
        self.assertEqual(self.path.read_bytes(), before)
        self.assertEqual([each.name for each in self.path.parent.iterdir()], [self.path.name])

    def test_rows_that_are_very_far_apart_are_read_in_few_pages(self) -> None:
        """IDs that are made from the time have large gaps."""
        far = 2**62
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE orders (stream_id INTEGER PRIMARY KEY, item)")
            database.execute(f"INSERT INTO orders VALUES (5, 'a'), ({far}, 'b'), ({far + 3_000_000}, 'c')")
            database.commit()
        self.source = DatabaseCatchUp(self.url, self.pump, [StreamDefinition("orders", table="orders", row=["item"])])
        at, found, pages = 0, list[int](), 0
        while len(found) < 3:
            facts, at = self.ask(at, far + 4_000_000)
            found += [each.token for each in facts]
            pages += 1
            self.assertLess(pages, 100)
        self.assertEqual(found, [5, far, far + 3_000_000])

    def test_a_short_range_without_facts_does_not_make_a_later_page_longer(self) -> None:
        """As after each gap of rolled back IDs: pages would grow without a bound in a process that runs long."""
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE orders (stream_id INTEGER PRIMARY KEY, item)")
            database.commit()
        self.source = DatabaseCatchUp(self.url, self.pump, [StreamDefinition("orders", table="orders", row=["item"])])
        for end in range(10, 50, 10):
            self.assertEqual(self.ask(end - 10, end), ([], end))
        self.assertEqual(self.ask(40, 9_000_000), ([], 40 + sources.MOST_IDS))

    def test_a_former_primary_or_a_backup_of_a_mapped_table_is_read_up_to_its_stored_position(self) -> None:
        """The facts above it are not rolled back: the database lacks them."""
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE orders (stream_id INTEGER PRIMARY KEY AUTOINCREMENT, item)")
            database.execute("INSERT INTO orders VALUES (2, 'a'), (4, 'b')")
            database.commit()
        definition = StreamDefinition("orders", table="orders", row=["item"])

        async def work() -> None:
            store = open_store(self.url, self.pump)
            await store.open()
            await store.declare(definition)
            await store.transaction().commit([Write(ORDERS, MASTER, Token(4))])
            await store.store_histories(MASTER, {ORDERS: [Epoch("a", Token(1), Token(1))]})
            await store.close()

        self.pump.wait(work())
        self.source = DatabaseCatchUp(self.url, self.pump, [definition])
        self.assertEqual(self.ask(0, 9), ([Fact(Token(2), ('["a"]',)), Fact(Token(4), ('["b"]',))], 4))
        self.assertEqual(self.ask(4, 9), ([], 4))

    def test_only_the_tables_of_the_same_kind_of_database_are_read(self) -> None:
        """A definition may be of SQLite or of PostgreSQL only, as a whole or in some of its tables."""
        columns: dict[str, Any] = {"table": "orders", "row": ["item"]}
        definitions = []
        dialects: tuple[Dialect, ...] = ("sqlite", "postgresql")
        for number, dialect in enumerate(dialects):
            source = SourceTable(table="orders", row=["item"], dialect=dialect)
            definitions += [
                StreamDefinition(f"mapped{number}", dialect=dialect, position_name="", **columns),
                StreamDefinition(f"joined{number}", row=["item"], tables=[source], position_name=""),
            ]
        self.source = DatabaseCatchUp(self.url, self.pump, definitions)
        self.assertEqual([*self.source.foreign], ["mapped0", "joined0"])
        other = DatabaseCatchUp("postgresql://nowhere.test/db", self.pump, definitions)
        self.assertEqual([*other.foreign], ["mapped1", "joined1"])
        self.pump.wait(other.close())

    def test_an_audit_reads_positions_and_tokens_of_another_programs_tables(self) -> None:
        """Each question may be the first; a stream of which no position is stored has its largest token."""
        with closing(sqlite3.connect(self.path)) as database:
            for table in ("orders", "stock"):
                database.execute(f"CREATE TABLE {table} (stream_id INTEGER PRIMARY KEY, writer, item)")
                database.execute(
                    f"INSERT INTO {table} VALUES (2, 'master', 'a'), (3, 'other', 'b'), (5, 'master', 'c')"
                )
            database.execute("CREATE TABLE stream_positions (stream_name, instance_name, stream_id)")
            database.execute(
                "INSERT INTO stream_positions VALUES ('app_orders', 'master', 7), ('unknown', 'master', 9)"
            )
            database.commit()
        other, stock = InstanceName("other"), StreamName("stock")
        columns: dict[str, Any] = {"row": ["item"], "instance_column": "writer"}
        definitions = [
            StreamDefinition("orders", table="orders", position_name="app_orders", **columns),
            StreamDefinition("stock", table="stock", position_name="", **columns),
            StreamDefinition("missing", table="missing", position_name="elsewhere", **columns),
        ]

        def ask(question: Callable[[DatabaseCatchUp], Any]) -> Any:
            source = DatabaseCatchUp(self.url, self.pump, definitions)
            answer = self.pump.wait(question(source))
            self.pump.wait(source.close())
            return answer

        self.assertEqual(ask(lambda source: source.stored_positions()), {"orders": {"master": 7}})
        self.assertEqual(ask(lambda source: source.newest(stock)), {"master": 5, "other": 3})
        found = ask(lambda source: source.present(ORDERS, MASTER, after=Token(2), upto=Token(5)))
        self.assertEqual(found, {5})
        self.assertEqual(ask(lambda source: source.present(stock, other, after=Token(0), upto=Token(9))), {3})
        source = DatabaseCatchUp(self.url, self.pump, definitions)
        self.assertEqual([source.audits(each) for each in (ORDERS, stock, StreamName("else"))], [True, True, False])
        self.assertEqual([source.stores_positions(each) for each in (ORDERS, stock)], [True, False])
        self.assertEqual((source.state(ORDERS, MASTER, Token(5)), source.settled(ORDERS, MASTER)), (None, 2**63 - 1))
        self.pump.wait(source.close())

    def test_tables_without_any_stored_position_are_those_of_an_unfinished_restore(self) -> None:
        """A new Synapse has no position either: facts that were just published are read, and so is the position 1."""
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE orders (stream_id INTEGER PRIMARY KEY, item)")
            database.execute("CREATE TABLE stream_positions (stream_name, instance_name, stream_id)")
            database.execute("INSERT INTO orders VALUES (3, 'a')")
            database.commit()
        definition = StreamDefinition("orders", table="orders", row=["item"], position_name="orders")
        self.source = DatabaseCatchUp(self.url, self.pump, [definition])
        self.assertEqual(self.ask(0, 1), ([], 1))
        three = Fact(Token(3), ('["a"]',))
        self.assertEqual(self.ask(0, 3), ([three], 3))
        for after, upto in ((0, 2), (3, 9), (0, 101)):
            with self.assertRaisesRegex(StoreError, "'stream_positions' of the database is empty.* being restored"):
                self.ask(after, upto)
        with self.assertRaises(StoreError):
            self.pump.wait(self.source.stored_positions())
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("INSERT INTO stream_positions VALUES ('another', 'master', 1)")
            database.commit()
        self.assertEqual(self.pump.wait(self.source.stored_positions()), {})
        self.assertEqual([self.ask(0, 101), self.ask(3, 9)], [([three], 101), ([], 9)])

    def test_writers_are_searched_in_ranges_that_a_slow_database_makes_short(self) -> None:
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE orders (stream_id INTEGER PRIMARY KEY, writer, item)")
            database.execute("INSERT INTO orders VALUES (2, 'one', 'a'), (50000, 'other', 'b'), (900000, 'one', 'c')")
            database.commit()
        columns: dict[str, Any] = {"table": "orders", "row": ["item"], "position_name": "orders"}
        definitions = [
            StreamDefinition("orders", instance_column="writer", **columns),
            StreamDefinition("stock", **columns),
        ]
        self.source = DatabaseCatchUp(self.url, self.pump, definitions)
        self.assertEqual([*map(self.source.names_writers, (ORDERS, StreamName("stock")))], [True, False])
        self.assertEqual(self.pump.wait(self.source.last_row(ORDERS)), 900_000)
        store, clock, ranges = self.source._store, Clock(), list[tuple[int, int]]()
        self.patch(self.source, "_reactor", clock)
        writers = store.writers

        async def note(stream: StreamName, *, after: Token, upto: Token) -> Any:
            ranges.append((after, upto))
            clock.advance(2.0 if len(ranges) in (3, 5) else 0.5)
            return await writers(stream, after=after, upto=upto)

        self.patch(store, "writers", note)
        found = self.pump.wait(self.source.writers(ORDERS, after=Token(1), upto=Token(400_000)))
        self.assertEqual(found, {"one": 2, "other": 50_000})
        sizes = [upto - after for after, upto in ranges]
        self.assertEqual(sizes, [20_000, 40_000, 80_000, 40_000, 80_000, 40_000, 80_000, 19_999])
        self.source.note_former(ORDERS, [InstanceName("other")])

    def test_a_page_of_another_programs_table_has_a_bounded_range_of_ids(self) -> None:
        """A writer whose rows are rare must not make the database read millions of rows of others, if that is slow."""
        self.patch(sources, "SHORT", 0.0)
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE orders (stream_id INTEGER PRIMARY KEY, item)")
            database.execute("INSERT INTO orders VALUES (2500000, 'a')")
            database.commit()
        self.source = DatabaseCatchUp(self.url, self.pump, [StreamDefinition("orders", table="orders", row=["item"])])
        at, pages = Token(0), []
        while at < 2_600_000:
            get = self.source.facts(ORDERS, MASTER, after=at, upto=Token(2_600_000), limit=9)
            page = self.pump.wait(get)
            at = page.upto
            pages.append((at, page.limited, [fact.token for fact in page.facts]))
        expected = [(1_000_000, True, []), (2_000_000, True, []), (2_600_000, False, [2_500_000])]
        self.assertEqual(pages, expected)

    def test_positions_are_read_once_for_many_pages(self) -> None:
        self.write(*[Fact(Token(each), ("[]",)) for each in range(2, 8)], upto=7)
        asked: list[str] = []
        positions = self.source._store.positions

        def note(stream: StreamName) -> Any:
            asked.append(stream)
            return positions(stream)

        self.patch(self.source._store, "positions", note)
        opened: list[str] = []
        opening = self.source._store.open

        def note_open() -> Any:
            opened.append("open")
            return opening()

        self.patch(self.source._store, "open", note_open)
        with patch.object(self.source._store, "declare", wraps=self.source._store.declare) as declare:
            for after in (1, 3, 5):
                self.assertEqual(self.ask(after, 7, limit=2)[1], after + 2)
        self.assertEqual((asked, declare.call_count), (["orders"], 1))
        self.write(Fact(Token(8), ("[]",)), upto=8)
        self.assertEqual((self.ask(7, 8)[1], asked), (8, ["orders"] * 2))
        self.assertEqual(opened, ["open"])

    def test_a_file_is_closed_while_nothing_is_read_and_a_backup_in_its_place_is_read_then(self) -> None:
        """With the file open, a master could not begin the WAL of a backup that was copied over it."""
        self.write(Fact(Token(2), ("[1]",)), upto=2)
        backup = self.path.with_name("backup.db")
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("VACUUM INTO ?", [str(backup)])
        self.write(Fact(Token(3), ("[2]",)), upto=3)
        self.pump.advance(IDLE)
        self.assertEqual(self.ask(1, 9)[1], 3)
        self.pump.advance(IDLE / 2)
        self.assertEqual(self.ask(1, 9)[1], 3)
        self.pump.advance(IDLE / 2)
        self.assertTrue(self.source._opened)
        self.pump.advance(IDLE / 2)
        self.pump.run_call()
        self.assertEqual(threads_of(str(self.path)), [])
        for each in self.path.parent.glob(f"{self.path.name}-*"):
            each.unlink()
        self.path.write_bytes(backup.read_bytes())
        with closing(sqlite3.connect(self.path, timeout=0)) as database:
            self.assertEqual(database.execute("PRAGMA journal_mode = WAL").fetchall(), [("wal",)])
        self.assertEqual(self.ask(1, 9), ([Fact(Token(2), ("[1]",))], 2))

    def test_a_copy_that_went_back_between_two_pages_is_read_up_to_its_new_position(self) -> None:
        self.write(*[Fact(Token(each), ("[]",)) for each in range(2, 8)], upto=7)
        self.assertEqual(self.ask(1, 9, limit=2)[1], 3)

        async def go_back() -> None:
            store = open_store(self.url, self.pump)
            await store.open()
            await store.declare(StreamDefinition("orders"))
            await store.transaction().commit([Write(ORDERS, MASTER, Token(3), reset=True)])
            await store.close()

        self.pump.wait(go_back())
        self.write(Fact(Token(4), ("[]",)), upto=4)
        self.assertEqual(self.ask(3, 9, limit=2), ([Fact(Token(4), ("[]",))], 4))

    def test_a_copy_that_is_behind_returns_what_it_has(self) -> None:
        self.write(Fact(Token(2), ("[1]",)), upto=2)
        self.assertEqual(self.ask(1, 9), ([Fact(Token(2), ("[1]",))], 2))
        nothing = self.pump.wait(self.source.facts(ORDERS, MASTER, after=Token(2), upto=Token(9), limit=100))
        self.assertEqual(nothing, Page([], Token(2), limited=True))
        self.write(Fact(Token(7), ("[2]",)), upto=7)
        self.assertEqual(self.ask(2, 9), ([Fact(Token(7), ("[2]",))], 7))

    def test_a_missing_database_is_not_created_and_is_read_once_it_exists(self) -> None:
        with self.assertRaisesRegex(StoreError, str(self.path)):
            self.ask(1, 9)
        self.assertFalse(self.path.exists())
        self.write(upto=4)
        self.assertEqual(self.ask(1, 9), ([], 4))

    def test_a_stream_that_the_database_lacks_is_a_store_error(self) -> None:
        self.write(upto=4)
        with self.assertRaises(StoreError):
            self.pump.wait(self.source.facts(StreamName("unknown"), MASTER, after=Token(1), upto=Token(9), limit=1))


class DescribedTests(SynchronousTestCase):
    def test_the_streams_of_a_synapse_are_described_behind_its_redis_only(self) -> None:
        configured = StreamDefinition("events", row=["mine"])
        others = {"orders": StreamDefinition("orders"), "events": configured}
        definitions = [*others.values()]
        self.assertEqual(described_streams(["tcp:here:9092"], definitions), others)
        found = described_streams(["tcp:here:9092", "redis://here"], definitions)
        self.assertEqual(found.keys(), {each.definition.name for each in since_1_159.STREAMS} | {"orders"})
        self.assertIs(found[StreamName("events")], configured)
