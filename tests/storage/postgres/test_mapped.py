"""Streams in tables of the application on PostgreSQL, through a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import RowRefusedError, SchemaError, StoreError, ValueRefusedError
from replication.storage.contract import IdTakenError
from replication.storage.postgres.options import POLICY_CURE
from replication.storage.postgres.store import PostgresStore
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Write
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.contract.stream_store import ME, OTHER, empty, fact, write
from tests.storage.on_postgres import OnPostgres

if TYPE_CHECKING:
    from replication.streams.facts import Fact
    from replication.streams.interfaces import ISequence

EVENTS = StreamName("events")
PRICED = ["value", "prices"]  # columns


class UsesMapped(OnPostgres):
    def setUp(self) -> None:
        super().setUp()
        self.sql(
            "CREATE TABLE events (id bigint, instance_name text, name text, size integer, visible bool DEFAULT true)"
        )
        self.sql("CREATE INDEX events_id ON events (id)")
        self.store.warnings.clear()  # of fsync

    def map_events(self, **options: Any) -> None:
        options = {"table": "events", "id_column": "id", "row": ["name", "size"], **options}
        self.wait(self.store.declare(StreamDefinition(EVENTS, **options)))

    def add(self, *rows: tuple[object, ...]) -> None:
        for row in rows:
            self.sql("INSERT INTO events (id, instance_name, name, size) VALUES (%s, %s, %s, %s)", *row)

    def commit_events(self, *stored: Any, **options: Any) -> None:
        self.commit(write(stored[-1].token, stored, stream=EVENTS, **options))

    def refused_commit(self, *stored: Fact) -> str:
        return str(self.assertRaises(StoreError, self.commit_events, *stored))


class ReadTests(UsesMapped, SynchronousTestCase):
    def test_columns_in_order_are_a_row(self) -> None:
        self.map_events(row=["size", "name", "id"])
        self.add((2, None, "a", 7), (3, None, "snowman ☃", 1), (4, None, None, None), (5, None, "", -7))
        self.assertEqual(
            list(self.page(stream=EVENTS).facts),
            [fact(2, '[7,"a",2]'), fact(3, '[1,"snowman \\u2603",3]'), fact(4, "[null,null,4]"), fact(5, '[-7,"",5]')],
        )

    def test_every_type_is_encoded_in_one_way(self) -> None:
        """The server's time zone, its styles of dates, intervals and bytes, and its digits of numbers do not matter."""
        self.configure("TimeZone", "Asia/Kathmandu")
        self.configure("DateStyle", "SQL, DMY")
        self.configure("IntervalStyle", "iso_8601")
        self.configure("bytea_output", "escape")
        self.configure("extra_float_digits", "-9")
        self.sql("CREATE DOMAIN whole AS integer CHECK (value > 0)")
        self.sql("CREATE TYPE mood AS ENUM ('sad', 'ok')")
        values = {
            "bool": ("true", "true"),
            "int2": ("-5", "-5"),
            "int8": ("9223372036854775807", "9223372036854775807"),
            "whole": ("7", "7"),
            "float4": ("0.1", "0.1"),
            "float8": ("0.30000000000000004", "0.30000000000000004"),
            "text": ('é "\\', '"\\u00e9 \\"\\\\"'),
            "varchar(9)": ("x", '"x"'),
            "char(3)": ("x", '"x  "'),
            "json": ('{"b": [1, 2.50],\n "a": "\\u0000"}', '{"b":[1,2.5],"a":"\\u0000"}'),
            "jsonb": ('{"b": null, "a": true}', '{"a":true,"b":null}'),
            "integer[]": ("{1,NULL,3}", "[1,null,3]"),
            "text[]": ('{{a,"NULL"},{"b c",NULL}}', '[["a","NULL"],["b c",null]]'),
            "numeric": ("12.50", '"12.50"'),
            "uuid": ("6F9619FF-8B86-D011-B42D-00CF4FC964FF", '"6f9619ff-8b86-d011-b42d-00cf4fc964ff"'),
            "date": ("2026-11-20", '"2026-11-20"'),
            "timestamp": ("2026-11-20 19:00:00.5", '"2026-11-20T19:00:00.5"'),
            "timestamptz": ("2026-11-20 19:00:00+02", '"2026-11-20T17:00:00+00:00"'),
            "interval": ("1 day 02:00", '"1 day 02:00:00"'),
            "bytea": ("\\xff00", '"\\\\xff00"'),
            "date[]": ("{2026-11-20}", '["2026-11-20"]'),
            "daterange": ("[2026-11-20,2026-11-22)", '"[2026-11-20,2026-11-22)"'),
            "mood": ("ok", '"ok"'),
            "uuid[]": ("{6f9619ff-8b86-d011-b42d-00cf4fc964ff}", '["6f9619ff-8b86-d011-b42d-00cf4fc964ff"]'),
        }
        names = [f"c{number}" for number in range(len(values))]
        columns = ", ".join(f"{name} {kind}" for name, kind in zip(names, values, strict=True))
        self.sql(f"CREATE TABLE typed (id bigint PRIMARY KEY, {columns})")
        self.map_events(table="typed", row=names)
        marks = ", ".join(["%s"] * len(names))
        self.sql(f"INSERT INTO typed VALUES (2, {marks})", *[value for value, _ in values.values()])
        self.sql("INSERT INTO typed (id) VALUES (3)")
        text = f"[{','.join(encoded for _, encoded in values.values())}]"
        nothing = f"[{','.join(['null'] * len(names))}]"
        self.assertEqual(list(self.page(stream=EVENTS).facts), [fact(2, text), fact(3, nothing)])
        self.commit_events(fact(4, text), fact(5, nothing))
        self.assertEqual(list(self.page(stream=EVENTS, after=3).facts), [fact(4, text), fact(5, nothing)])
        source = self.source()
        self.wait(source.declare(StreamDefinition(EVENTS, table="typed", id_column="id", row=names)))
        page = self.wait(source.facts(EVENTS, ME, after=Token(0), upto=Token(5), limit=9))
        self.assertEqual([each.texts for each in page.facts], [(text,), (nothing,)] * 2)

    def source(self) -> PostgresStore:
        """Open a store that only reads, as one in ``catch_up``."""
        store = PostgresStore(self.server.url(self.database), self.pump, read_only=True)
        self.wait(store.open())
        self.addCleanup(lambda: self.wait(store.close()))
        return store

    def test_times_in_the_time_zone_of_the_session_are_refused_unless_that_is_utc(self) -> None:
        self.sql("CREATE DOMAIN moment AS timestamptz")
        self.sql("CREATE TYPE pair AS (at timestamptz, name text)")
        self.sql("CREATE TYPE nested AS (number int, value pair[])")
        self.sql("CREATE TYPE of_domain AS (at moment)")
        self.sql("CREATE TYPE moments AS RANGE (subtype = timestamptz)")
        kinds = ["timestamptz[]", "tstzrange", "tstzrange[]", "pair", "pair[]", "nested", "of_domain", "moment[]"]
        kinds.append("moments")
        for number, kind in enumerate(kinds):
            self.sql(f"CREATE TABLE zoned{number} (id bigint PRIMARY KEY, value {kind})")
        streams = [
            StreamDefinition(f"z{number}", table=f"zoned{number}", id_column="id", row=["value"])
            for number in range(len(kinds))
        ]
        self.configure("TimeZone", "Asia/Kathmandu")
        for each in streams:
            message = str(self.assertRaises(SchemaError, self.wait, self.source().declare(each)))
            self.assertIn("has times in the session's time zone, 'Asia/Kathmandu'", message)
        self.configure("TimeZone", "UTC")
        self.wait(self.source().declare(*streams))

    def test_amounts_in_the_form_of_the_session_are_refused_unless_that_is_the_form_of_c(self) -> None:
        self.sql("CREATE DOMAIN price AS money")
        self.sql("CREATE TABLE typed (id bigint PRIMARY KEY, value money, prices price[])")
        self.sql("INSERT INTO typed VALUES (2, 1234.5, '{1,2}')")
        streams = [StreamDefinition(f"s{n}", table="typed", id_column="id", row=[c]) for n, c in enumerate(PRICED)]
        self.configure("lc_monetary", "C.utf8")
        for each in streams:
            message = str(self.assertRaises(SchemaError, self.wait, self.source().declare(each)))
            self.assertTrue(message.endswith("(ALTER ROLE … SET lc_monetary = 'C')"), message)
        self.configure("lc_monetary", "C")
        source = self.source()
        self.wait(source.declare(*streams))
        pages = [self.wait(source.facts(each.name, ME, after=Token(0), upto=Token(5), limit=9)) for each in streams]
        self.assertEqual([page.facts[0].texts for page in pages], [('["$1,234.50"]',), ('[["$1.00","$2.00"]]',)])

    def test_columns_that_change_their_types_are_read_as_after_a_restart(self) -> None:
        """Before, a table that was retyped while it was served had other texts live than after a restart."""
        self.sql("CREATE TYPE pair AS (a int, b text)")
        self.addCleanup(self.sql, "DROP TABLE typed, plain; DROP TYPE pair")
        self.sql("CREATE TABLE plain (id bigint PRIMARY KEY, a text, b int)")
        self.sql("CREATE TABLE typed (id bigint PRIMARY KEY, a json, b timestamptz, c int)")
        self.map_events(table="typed", row=["a", "b", "c"])
        plain = StreamDefinition("plain", table="plain", id_column="id", row=["a", "b"])
        self.wait(self.store.declare(plain))
        self.sql("""INSERT INTO typed VALUES (2, '{"k":1}', '2020-01-01 10:00+00', 1)""")
        self.sql("INSERT INTO plain VALUES (2, 'x', 1)")
        before = '[{"k":1},"2020-01-01T10:00:00+00:00",1]'
        self.assertEqual(self.texts(EVENTS), [before])
        self.assertEqual(self.texts(plain.name), ['["x",1]'])
        self.sql("ALTER TABLE typed ALTER a TYPE text, ALTER b TYPE timestamp, ALTER c TYPE numeric")
        self.sql("ALTER TABLE plain ALTER a TYPE pair USING (1, a)::pair, ALTER b TYPE oid")
        self.assertEqual(self.texts(EVENTS), ['["{\\"k\\":1}","2020-01-01T10:00:00","1"]'])
        self.assertEqual(self.texts(plain.name), ['["{\\"a\\":1,\\"b\\":\\"x\\"}","1"]'])
        self.sql("ALTER TABLE typed ALTER b TYPE text, ALTER c TYPE json USING to_json(c)")
        self.commit_events(fact(3, row := '["{}","x",{"c":1}]'))
        self.assertEqual(self.texts(EVENTS)[-1], row)

    def test_a_writers_name_in_a_padded_column_is_that_without_spaces(self) -> None:
        """Before, the start warned of rows of another writer, with a cure that would have published them twice."""
        self.sql("CREATE TABLE padded (id bigserial PRIMARY KEY, name text, writer char(20))")
        self.sql(f"INSERT INTO padded (name, writer) VALUES ('a', '{ME}'), ('b', NULL), ('c', '{OTHER}')")
        self.map_events(table="padded", row=["name"], instance_column="writer", writers=[ME])
        self.assertEqual(self.positions(EVENTS), {ME: 2, OTHER: 3})
        self.assertEqual(self.texts(EVENTS), ['["a"]', '["b"]'])
        self.assertIn(f"has rows of '{OTHER}', not among", " ".join(self.store.warnings))

    def test_a_row_that_a_generated_column_refuses_names_the_cure(self) -> None:
        self.sql("CREATE TABLE made (id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, name text)")
        self.map_events(table="made", row=["name"])
        refused = str(self.assertRaises(RowRefusedError, self.commit_events, fact(2, '["a"]')))
        self.assertIn("; let the column be GENERATED BY DEFAULT or, if it has an expression, write this", refused)

    def texts(self, stream: str) -> list[str]:
        return [text for each in self.page(stream=stream).facts for text in each.texts]

    def test_names_in_the_form_of_the_session_are_refused(self) -> None:
        self.sql("CREATE TYPE kept AS (name regtype)")
        for kind in ("regclass", "regproc[]", "kept"):
            self.sql(f"CREATE TABLE named (id bigint PRIMARY KEY, value {kind})")
            message = str(self.assertRaises(SchemaError, self.map_events, table="named", row=["value"]))
            self.assertIn(f"the type '{kind}' has names in a form that depends on the session's search_path", message)
            self.sql("DROP TABLE named")

    def test_rows_of_one_id_are_a_fact_in_the_order_in_which_they_lie_there(self) -> None:
        self.map_events()
        self.add((3, None, "z", 1), (2, None, "b", 1), (3, None, "a", 1), (3, None, "m", 1))
        self.assertEqual(
            list(self.page(stream=EVENTS).facts), [fact(2, '["b",1]'), fact(3, '["z",1]', '["a",1]', '["m",1]')]
        )

    def test_rows_that_a_policy_hides_are_refused_and_not_left_out(self) -> None:
        self.map_events()
        self.add((2, None, "a", 1))
        self.server.sql("CREATE ROLE hidden LOGIN")
        self.addCleanup(self.server.sql, "DROP ROLE hidden")
        self.addCleanup(self.sql, "DROP OWNED BY hidden CASCADE")
        self.sql("GRANT ALL ON SCHEMA public TO hidden")
        self.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO hidden")
        self.sql("ALTER TABLE events ENABLE ROW LEVEL SECURITY")
        store = PostgresStore(self.server.url(self.database, "hidden"), self.pump, read_only=True)
        self.wait(store.open())
        self.addCleanup(lambda: self.wait(store.close()))
        events = StreamDefinition(EVENTS, table="events", id_column="id", row=["name", "size"])
        message = str(self.assertRaises(StoreError, self.wait, store.declare(events)))
        self.assertIn("row-level security policy", message)
        self.assertTrue(message.endswith(f"; {POLICY_CURE}"), message)

    def test_json_that_cannot_be_read_is_reported_and_read_after_its_repair(self) -> None:
        self.sql("CREATE TABLE long (id bigint PRIMARY KEY, value jsonb)")
        self.map_events(table="long", row=["value"])
        self.sql("INSERT INTO long VALUES (2, repeat('9', 5000)::jsonb)")  # Python reads 4,300 digits
        message = str(self.assertRaises(StoreError, self.page, stream=EVENTS))
        self.assertIn("column 'value' of table 'long' has, at ID 2, what is no JSON: ", message)
        self.sql("UPDATE long SET value = '[]'")
        self.assertEqual(list(self.page(stream=EVENTS).facts), [fact(2, "[[]]")])

    def test_a_text_that_the_column_changes_into_a_value_without_json_is_refused(self) -> None:
        """No later attempt can work, so the error is of the value: HTTP answers 400."""
        self.sql("CREATE TABLE sizes (id bigint PRIMARY KEY, size float8)")
        self.map_events(table="sizes", row=["size"])
        with self.assertRaisesRegex(ValueRefusedError, "column 'size' of table 'sizes' has, at ID 2, what is no JSON"):
            self.commit_events(fact(2, '["NaN"]'))

    def test_the_order_of_a_facts_rows_is_that_of_the_table(self) -> None:
        """The table may have had such rows before: followers receive them, and the stream is not refused."""
        self.map_events()
        self.at_each("events", "UPDATE events SET size = size WHERE id = NEW.id AND name = 'a' AND NEW.name = 'b';")
        self.commit_events(fact(2, '["a",1]', '["b",1]'))
        self.assertEqual(list(self.page(stream=EVENTS).facts), [fact(2, '["b",1]', '["a",1]')])

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

    def test_where_picks_rows_and_may_have_a_percent_sign(self) -> None:
        self.map_events(where="source.visible AND name LIKE 'a%' OR size % 2 = 1")
        self.add((2, None, "ab", 2), (3, None, "b", 2), (4, None, "c", 9))
        self.assertEqual(self.tokens(EVENTS), [2, 4])
        self.assertEqual(self.positions(EVENTS), {ME: 4})
        self.commit_events(fact(5, '["a",2]'))

    def test_only_positive_ids_are_a_streams_or_only_negative_ones(self) -> None:
        past = StreamDefinition("past", table="events", id_column="id", row=["name"], negative=True)
        self.wait(self.store.declare(past))
        self.add((-9, None, "a", 1), (-2, None, "b", 1), (3, None, "c", 1), (None, None, "d", 1))
        self.map_events()
        self.assertEqual((self.tokens(EVENTS), self.positions(EVENTS)), ([3], {ME: 3}))
        self.map_events(negative=True)
        self.assertEqual((self.tokens(EVENTS), self.positions(EVENTS)), ([2, 9], {ME: 9}))
        self.sql("DELETE FROM events WHERE id < 0")
        self.assertEqual((self.tokens(EVENTS), self.positions(EVENTS)), ([], {}))

    def test_a_negative_fact_keeps_the_order_of_its_rows(self) -> None:
        self.map_events(negative=True)
        stored = [fact(2, '["a",1]'), fact(3, '["b",2]', '["a",1]', '["c",0]')]
        self.commit_events(*stored)
        self.assertEqual(self.sql("SELECT id, name FROM events"), [(-2, "a"), (-3, "b"), (-3, "a"), (-3, "c")])
        self.assertEqual(list(self.page(stream=EVENTS).facts), stored)
        self.assertEqual(list(self.page(stream=EVENTS, after=2, limit=1).facts), stored[1:])

    def test_values_that_no_row_can_have_are_named(self) -> None:
        self.sql("CREATE TABLE odd (id bigint PRIMARY KEY, name text, size float8, sizes float8[])")
        self.map_events(table="odd", row=["name", "size", "sizes"])
        for bad, column in (("'inf', '{}'", "'size'"), ("1, '{1,nan}'", "'sizes'")):
            self.sql("TRUNCATE odd")
            self.sql(f"INSERT INTO odd VALUES (2, 'a', 1, '{{}}'), (3, 'a', {bad})")
            message = str(self.assertRaises(StoreError, self.page, stream=EVENTS))
            for word in ("'odd'", "ID 3", column):
                self.assertIn(word, message)

    def test_names_may_be_words_of_sql(self) -> None:
        self.sql('CREATE TABLE "order" ("index" bigint PRIMARY KEY, "select" text, "from" text)')
        self.sql('CREATE INDEX pair ON "order" ("from", "index")')
        self.map_events(table="order", id_column="index", row=["select"], instance_column="from")
        self.commit_events(fact(2, '["x"]'))
        self.assertEqual(list(self.page(stream=EVENTS).facts), [fact(2, '["x"]')])
        self.commit(write(1, stream=EVENTS, reset=True))
        self.assertEqual((self.tokens(EVENTS), self.store.warnings), ([], []))

    def test_rows_in_partitions_are_one_stream(self) -> None:
        self.sql("CREATE TABLE parts (id bigint NOT NULL, name text, size integer) PARTITION BY RANGE (id)")
        self.sql("CREATE INDEX ON parts (id)")
        for start in (0, 4):
            self.sql(f"CREATE TABLE parts_{start} PARTITION OF parts FOR VALUES FROM ({start}) TO ({start + 4})")
        self.map_events(table="parts")
        stored = [fact(token, '["a",1]', '["b",1]') for token in range(2, 8)]
        self.commit_events(*stored)
        self.assertEqual((list(self.page(stream=EVENTS).facts), self.store.warnings), (stored, []))

    # ---- whose rows they are

    def test_with_an_instance_column_each_writer_has_its_own_rows_and_master_those_with_null(self) -> None:
        self.map_events(instance_column="instance_name", writers=[ME, OTHER])
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


