"""The contract of joined streams; the tests of each database inherit it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replication.errors import SchemaError, StoreError
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.wire.grammar import StreamName, Token
from tests.contract.stream_store import ME, OTHER, UsesStore, empty, fact, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.definitions import Dialect
    from replication.streams.facts import Fact

PETS = StreamName("pets")


class JoinedContract(UsesStore):
    """Cats are in one table, dogs in another, their owners in a third."""

    DIALECT: Dialect
    MARK: str  # the placeholder of a parameter

    def setUp(self) -> None:
        super().setUp()
        for table in ("cats", "dogs"):
            self.sql(f"CREATE TABLE {table} (id bigint, instance_name text, name text, owner bigint)")
            self.sql(f"CREATE INDEX {table}_id ON {table} (id)")
        self.sql("CREATE TABLE owners (id bigint PRIMARY KEY, name text)")
        self.store.warnings.clear()

    def sql(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        transaction = self.store.transaction()
        rows = self.wait(transaction.execute(sql.replace("?", self.MARK), parameters))
        self.wait(transaction.commit([]))
        return rows

    def source(self, table: str = "cats", **options: Any) -> SourceTable:
        options = {"id_column": "id", "row": ["name"], **options}
        return SourceTable(table=table, **options)

    def map_pets(self, *tables: SourceTable, **options: Any) -> None:
        options = {"row": ["name"], "tables": tables or [self.source(), self.source("dogs")], **options}
        self.wait(self.store.declare(StreamDefinition(PETS, **options)))

    def add(self, table: str, *rows: Sequence[object]) -> None:
        for token, name, *more in rows:
            writer, owner = (*more, None, None)[:2]
            self.sql(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", token, writer, name, owner)

    def pets(self, **options: Any) -> list[Fact]:
        return list(self.page(stream=PETS, **options).facts)

    # ---- reading

    def test_rows_of_one_id_have_the_order_of_the_tables_and_then_of_the_rows_in_a_table(self) -> None:
        self.map_pets()
        self.add("dogs", (3, "z"), (2, "d"), (3, "a"))
        self.add("cats", (3, "y"), (4, "c"), (3, "b"))
        self.assertEqual(self.pets(), [fact(2, '["d"]'), fact(3, '["y"]', '["b"]', '["z"]', '["a"]'), fact(4, '["c"]')])

    def test_a_field_of_a_joined_row_is_null_if_the_row_is_missing(self) -> None:
        joins = "LEFT JOIN owners ON owners.id = source.owner"
        self.map_pets(self.source(row=["name", "owners.name", "1 + 1"], joins=joins), row=["name", "owner", "two"])
        self.sql("INSERT INTO owners VALUES (7, 'Ann')")
        self.add("cats", (2, "a", None, 7), (3, "b", None, 8))
        self.assertEqual(self.pets(), [fact(2, '["a","Ann",2]'), fact(3, '["b",null,2]')])

    def test_rows_of_several_kinds_may_differ_in_their_fields(self) -> None:
        self.map_pets(
            self.source("dogs", kind="dog", row=["name", "owner"]), self.source(kind="cat"), row=["kind", "data"]
        )
        self.add("dogs", (2, "a", None, 7))
        self.add("cats", (2, "b"))
        self.assertEqual(self.pets(), [fact(2, '["dog",["a",7]]', '["cat",["b"]]')])

    def test_where_selects_rows_and_may_have_a_percent_sign(self) -> None:
        self.map_pets(self.source(where="name LIKE 'a%' AND owner % 2 = 1"))
        self.add("cats", (2, "ab", None, 1), (3, "b", None, 1), (4, "ab", None, 2))
        self.assertEqual((self.pets(), self.positions(PETS)), ([fact(2, '["ab"]')], {ME: 2}))

    def test_texts_of_json_are_decoded(self) -> None:
        self.map_pets(self.source(), json_fields=["name"])
        self.add("cats", (2, '{"b": [1, "é"], "a": {}}'), (3, None), (4, "null"))
        self.assertEqual(self.pets(), [fact(2, '[{"b":[1,"\\u00e9"],"a":{}}]'), fact(3, "[null]"), fact(4, "[null]")])
        self.add("cats", (5, "{"))
        message = str(self.assertRaises(StoreError, self.pets))
        for word in ("'pets'", "'cats'", "ID 5", "not JSON"):
            self.assertIn(word, message)

    def test_booleans_are_true_or_false_in_each_database(self) -> None:
        self.map_pets(self.source(row=["1 = 1", "1 = 0"]), row=["yes", "no"], boolean_fields=["yes", "no"])
        self.add("cats", (2, "a"))
        self.assertEqual(self.pets(), [fact(2, "[true,false]")])

    def test_a_text_of_json_can_stay_a_text_that_is_ascii(self) -> None:
        self.map_pets(self.source(), ascii_fields=["name"])
        self.add("cats", (2, '{"é🔥\x7f":"\\u00e9"}'))
        self.assertEqual(self.pets(), [fact(2, '["{\\"\\\\u00e9\\\\ud83d\\\\udd25\\\\u007f\\":\\"\\\\u00e9\\"}"]')])

    def test_trap_15_distinct_rows_are_sorted_by_their_values_null_or_not(self) -> None:
        """Rows are sorted by value, not by JSON text: as a text, ``!`` would sort before a closing quotation mark."""
        self.map_pets(distinct=True)
        self.add("cats", (2, "b!c"), (2, "b"), (2, None), (2, "b"), (3, "x"))
        self.add("dogs", (2, "b"), (2, "a"), (3, "x"))
        self.assertEqual(self.pets(), [fact(2, "[null]", '["a"]', '["b"]', '["b!c"]'), fact(3, '["x"]')])
        self.assertEqual(self.pets(limit=2)[:1], [fact(2, "[null]", '["a"]', '["b"]', '["b!c"]')])

    def test_trap_13_pages_hold_whole_facts_of_all_tables(self) -> None:
        self.map_pets()
        rows = [(token, f"{token}.{size}") for token in (2, 7, 3, 5, 9) for size in range(token)]
        self.add("cats", *rows[::2])
        self.add("dogs", *rows[1::2])
        whole = self.pets()
        self.assertEqual(sum(len(each.texts) for each in whole), len(rows))
        for limit in range(1, 30):
            seen: list[Fact] = []
            page = self.page(stream=PETS, limit=limit)
            while page.limited:
                seen += page.facts
                page = self.page(stream=PETS, after=page.upto, limit=limit)
            self.assertEqual([*seen, *page.facts], whole)

    def test_each_writer_has_its_own_rows_and_master_those_with_null(self) -> None:
        self.map_pets(
            self.source(instance_column="instance_name"), self.source("dogs", instance_column="instance_name")
        )
        self.add("cats", (2, "a"), (4, "b", OTHER))
        self.add("dogs", (3, "c", ME), (5, "d", OTHER))
        self.assertEqual((self.tokens(PETS), self.tokens(PETS, OTHER)), ([2, 3], [4, 5]))
        self.assertEqual(self.positions(PETS), {ME: 3, OTHER: 5})

    def test_rows_without_a_writer_are_of_each_writer(self) -> None:
        self.map_pets(writers=["w1", "w2"])
        self.add("dogs", (3, "a"))
        self.assertEqual(self.positions(PETS), {"w1": 3, "w2": 3})

    def test_an_empty_stream_has_no_position(self) -> None:
        self.map_pets()
        self.assertEqual((self.pets(), self.positions(PETS)), ([], {}))

    def test_a_negative_stream_counts_down_in_its_tables(self) -> None:
        self.map_pets(negative=True)
        self.add("cats", (-3, "a"), (5, "not this"))
        self.add("dogs", (-2, "b"), (-3, "c"))
        self.assertEqual(self.pets(), [fact(2, '["b"]'), fact(3, '["a"]', '["c"]')])
        self.assertEqual((self.pets(after=2, limit=1), self.positions(PETS)), ([fact(3, '["a"]', '["c"]')], {ME: 3}))

    # ---- writing

    def test_facts_that_the_application_has_written_are_accepted(self) -> None:
        self.map_pets()
        self.add("cats", (2, "a"))
        self.add("dogs", (2, "b"))
        self.commit(write(3, [fact(2, '["a"]', '["b"]'), empty(3)], stream=PETS))
        self.assertEqual(self.positions(PETS), {ME: 3})

    def test_facts_that_the_tables_do_not_have_are_refused(self) -> None:
        self.map_pets()
        self.add("cats", (2, "a"))
        for stored in (fact(2, '["b"]'), fact(2, '["a"]', '["b"]'), fact(4, '["a"]')):
            message = str(self.assertRaises(StoreError, self.commit, write(9, [stored], stream=PETS)))
            self.assertIn("write them in the fact's transaction", message)
        self.assertEqual(self.positions(PETS), {ME: 2})

    def test_nothing_is_deleted_from_tables_that_are_only_read(self) -> None:
        self.map_pets()
        self.add("cats", (2, "a"))
        message = str(self.assertRaises(StoreError, self.commit, write(1, stream=PETS, reset=True)))
        self.assertIn("nothing is deleted", message)
        self.assertEqual(self.pets(), [fact(2, '["a"]')])

    # ---- definitions that are refused or reported

    def refusal(self, *tables: SourceTable, **options: Any) -> str:
        with self.assertRaises(SchemaError) as caught:
            self.map_pets(*tables, **options)
        message = str(caught.exception)
        self.assertIn("stream 'pets' cannot be joined from table", message)
        return message

    def test_a_stream_with_invalid_sql_is_refused_when_it_is_declared(self) -> None:
        self.assertIn("'birds'", self.refusal(self.source(), self.source("birds")))
        self.assertIn("colour", self.refusal(self.source(row=["source.colour"])))
        self.assertIn("number", self.refusal(self.source(id_column="number")))
        self.assertIn("who", self.refusal(self.source(instance_column="who")))
        self.assertIn("fish", self.refusal(self.source(joins="JOIN fish ON fish.id = source.id")))
        self.assertIn("wet", self.refusal(self.source(where="source.wet")))

    def test_a_missing_index_is_reported_with_the_sql_that_creates_it(self) -> None:
        self.sql("DROP INDEX dogs_id")
        self.map_pets()
        (warning,) = self.store.warnings
        self.assertIn("table 'dogs' has no index on 'id'", warning)
        self.sql(warning.rpartition(": ")[2])
        self.store.warnings.clear()
        self.map_pets()
        self.assertEqual(self.store.warnings, [])

    def test_the_writers_of_a_range_are_those_in_the_columns_of_writers(self) -> None:
        cats, dogs = [
            self.source(each, instance_column="instance_name", where="name <> '5%'") for each in ("cats", "dogs")
        ]
        self.map_pets(cats, dogs, self.source("owners"))
        self.sql("INSERT INTO owners VALUES (4, 'o')")
        self.add("cats", (2, "a", "one"), (4, "b", "one"), (5, "5%", "left out"), (9, "c", "late"))
        self.add("dogs", (3, "d", None), (6, "e", "one"))

        def writers(after: int, upto: int) -> Any:
            return self.wait(self.store.writers(PETS, after=Token(after), upto=Token(upto)))

        self.assertEqual(writers(0, 8), {"one": 6, "master": 3})
        self.assertEqual(writers(3, 4), {"one": 4})
        self.assertEqual(writers(6, 8), {})

    def test_the_writers_of_negative_ids(self) -> None:
        self.map_pets(self.source(instance_column="instance_name"), negative=True)
        self.add("cats", (-2, "a", "one"), (-4, "b", "one"), (-5, "c", "other"), (7, "d", "up"))
        found = [self.wait(self.store.writers(PETS, after=Token(after), upto=Token(4))) for after in (0, 4)]
        self.assertEqual(found, [{"one": 4}, {}])

    # ---- the kind of the database

    def test_tables_of_another_kind_of_database_are_ignored(self) -> None:
        other: Dialect = "sqlite" if self.DIALECT == "postgresql" else "postgresql"
        self.map_pets(self.source(dialect=self.DIALECT), self.source("birds", dialect=other))
        self.add("cats", (2, "a"))
        self.assertEqual(self.pets(), [fact(2, '["a"]')])

    def test_a_stream_without_a_table_here_has_its_generic_one(self) -> None:
        other: Dialect = "sqlite" if self.DIALECT == "postgresql" else "postgresql"
        self.map_pets(self.source("birds", dialect=other))
        self.commit(write(2, [fact(2, '["a"]')], stream=PETS))
        self.assertEqual(self.sql("SELECT row FROM stream_pets"), [('["a"]',)])
        fish = StreamName("fish")
        self.wait(self.store.declare(StreamDefinition(fish, row=["name"], table="fish", dialect=other)))
        self.commit(write(2, [fact(2, '["b"]')], stream=fish))
        self.assertEqual(self.sql("SELECT row FROM stream_fish"), [('["b"]',)])
        for name in (PETS, fish):  # their facts are in no table of an application
            self.assertEqual(self.wait(self.store.present(name, ME, after=Token(0), upto=Token(9))), set())
            self.assertEqual(self.wait(self.store.writers(name, after=Token(0), upto=Token(9))), {})
