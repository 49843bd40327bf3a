"""The SQL of joined streams; the contract of joined streams tests the results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from replication.storage.joined import JoinedRows
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.wire.grammar import InstanceName, Token

ME = InstanceName("master")


def joined(mark: str = "?", **options: object) -> JoinedRows[Any]:
    source = SourceTable(table="cats", row=["name", "'%' || name"], where="name LIKE '%a'", **options)  # type: ignore[arg-type]
    definition = StreamDefinition("pets", row=["a", "b"], tables=[source])
    return JoinedRows(definition, definition.tables, mark=mark, order="source.rowid")


def test_a_plain_name_is_a_column_and_anything_else_an_expression() -> None:
    (part,) = joined().queries
    assert part.values == ['source."name"', "'%' || name"]


def test_sql_of_the_user_is_escaped_where_the_driver_wants_it_beside_parameters() -> None:
    (part,) = joined("%s").queries
    assert "'%%' || name" in part.page
    assert "LIKE '%%a'" in part.page
    assert "LIKE '%a'" in part.newest  # this one has none
    assert "'%' || name" in joined().queries[0].page


def test_parameters_are_a_range_of_ids_the_writer_if_the_table_has_it_and_a_limit() -> None:
    (part,) = joined().queries
    assert part.parameters(ME, Token(2), Token(9), 5) == [2, 9, 5]
    (part,) = joined(instance_column="instance_name").queries
    assert part.parameters(ME, Token(2), Token(9), 5) == [2, 9, ME, 5]


def test_a_page_of_many_tables_takes_no_more_rows_of_each_than_it_may_have() -> None:
    asked: list[object] = []

    def ask(_sql: str, parameters: object) -> list[tuple[object, ...]]:
        asked.append(parameters)
        return [(2, "a", "b"), (3, "c", "d")]

    session: Any = SimpleNamespace(ask=ask)
    page = joined().rows(session, ME, after=Token(1), upto=Token(9), limit=1).page()
    assert asked == [[1, 9, 2]]
    assert (page.upto, page.limited, len(page.facts)) == (2, True, 1)


def test_sql_of_the_user_may_have_braces() -> None:
    source = SourceTable(table="cats", row=["name"], where="name <> '{a,b}'", joins="LEFT JOIN x ON x.y = '{'")
    definition = StreamDefinition("pets", row=["a"], tables=[source], negative=True)
    (part,) = JoinedRows(definition, definition.tables, mark="?", order="source.rowid").queries
    assert part.tokens(Token(7), 3) == (
        'SELECT -source."stream_id" FROM "cats" AS source LEFT JOIN x ON x.y = \'{\' WHERE source."stream_id" < -7 '
        "AND (name <> '{a,b}') ORDER BY source.\"stream_id\" DESC LIMIT 3"
    )