class OneWriterTests(UsesMapped, SynchronousTestCase):
    """Rows without an instance name would be published again under each further name."""

    def claim(self, name: str) -> None:
        self.wait(self.store.claim_tables([EVENTS], InstanceName(name), copy=False))

    def refusal(self, name: str) -> str:
        return str(self.assertRaises(StoreError, self.claim, name))

    def test_a_second_writer_is_refused_at_once_with_a_hint_at_instance_column(self) -> None:
        self.map_events()
        for _ in range(2):
            self.claim("north")
        message = self.refusal("south")
        for part in ("'events'", "that is 'north', not 'south'. Start this process as 'north'", "set instance_column"):
            self.assertIn(part, message)
        self.map_events(instance_column="instance_name", writers=["north", "south"])
        for name in ("north", "south"):
            self.claim(name)

    def test_a_renamed_writer_is_refused_with_the_statements_that_move_all_positions(self) -> None:
        self.map_events()
        self.commit(write(7, stream=EVENTS), write(5, stream=EVENTS, expected=0, follower=OTHER))
        cure = (
            self.refusal("main")
            .partition(f"if '{ME}' was renamed to 'main', ")[2]
            .partition("; and the other steps")[0]
        )
        self.assertEqual(cure.count("UPDATE"), 2)
        self.sql(cure)
        self.claim("main")
        self.assertEqual(self.positions(EVENTS), {"main": 7})
        self.assertEqual(self.wait(self.store.applied_positions(EVENTS, OTHER)), {"main": 5})

    def test_of_two_writers_with_positions_one_can_be_deleted(self) -> None:
        self.map_events()
        self.commit(write(7, stream=EVENTS), write(7, stream=EVENTS, writer=OTHER))
        self.sql(self.refusal(ME).partition(f"if '{OTHER}' was renamed to '{ME}', ")[2])
        self.claim(ME)
        self.assertEqual(self.positions(EVENTS), {ME: 7})

    def test_a_process_that_does_not_write_the_stream_is_not_refused(self) -> None:
        self.map_events(writers=["north"])
        for name in ("south", "north", "south"):
            self.claim(name)


