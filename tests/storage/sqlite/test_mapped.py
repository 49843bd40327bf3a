"""Streams in tables of the application, through a store and directly."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import RowRefusedError, SchemaError, StoreError, ValueRefusedError
from replication.storage.contract import IdTakenError
from replication.storage.mapped import NotJsonError
from replication.storage.sqlite.mapped import MappedTable
from replication.storage.sqlite.store import SqliteStore
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.contract.stream_store import ME, OTHER, UsesStore, empty, fact, write

if TYPE_CHECKING:
    from replication.streams.facts import Fact

EVENTS = StreamName("events")


class MappedTests(UsesStore, SynchronousTestCase):
    """Mapped tables through a store."""

    store: SqliteStore

    def make_store(self, now: object) -> SqliteStore:
        return SqliteStore(":memory:", self.pump)

    def setUp(self) -> None:
        super().setUp()
        self.sql("CREATE TABLE events (id INTEGER, instance_name TEXT, name TEXT, size, visible INTEGER DEFAULT 1)")
        self.sql("CREATE INDEX events_id ON events (id)")

    def sql(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        transaction = self.store.transaction()
        rows = self.wait(transaction.execute(sql, parameters))
        self.wait(transaction.commit([]))
        return rows

    def map_events(self, **options: Any) -> None:
        options = {"table": "events", "id_column": "id", "row": ["name", "size"], **options}
        self.wait(self.store.declare(StreamDefinition(EVENTS, **options)))

    def map_past(self, table: str) -> None:
        """Map a stream that counts down onto a table, which may then have negative IDs."""
        past = StreamDefinition("past", table=table, id_column="id", row=["name"], negative=True)
        self.wait(self.store.declare(past))

    def add(self, *rows: tuple[object, ...]) -> None:
        transaction = self.store.transaction()
        self.wait(
            transaction.executemany("INSERT INTO events (id, instance_name, name, size) VALUES (?, ?, ?, ?)", rows)
        )
        self.wait(transaction.commit([]))

    def test_a_text_that_the_column_changes_into_a_number_without_json_is_refused(self) -> None:
        """No later attempt can work, so the error is of the value: HTTP answers 400."""
        self.sql("CREATE TABLE sizes (id INTEGER PRIMARY KEY, size REAL)")
        self.map_events(table="sizes", row=["size"])
        with self.assertRaisesRegex(ValueRefusedError, "column 'size' of table 'sizes' has, at ID 2, what is no JSON"):
            self.commit_events(fact(2, '["1e999"]'))

    def test_a_text_that_a_trigger_changes_into_one_that_is_not_utf_8_is_refused(self) -> None:
        self.map_events()
        self.sql(
            "CREATE TRIGGER spoil AFTER INSERT ON events BEGIN "
            "UPDATE events SET name = CAST(x'41ff' AS TEXT) WHERE id = new.id; END"
        )
        with self.assertRaisesRegex(ValueRefusedError, r"column 'name' of table 'events' has, at ID 2, .*not UTF-8"):
            self.commit_events(fact(2, '["a",1]'))

    def test_a_text_that_is_not_utf_8_is_named(self) -> None:
        self.map_events()
        self.sql("INSERT INTO events (id, name, size) VALUES (2, 'a\ufffd', 1), (3, 'b', CAST(x'41ff' AS TEXT))")
        self.assertEqual(self.wait(self.store.facts(EVENTS, ME, after=Token(0), upto=Token(2), limit=10)).upto, 2)
        with self.assertRaisesRegex(
            NotJsonError, r"column 'size' of table 'events' has, at ID 3, .*'A\\xff' is not UTF-8"
        ):
            self.wait(self.store.facts(EVENTS, ME, after=Token(0), upto=Token(3), limit=10))

    def commit_events(self, *stored: Any, **options: Any) -> None:
        self.commit(write(stored[-1].token, stored, stream=EVENTS, **options))

    def test_others_begin_with_2_where_ids_come_from_an_autoincrement_column(self) -> None:
        """ID 1 counts as used, so no follower would receive its row (docs/protocol/ids.md F5)."""
        self.sql("CREATE TABLE Empty (id INTEGER PRIMARY KEY AUTOINCREMENT, name, size)")
        self.sql("CREATE TABLE begun (id INTEGER PRIMARY KEY AUTOINCREMENT, name, size)")
        self.sql("INSERT INTO begun (id, name) VALUES (7, 'a')")
        for table, expected in (("empty", 2), ("begun", 8)):
            for _ in range(2):
                self.map_events(table=table)
            self.assertEqual(self.sql(f"INSERT INTO {table} (name) VALUES ('b') RETURNING id"), [(expected,)])

    def test_a_table_that_was_emptied_goes_on_after_the_published_ids(self) -> None:
        """The file's sequence began again, too: followers went back, and deleted what they had copied."""
        self.sql("CREATE TABLE emptied (id INTEGER PRIMARY KEY AUTOINCREMENT, name, size)")
        self.map_events(table="emptied")
        self.assertEqual(self.store.warnings, [])
        self.sql("INSERT INTO stream_positions (stream_name, instance_name, stream_id) VALUES ('events', 'master', 5)")
        self.sql("DELETE FROM sqlite_sequence WHERE name = 'emptied'")
        for _ in range(2):
            self.map_events(table="emptied")
        (warning,) = self.store.warnings
        self.assertIn("the last ID of table emptied was 0, behind ID 5, which is stored: moved forward", warning)
        self.assertEqual(self.sql("INSERT INTO emptied (name) VALUES ('b') RETURNING id"), [(6,)])

    def test_a_table_is_emptied_as_well_if_autoincrement_stands_on_a_line_of_its_own(self) -> None:
        """Rows that were inserted after it had been emptied got published IDs again, and were lost without a word."""
        self.sql("CREATE TABLE lines (id INTEGER PRIMARY KEY\nAUTOINCREMENT, name, size)")
        self.map_events(table="lines")
        self.assertEqual(self.sql("INSERT INTO lines (name) VALUES ('b') RETURNING id"), [(2,)])

    def test_the_autoincrement_of_another_column_is_left_alone(self) -> None:
        self.sql("CREATE TABLE kept (pk INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER UNIQUE, name, size)")
        self.sql("INSERT INTO kept (id, name) VALUES (1000, 'a')")
        self.sql("INSERT INTO stream_positions (stream_name, instance_name, stream_id) VALUES ('events', 'master', 9)")
        self.map_events(table="kept")
        self.assertEqual(self.sql("INSERT INTO kept (id, name) VALUES (1001, 'b') RETURNING pk"), [(2,)])
        self.assertEqual(self.store.warnings, [])

    def test_a_comment_makes_no_autoincrement(self) -> None:
        """There may be no table sqlite_sequence, and the start failed."""
        self.sql("CREATE TABLE plain (id INTEGER PRIMARY KEY, /* no AUTOINCREMENT */ name, size -- AUTOINCREMENT\n)")
        self.map_events(table="plain")
        self.assertEqual(self.sql("INSERT INTO plain (name) VALUES ('b') RETURNING id"), [(1,)])

    def test_rows_without_an_id_are_reported(self) -> None:
        """An INT PRIMARY KEY is no INTEGER PRIMARY KEY: without an ID, such a row has NULL, and no follower saw it."""
        self.sql("CREATE TABLE trap (id INT PRIMARY KEY, name, size)")
        self.map_events(table="trap")
        self.sql("INSERT INTO trap (name) VALUES ('a')")
        self.map_events(table="trap", where="name <> 'a'")
        self.map_events(table="trap")
        before, excluded, found = self.store.warnings
        what = (
            "declares id INT PRIMARY KEY, so an INSERT without an ID stores NULL, which no follower receives: declare"
        )
        self.assertIn(what, before)
        self.assertEqual(before, excluded)
        self.assertIn(
            "table 'trap' has rows without an ID, which no follower receives: give each row an ID, and declare id",
            found,
        )

    def test_an_id_that_vacuum_changes_is_reported(self) -> None:
        """Rows after a VACUUM got IDs that were published, and no follower received them."""
        self.sql("CREATE TABLE moving (name, size)")
        self.sql("CREATE TABLE declared (pk INTEGER PRIMARY KEY, name, size)")
        self.sql("CREATE TABLE named (pk INTEGER PRIMARY KEY, oid INTEGER NOT NULL UNIQUE, name, size)")
        self.map_events(table="declared", id_column="_rowid_")
        self.map_events(table="named", id_column="OID")
        self.assertEqual(self.store.warnings, [])
        self.map_events(table="moving", id_column="rowid")
        (warning,) = self.store.warnings
        self.assertIn("no column of table 'moving' declares the ID rowid, so VACUUM may change it", warning)

    def test_a_key_that_is_never_null_causes_no_warning(self) -> None:
        self.sql("CREATE TABLE keyed (id BIGINT NOT NULL PRIMARY KEY, name, size)")
        self.map_events(table="keyed")
        self.assertEqual(self.store.warnings, [])

    # ---- reading

    def test_columns_in_order_are_a_row(self) -> None:
        self.map_events(row=["size", "name", "id"])
        self.add((2, None, "a", 7), (3, None, "snowman ☃", 0.1), (4, None, None, "x"), (5, None, "", 2**62))
        self.assertEqual(
            list(self.page(stream=EVENTS).facts),
            [
                fact(2, '[7,"a",2]'),
                fact(3, '[0.1,"snowman \\u2603",3]'),
                fact(4, '["x",null,4]'),
                fact(5, '[4611686018427387904,"",5]'),
            ],
        )

    def test_rows_of_one_id_are_a_fact_in_the_order_of_rowid(self) -> None:
        self.map_events()
        self.add((3, None, "z", 1), (2, None, "b", 1), (3, None, "a", 1), (3, None, "m", 1))
        self.assertEqual(
            list(self.page(stream=EVENTS).facts), [fact(2, '["b",1]'), fact(3, '["z",1]', '["a",1]', '["m",1]')]
        )

    def test_trap_13_pages_hold_whole_facts(self) -> None:
        self.map_events()
        stored = [fact(token, *(f'["{token}",{size}]' for size in range(token))) for token in (2, 7, 3, 5)]
        self.commit_events(*stored)
        stored.sort()
        for limit in range(1, 20):
            seen: list[Fact] = []
            page = self.page(stream=EVENTS, limit=limit)
            while page.limited:
                seen += page.facts
                page = self.page(stream=EVENTS, after=page.upto, limit=limit)
            self.assertEqual([*seen, *page.facts], stored)

    def test_where_selects_rows(self) -> None:
        self.map_events(where="visible OR size > 5")
        self.add((2, None, "a", 1), (3, None, "b", 1), (4, None, "c", 9))
        self.sql("UPDATE events SET visible = 0 WHERE id > 2")
        self.assertEqual(self.tokens(EVENTS), [2, 4])
        self.assertEqual(self.positions(EVENTS), {ME: 4})

    def test_only_positive_ids_are_a_streams_or_only_negative_ones(self) -> None:
        self.map_past("events")
        self.add((-9, None, "a", 1), (-2, None, "b", 1), (3, None, "c", 1))
        self.map_events()
        self.assertEqual((self.tokens(EVENTS), self.positions(EVENTS)), ([3], {ME: 3}))
        self.map_events(negative=True)
        self.assertEqual((self.tokens(EVENTS), self.positions(EVENTS)), ([2, 9], {ME: 9}))
        self.sql("DELETE FROM events WHERE id < 0")
        self.assertEqual((self.tokens(EVENTS), self.positions(EVENTS)), ([], {}))

    def test_an_id_that_no_follower_receives_is_refused(self) -> None:
        self.add((-2, None, "b", 1), (3, None, "c", 1))
        with self.assertRaisesRegex(SchemaError, "'events' has a row with the ID -2, which no follower would receive"):
            self.map_events()
        self.map_events(where="id > 0")
        self.map_past("events")
        self.map_events()
        self.add((0, None, "a", 1))
        for negative in (False, True):
            with self.assertRaisesRegex(SchemaError, "the ID 0"):
                self.map_events(negative=negative)
        self.map_events(where="id > 0")

    def test_a_negative_fact_keeps_the_order_of_its_rows(self) -> None:
        self.map_events(negative=True)
        stored = [fact(2, '["a",1]'), fact(3, '["b",2]', '["a",1]', '["c",0]')]
        self.commit_events(*stored)
        self.assertEqual(self.sql("SELECT id, name FROM events"), [(-2, "a"), (-3, "b"), (-3, "a"), (-3, "c")])
        self.assertEqual(list(self.page(stream=EVENTS).facts), stored)
        self.assertEqual(list(self.page(stream=EVENTS, after=2, limit=1).facts), stored[1:])

    def test_values_that_no_row_can_have_are_named(self) -> None:
        self.map_events()
        self.add((2, None, "a", 1))
        for value in (b"bytes", float("inf")):
            self.sql("UPDATE events SET size = ?", value)
            message = str(self.assertRaises(StoreError, self.page, stream=EVENTS))
            for word in ("'events'", "ID 2", "'size'"):
                self.assertIn(word, message)

    def test_an_id_that_is_no_integer_is_named(self) -> None:
        self.sql("CREATE TABLE odd (id REAL, name, size)")
        self.sql("INSERT INTO odd VALUES (2, 'a', 1)")
        self.map_events(table="odd")
        for ask in (lambda: self.page(stream=EVENTS), lambda: self.positions(EVENTS)):
            self.assertIn("'id' of table 'odd' holds 2.0", str(self.assertRaises(StoreError, ask)))

    def test_names_may_be_words_of_sql(self) -> None:
        self.sql('CREATE TABLE "order" ("index" INTEGER PRIMARY KEY, "select" TEXT, "from" TEXT)')
        self.sql('CREATE INDEX pair ON "order" ("from", "index")')
        self.map_events(table="order", id_column="index", row=["select"], instance_column="from")
        self.commit_events(fact(2, '["x"]'))
        self.assertEqual(list(self.page(stream=EVENTS).facts), [fact(2, '["x"]')])
        self.commit(write(1, stream=EVENTS, reset=True))
        self.assertEqual((self.tokens(EVENTS), self.store.warnings), ([], []))

    # ---- whose rows they are

    def test_with_an_instance_column_each_writer_has_its_own_rows_and_master_those_with_null(self) -> None:
        self.map_events(instance_column="instance_name")
        self.add((2, None, "a", 1), (3, OTHER, "b", 1), (4, ME, "c", 1), (5, OTHER, "d", 1))
        self.assertEqual((self.tokens(EVENTS), self.tokens(EVENTS, OTHER)), ([2, 4], [3, 5]))
        self.assertEqual(self.positions(EVENTS), {ME: 4, OTHER: 5})
        self.commit(write(9, stream=EVENTS, writer=OTHER))
        self.assertEqual(self.positions(EVENTS), {ME: 4, OTHER: 9})

    def test_without_an_instance_column_all_rows_are_the_writers(self) -> None:
        self.map_events()
        self.add((2, "x", "a", 1), (3, "y", "b", 1))
        self.assertEqual((self.tokens(EVENTS), self.tokens(EVENTS, OTHER)), ([2, 3], [2, 3]))
        self.assertEqual(self.positions(EVENTS), {ME: 3})
        self.map_events(writers=["hub"])
        self.assertEqual(self.positions(EVENTS), {"hub": 3})
        self.commit(write(2, stream=EVENTS, writer=OTHER))
        self.assertEqual(self.positions(EVENTS), {OTHER: 3})

    # ---- writing

    def test_rows_become_the_values_of_columns(self) -> None:
        self.map_events(instance_column="instance_name")
        self.commit_events(fact(2, '["a",1]', '["b",2.5]'), fact(3, '[null,"x"]'))
        self.assertEqual(
            self.sql("SELECT id, instance_name, name, size, visible FROM events"),
            [(2, ME, "a", 1, 1), (2, ME, "b", 2.5, 1), (3, ME, None, "x", 1)],
        )
        self.assertEqual(self.positions(EVENTS), {ME: 3})

    def test_what_is_written_comes_back_as_it_was(self) -> None:
        self.map_events()
        stored = [
            fact(2, '["\\u2603 \\"",1.5e-07]'),
            fact(3, "[null,null]", '["0",-9007199254740993]'),
            fact(4, '["",""]'),
        ]
        self.commit_events(*stored)
        self.assertEqual(list(self.page(stream=EVENTS).facts), stored)

    def test_a_row_that_does_not_fit_the_columns_is_named_and_nothing_is_stored(self) -> None:
        self.map_events()
        for text, message in (
            ('["a"]', "not an array of name, size"),
            ('{"a":1}', "not an array"),
            ('["a",true]', """fact 3 is ["a",true], but table 'events' has ["a",1] for it"""),
            ("[7,1]", """fact 3 is [7,1], but table 'events' has ["7",1] for it"""),
            ('[["a"],1]', "column 'name' holds no arrays and objects"),
            ('["a",36893488147419103232]', "too large"),
        ):
            refused = self.store.transaction().commit(
                [Write(EVENTS, ME, Token(3), [fact(2, '["a",1]'), fact(3, text)])]
            )
            self.assertIn(message, str(self.assertRaises(ValueRefusedError, self.wait, refused)))
        self.assertEqual((self.tokens(EVENTS), self.positions(EVENTS)), ([], {}))

    def test_a_row_that_the_stream_would_never_show_again_is_refused(self) -> None:
        self.map_events(where="size < 5 AND source.visible")
        self.commit_events(fact(2, '["a",1]'))
        message = str(self.assertRaises(StoreError, self.commit_events, fact(3, '["a",9]')))
        self.assertIn("""fact 3 is ["a",9], but table 'events' has no row for it""", message)
        self.assertEqual(self.sql("SELECT id FROM events"), [(2,)])

    def test_what_the_table_itself_refuses_is_an_error(self) -> None:
        self.sql("CREATE UNIQUE INDEX one ON events (name)")
        self.map_events()
        self.commit_events(fact(2, '["a",1]'))
        error = self.assertRaises(StoreError, self.commit_events, fact(3, '["a",2]'))
        self.assertIn("""events.name, for the fact ["a",2]""", str(error))
        self.assertIsInstance(error, RowRefusedError)  # a retry may work once the other row is deleted
        self.wait(self.store.check())

    def test_a_row_that_a_trigger_refuses_does_not_count_against_the_database(self) -> None:
        self.map_events()
        self.sql("CREATE TRIGGER no BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'not today'); END")
        self.assertIn("not today", str(self.assertRaises(RowRefusedError, self.commit_events, fact(3, '["a",2]'))))
        self.wait(self.store.check())

    def test_rows_that_the_application_has_written_itself_are_not_written_again(self) -> None:
        self.map_events()
        transaction = self.store.transaction()
        self.wait(transaction.execute("INSERT INTO events (id, name, size) VALUES (2, 'a', 1)"))
        self.wait(transaction.commit([write(2, [fact(2, '["a",1]')], stream=EVENTS)]))
        self.assertEqual(list(self.page(stream=EVENTS).facts), [fact(2, '["a",1]')])

    def test_an_id_that_another_program_has_taken_is_not_acknowledged_although_the_rows_are_equal(self) -> None:
        self.map_events()
        self.sql("INSERT INTO events (id, name, size) VALUES (2, 'a', 1)")
        self.assertIn("try again", str(self.assertRaises(StoreError, self.commit_events, fact(2, '["a",1]'))))
        transaction = self.store.transaction()
        self.wait(transaction.execute("SELECT 1"))
        refused = transaction.commit([write(2, [fact(2, '["a",1]')], stream=EVENTS)])
        self.assertRaises(StoreError, self.wait, refused)
        self.commit_events(fact(3, '["a",1]'))
        self.assertEqual(self.tokens(EVENTS), [2, 3])

    def test_rows_that_the_application_has_written_otherwise_are_refused(self) -> None:
        """A connected follower would receive one row, and one that catches up another."""
        self.map_events()
        for written in (fact(2, '["a",2]'), fact(2, '["a",1]', '["a",1]'), empty(2)):
            transaction = self.store.transaction()
            self.wait(transaction.execute("INSERT INTO events (id, name, size) VALUES (2, 'a', 1)"))
            refused = transaction.commit([write(2, [written], stream=EVENTS)])
            message = str(self.assertRaises(IdTakenError, self.wait, refused))
            self.assertIn("has rows for fact 2 already; another program wrote them", message)
            self.assertNotIn('"a"', message, "it may be shown to a peer that may not read the stream")
        self.assertEqual(self.tokens(EVENTS), [])

    def test_reset_deletes_the_writers_rows_above_and_no_others(self) -> None:
        self.map_events(instance_column="instance_name", where="visible")
        self.add((2, None, "a", 1), (3, OTHER, "b", 1), (4, ME, "c", 1), (5, None, "d", 1), (6, None, "hidden", 1))
        self.sql("UPDATE events SET visible = 0 WHERE id = 6")
        self.commit(write(2, stream=EVENTS, reset=True))
        self.assertEqual(self.sql("SELECT id FROM events"), [(2,), (3,), (6,)])

    # ---- declaring

    def refusal(self, **options: Any) -> str:
        return str(self.assertRaises(SchemaError, self.map_events, **options))

    def test_the_error_names_the_fault_of_a_mapping(self) -> None:
        self.assertIn("no such table: nowhere", self.refusal(table="nowhere"))
        self.assertIn("no such column: source.missing", self.refusal(row=["name", "missing"]))
        self.assertIn("no such column: source.missing", self.refusal(id_column="missing"))
        self.assertIn("no such column: source.missing", self.refusal(instance_column="missing"))
        self.assertIn("no such column: missing", self.refusal(where="missing > 0"))
        self.assertIn("syntax error", self.refusal(where="size >"))
        for message in (self.refusal(table="nowhere"), self.refusal(where="size = ?")):
            self.assertIn("stream 'events' cannot be mapped onto table", message)

    def test_a_view_and_a_table_without_rowid_are_refused(self) -> None:
        self.sql("CREATE VIEW shown AS SELECT * FROM events")
        self.assertIn("a view: map the table behind it", self.refusal(table="Shown"))
        self.sql("CREATE TABLE bare (id INTEGER PRIMARY KEY, name, size) WITHOUT ROWID")
        self.assertIn("WITHOUT ROWID", self.refusal(table="bare"))

    def test_a_missing_index_is_reported_with_the_sql_that_creates_it(self) -> None:
        self.sql("DROP INDEX events_id")
        self.map_events()
        (warning,) = self.store.warnings
        self.assertIn("stream 'events': table 'events' has no index on 'id'", warning)
        self.sql(warning.partition("reads all of it: ")[2])
        self.map_events(where="true")
        self.assertEqual(len(self.store.warnings), 1)

    def test_each_writers_newest_row_is_found_by_an_index_or_its_lack_is_a_warning(self) -> None:
        self.sql("CREATE TABLE log (id INTEGER PRIMARY KEY, writer TEXT, name, writers)")
        self.sql("INSERT INTO log (id, writer) VALUES (2, 'a'), (3, 'b'), (4, NULL), (5, 'a'), (6, 'gone'), (-9, 'z')")
        self.map_past("log")
        expected = {"a": 5, "b": 3, ME: 4, "gone": 6}
        mapping = {"table": "log", "row": ["name"], "instance_column": "writer"}
        self.map_events(**mapping)
        self.assertEqual(self.positions(EVENTS), expected)
        (warning,) = self.store.warnings
        self.sql(warning.partition("reads all of it: ")[2])
        self.map_events(**mapping)
        self.assertEqual(self.positions(EVENTS), expected)
        self.map_events(**mapping, where="id <> 5")
        self.assertEqual(self.positions(EVENTS), {**expected, "a": 2})
        self.assertEqual(len(self.store.warnings), 1)
        self.map_events(**mapping, negative=True)
        self.assertEqual(self.positions(EVENTS), {"z": 9})

    def test_a_primary_key_is_index_enough(self) -> None:
        self.sql("CREATE TABLE keyed (id INTEGER PRIMARY KEY, name, size)")
        self.map_events(table="keyed")
        self.assertEqual(self.store.warnings, [])

    # ---- under which name

    def claim(self, name: str) -> None:
        self.wait(self.store.claim_tables([EVENTS], InstanceName(name), copy=False))

    def test_a_writer_that_is_renamed_is_refused_until_the_position_is(self) -> None:
        """Otherwise all rows would be published again under the new name."""
        self.map_events()
        for _ in range(2):
            self.claim("north")
        self.add((2, None, "a", 1))
        message = str(self.assertRaises(StoreError, self.claim, "main"))
        self.assertIn("that is 'north', not 'main'", message)
        self.sql(message.partition("if 'north' was renamed to 'main', ")[2].partition("; and the other steps")[0])
        self.claim("main")
        self.assertEqual(self.positions(EVENTS), {"main": 2})
        self.map_events(instance_column="instance_name")
        self.claim("south")

    def test_a_writer_with_copies_of_other_writers_is_not_refused(self) -> None:
        self.map_events()
        self.claim(ME)
        self.commit(write(5, stream=EVENTS, writer=OTHER, expected=0, follower=ME))
        self.claim(ME)


class PlanTests(SynchronousTestCase):
    def test_the_largest_id_is_read_off_the_end_of_the_index(self) -> None:
        database = self.enterContext(closing(sqlite3.connect(":memory:")))
        database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, name)")
        for negative in (False, True):
            table = MappedTable(
                StreamDefinition(
                    "events", table="events", id_column="id", row=["name"], negative=negative, where="id <> 7"
                )
            )
            plan = [step for *_, step in database.execute(f"EXPLAIN QUERY PLAN {table._query.newest}")]
            self.assertEqual([step.partition(" (")[0] for step in plan], ["SEARCH source USING INTEGER PRIMARY KEY"])