class WriteTests(UsesMapped, SynchronousTestCase):
    def test_rows_become_the_values_of_columns(self) -> None:
        self.map_events(instance_column="instance_name")
        self.commit_events(fact(2, '["a",1]', '["b",2]'), fact(3, "[null,null]"))
        self.assertEqual(
            self.sql("SELECT id, instance_name, name, size, visible FROM events"),
            [(2, ME, "a", 1, True), (2, ME, "b", 2, True), (3, ME, None, None, True)],
        )
        self.assertEqual(self.positions(EVENTS), {ME: 3})

    def test_commits_of_several_writers_share_a_transaction(self) -> None:
        self.map_events(instance_column="instance_name")
        asked = [
            self.begin(
                self.store.transaction().commit([write(token, [fact(token, '["a",1]')], stream=EVENTS, writer=w)])
            )
            for token, w in ((2, ME), (3, OTHER), (4, ME))
        ]
        for each in asked:
            self.wait(each)
        self.assertEqual((self.tokens(EVENTS), self.tokens(EVENTS, OTHER)), ([2, 4], [3]))

    def test_a_row_that_does_not_fit_the_columns_is_named_and_nothing_is_stored(self) -> None:
        self.map_events()
        for text, message in (
            ('["a"]', "not an array of name, size"),
            ('{"a":1}', "not an array"),
            ('["a",1.5]', """fact 3 is ["a",1.5], but table 'events' has ["a",2] for it"""),
            ("[7,1]", """fact 3 is [7,1], but table 'events' has ["7",1] for it"""),
            ('["a",true]', "of type boolean"),
            ('[{"a":1},1]', "dict"),
            ('["a",36893488147419103232]', "out of range"),
            ('["nul \\u0000",1]', "NUL"),
        ):
            refused = self.store.transaction().commit(
                [Write(EVENTS, ME, Token(3), [fact(2, '["a",1]'), fact(3, text)])]
            )
            self.assertIn(message, str(self.assertRaises(ValueRefusedError, self.wait, refused)))
        self.assertEqual((self.tokens(EVENTS), self.positions(EVENTS)), ([], {}))

    def test_a_row_that_the_stream_would_never_show_again_is_refused(self) -> None:
        self.map_events(where="size < 5 AND source.visible")
        self.commit_events(fact(2, '["a",1]'))
        self.assertIn(
            """fact 3 is ["a",9], but table 'events' has no row for it""", self.refused_commit(fact(3, '["a",9]'))
        )
        self.assertEqual(self.sql("SELECT id FROM events"), [(2,)])

    def test_json_is_kept_in_the_order_of_its_keys_only_by_json(self) -> None:
        """A jsonb orders its keys: a follower that reads the row later would receive another text."""
        text = '[{"b":1,"a":2}]'
        for kind in ("json", "jsonb"):
            self.sql(f"CREATE TABLE keep_{kind} (id bigint, content {kind})")
            self.map_events(table=f"keep_{kind}", row=["content"])
            if kind == "json":
                self.commit_events(fact(2, text), fact(3, '["x"]', "[null]", "[7.25]"))
            else:
                self.assertIn("""has [{"a":2,"b":1}] for it""", self.refused_commit(fact(4, text)))

    def test_what_the_table_itself_refuses_is_an_error(self) -> None:
        self.sql("CREATE UNIQUE INDEX one ON events (name)")
        self.map_events()
        self.commit_events(fact(2, '["a",1]'))
        error = self.assertRaises(RowRefusedError, self.commit_events, fact(3, '["a",2]'))
        self.assertIn('"one"', str(error))
        self.wait(self.store.check())

    def test_a_row_that_a_deferred_constraint_refuses_at_the_commit_does_not_count_against_the_database(self) -> None:
        self.sql("ALTER TABLE events ADD CONSTRAINT one UNIQUE (name) DEFERRABLE INITIALLY DEFERRED")
        self.map_events()
        self.commit_events(fact(2, '["a",1]'))
        self.assertIn('"one"', str(self.assertRaises(RowRefusedError, self.commit_events, fact(3, '["a",2]'))))
        self.wait(self.store.check())
        self.commit_events(fact(4, '["b",1]'))

    def test_a_row_that_a_trigger_refuses_does_not_count_against_the_database(self) -> None:
        self.map_events()
        self.at_each("events", "RAISE EXCEPTION 'not today';")
        self.assertIn("not today", str(self.assertRaises(RowRefusedError, self.commit_events, fact(3, '["a",2]'))))
        self.wait(self.store.check())

    def test_a_trigger_may_refuse_a_row_with_any_sqlstate(self) -> None:
        self.map_events()
        self.at_each("events", "RAISE EXCEPTION 'not today' USING ERRCODE = '45000';")
        for now in (True, False):
            self.assertIn("not today", str(self.assertRaises(RowRefusedError, self.commit_events, fact(3, '["a",2]'))))
            self.wait(self.store.check())
            if now:
                self.sql("DROP TRIGGER act ON events")
                self.sql(
                    "CREATE CONSTRAINT TRIGGER act AFTER INSERT ON events DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
                    "EXECUTE FUNCTION act()"
                )

    def test_a_text_that_is_wrong_for_its_type_is_a_refused_value(self) -> None:
        """Some types report it as a syntax error, and hstore, before PostgreSQL 16, as an internal one."""
        wrong = {"tsquery": "a &", "tsvector": "'a", "jsonpath": "$."}
        if self.sql("SELECT FROM pg_available_extensions WHERE name = 'hstore'"):
            self.sql("CREATE EXTENSION hstore")
            wrong["hstore"] = "{}"
        for kind, text in wrong.items():
            self.sql(f"CREATE TABLE of_{kind} (id bigint PRIMARY KEY, value {kind})")
            self.map_events(table=f"of_{kind}", row=["value"])
            self.assertRaises(ValueRefusedError, self.commit_events, fact(2, grammar.encode_row([text])))
            self.wait(self.store.check())

    def test_a_syntax_error_in_a_trigger_is_not_the_fault_of_a_value(self) -> None:
        self.map_events()
        self.at_each("events", "EXECUTE 'SELECT FROM WHERE';")
        error = self.assertRaises(StoreError, self.commit_events, fact(3, '["a",2]'))
        self.assertNotIsInstance(error, (ValueRefusedError, RowRefusedError))

    def test_an_array_that_is_too_deep_is_a_refused_value(self) -> None:
        """PostgreSQL has six levels.  No later attempt can work, so HTTP answers 400."""
        self.sql("CREATE TABLE deep (id bigint PRIMARY KEY, value text[])")
        self.map_events(table="deep", row=["value"])
        error = self.assertRaises(ValueRefusedError, self.commit_events, fact(2, f"[{'[' * 7}{']' * 7}]"))
        self.assertIn("dimensions", str(error))
        self.wait(self.store.check())

    def open_ascii(self, kind: str) -> tuple[str, PostgresStore]:
        """Map a table of a database whose texts have no encoding; returns the database, and the store."""
        name = f"{self.database}_ascii"
        options = "ENCODING 'SQL_ASCII' TEMPLATE template0"
        self.server.sql(f"CREATE DATABASE {name} {options}")
        self.addCleanup(self.server.sql, f"DROP DATABASE {name} WITH (FORCE)")
        self.server.sql(f"CREATE TABLE texts (id bigint PRIMARY KEY, value {kind})", database=name)
        store = PostgresStore(self.server.url(name), self.pump)
        self.wait(store.open())
        self.addCleanup(lambda: self.wait(store.close()))
        self.wait(store.declare(StreamDefinition(EVENTS, table="texts", id_column="id", row=["value"])))
        return name, store

    def check_not_utf8(self, kind: str, wrong: str, right: str, row: str) -> None:
        name, store = self.open_ascii(kind)
        self.server.sql(f"INSERT INTO texts VALUES (2, NULL), (3, {wrong}), (4, {wrong})", database=name)
        page = store.facts(EVENTS, ME, after=Token(1), upto=Token(4), limit=10)
        message = str(self.assertRaises(StoreError, self.wait, page))
        self.assertIn('invalid byte sequence for encoding "UTF8"', message)
        self.assertIn("column 'value' has it at ID 3: UPDATE that text to one in UTF-8", message)
        self.server.sql(f"UPDATE texts SET value = {right} WHERE id > 2", database=name)
        facts = self.wait(store.facts(EVENTS, ME, after=Token(1), upto=Token(4), limit=10)).facts
        self.assertEqual([*facts], [fact(2, "[null]"), fact(3, row), fact(4, row)])

    def test_a_text_that_is_not_utf8_is_an_error_with_its_id_and_column(self) -> None:
        self.check_not_utf8("text", r"E'a\xff'", r"E'\xc3\xa9'", r'["\u00e9"]')

    def test_an_array_with_a_text_that_is_not_utf8_is_an_error_with_its_id_and_column(self) -> None:
        self.check_not_utf8("text[]", r"ARRAY['a', E'\xe9']", "ARRAY['a', 'b']", '[["a","b"]]')

    def test_a_character_that_the_database_cannot_have_is_a_refused_value(self) -> None:
        _, store = self.open_ascii("jsonb")
        stored = write(2, [fact(2, '["\\u20ac"]')], stream=EVENTS)
        error = self.assertRaises(ValueRefusedError, self.wait, store.transaction().commit([stored]))
        self.assertIn("SQL_ASCII", str(error))
        self.wait(store.check())

    def test_rows_that_the_application_has_written_itself_are_not_written_again(self) -> None:
        self.map_events()
        transaction = self.store.transaction()
        self.wait(transaction.execute("INSERT INTO events (id, name, size) VALUES (2, 'a', 1)"))
        self.wait(transaction.commit([write(3, [fact(2, '["a",1]'), fact(3, '["b",1]')], stream=EVENTS)]))
        self.assertEqual(list(self.page(stream=EVENTS).facts), [fact(2, '["a",1]'), fact(3, '["b",1]')])

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
        self.sql("UPDATE events SET visible = false WHERE id = 6")
        self.commit(write(2, stream=EVENTS, reset=True))
        self.assertEqual(self.sql("SELECT id FROM events ORDER BY id"), [(2,), (3,), (6,)])

    def test_a_table_that_is_altered_while_we_run_is_read_on(self) -> None:
        self.map_events()
        for token in range(2, 12):  # so often that the driver prepares the statements
            self.commit_events(fact(token, '["a",1]'))
            self.page(stream=EVENTS)
        self.sql("ALTER TABLE events ALTER size TYPE bigint, ALTER name TYPE integer USING 7")
        self.assertEqual(list(self.page(stream=EVENTS).facts), [fact(token, "[7,1]") for token in range(2, 12)])
        self.commit_events(fact(12, "[8,1]"))


class DeclareTests(UsesMapped, SynchronousTestCase):
    def refusal(self, **options: Any) -> str:
        message = str(self.assertRaises(SchemaError, self.map_events, **options))
        self.assertIn("stream 'events' cannot be mapped onto table", message)
        self.assertIn(repr(self.store.address.name), message)
        return message

    def test_the_error_names_the_fault_of_a_mapping(self) -> None:
        self.assertIn("'nowhere': there is no table of that name", self.refusal(table="nowhere"))
        self.assertIn("no column missing, only id, instance_name, name", self.refusal(row=["name", "missing"]))
        self.assertIn("no column missing, lost, only", self.refusal(id_column="missing", row=["lost"]))
        self.assertIn("no column missing", self.refusal(instance_column="missing"))
        self.assertIn('column "missing" does not exist', self.refusal(where="missing > 0"))
        self.assertIn("syntax error", self.refusal(where="size >"))
        self.assertIn("syntax error", self.refusal(where="size = %s"))
        self.assertIn("column 'name' is not an integer", self.refusal(id_column="name"))
        self.assertIn("column 'size' is not a text", self.refusal(instance_column="size"))
        self.assertIn("give instance_column", self.refusal(writers=["a", "b"]))
        self.map_events()

    def test_a_view_is_refused(self) -> None:
        self.sql("CREATE VIEW shown AS SELECT * FROM events")
        self.sql("CREATE MATERIALIZED VIEW kept AS SELECT * FROM events")
        for table in ("shown", "kept"):
            self.assertIn("map the table behind it", self.refusal(table=table))

    def test_a_missing_index_is_warned_of_with_its_cure(self) -> None:
        self.sql("DROP INDEX events_id")
        self.sql("CREATE INDEX ON events (name, id)")
        self.sql("CREATE INDEX ON events (id) WHERE visible")
        self.map_events()
        (warning,) = self.store.warnings
        self.assertIn("stream 'events': table 'events' has no index on 'id'", warning)
        self.map_events(where="visible")
        self.sql(warning.partition("reads all of it: ")[2])
        self.map_events(where="true")
        self.assertEqual(len(self.store.warnings), 1)

    def test_a_primary_key_is_index_enough(self) -> None:
        self.sql("CREATE TABLE keyed (id bigint PRIMARY KEY, name text, size integer)")
        self.map_events(table="keyed")
        self.assertEqual(self.store.warnings, [])

    # ---- where the IDs come from

    def allocate(self) -> int:
        sequence: ISequence | None = self.store.sequence(EVENTS)
        assert sequence is not None
        return self.wait(sequence.allocate(1))[0]

    def test_ids_come_from_the_sequence_of_the_column(self) -> None:
        """Then external writers and this package allocate from one sequence."""
        self.sql("CREATE SEQUENCE numbers")
        kinds = ("bigserial", "bigint GENERATED BY DEFAULT AS IDENTITY", "bigint DEFAULT nextval('numbers')")
        for number, kind in enumerate(kinds):
            self.sql(f"CREATE TABLE events_{number} (id {kind} PRIMARY KEY, name text, size integer)")
            self.map_events(table=f"events_{number}")
            self.sql(f"INSERT INTO events_{number} (name) VALUES ('a')")
            self.assertEqual((self.tokens(EVENTS), self.allocate()), ([2], 3), kind)
            self.assertEqual(self.sql("SELECT to_regclass('stream_events_seq')"), [(None,)])

    def test_ids_of_a_table_that_counts_down_come_from_its_sequence_too(self) -> None:
        self.sql("CREATE SEQUENCE numbers")
        self.sql("ALTER TABLE events ALTER id SET DEFAULT -nextval('numbers')")
        self.map_events(negative=True)
        self.sql("INSERT INTO events (name) VALUES ('a')")
        self.assertEqual((self.tokens(EVENTS), self.allocate()), ([2], 3))

    def test_a_column_without_a_sequence_gets_one_past_its_ids(self) -> None:
        self.add((70, None, "a", 1))
        self.map_events()
        self.assertEqual(self.allocate(), 71)
        self.assertIn("behind ID 70", self.store.warnings[0])

    def test_a_read_only_store_creates_and_moves_no_sequence(self) -> None:
        self.add((70, None, "a", 1))
        reader = self.another_store(read_only=True)
        definition = StreamDefinition(EVENTS, table="events", id_column="id", row=["name"])
        self.wait(reader.declare(definition))
        self.assertIsNone(reader.sequence(EVENTS))
        self.assertEqual(self.sql("SELECT to_regclass('stream_events_seq')"), [(None,)])
