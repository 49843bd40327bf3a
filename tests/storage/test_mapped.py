"""Mapped tables, without a database."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from replication.errors import StoreError, ValueRefusedError
from replication.storage.mapped import MappedRows
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import InstanceName, Token
from tests.contract.stream_store import ME, OTHER


def mapped(row: list[str], instance_column: str | None = None) -> MappedRows[Any]:
    definition = StreamDefinition("events", table="events", id_column="id", row=row, instance_column=instance_column)
    return MappedRows(definition, mark="?", order="source.rowid")


EVENTS, SHARED = mapped(["name", "size"]), mapped(["name"], "instance_name")


def newest(table: MappedRows[Any], rows: list[tuple[object, object]], stored: dict[InstanceName, Token]) -> object:
    session: Any = SimpleNamespace(ask=lambda sql, *, prepare: rows)
    return table.newest(session, stored)


def test_a_row_has_one_value_for_each_column() -> None:
    assert EVENTS.parse('["a",1]') == ["a", 1]
    for text in ('["a"]', '["a",1,2]', '{"name":"a"}', "7"):
        with pytest.raises(ValueRefusedError, match="is not an array of name, size"):
            EVENTS.parse(text)


def test_a_row_is_inserted_with_its_id_and_its_writer() -> None:
    assert EVENTS._insert == 'INSERT INTO "events" ("id", "name", "size") VALUES (?, ?, ?)'
    assert SHARED._insert == 'INSERT INTO "events" ("id", "instance_name", "name") VALUES (?, ?, ?)'
    assert (EVENTS.own(ME), SHARED.own(ME)) == ([], [ME])


def test_without_an_instance_column_the_largest_id_counts_for_every_writer() -> None:
    assert newest(EVENTS, [(None, 7)], {}) == {ME: 7}
    assert newest(EVENTS, [(None, 7)], {OTHER: Token(2)}) == {OTHER: 7}
    assert newest(EVENTS, [(None, None)], {}) == {}


def test_an_id_that_is_no_integer_is_refused() -> None:
    with pytest.raises(StoreError, match="column 'id' of table 'events' holds 'x', not an integer"):
        newest(EVENTS, [(None, "x")], {})


def test_with_an_instance_column_each_writer_has_its_own() -> None:
    """NULL is written by ``master``, so two rows may be of one writer."""
    assert newest(SHARED, [("master", 3), ("worker2", 9), ("master", 5)], {}) == {ME: 5, OTHER: 9}


def test_a_writer_that_is_no_text_is_shown_as_one() -> None:
    """SQLite stores any value in any column."""
    assert newest(SHARED, [("master", 3), (7, 9), (b"\xff", 5)], {}) == {ME: 3, "7": 9, "b'\\xff'": 5}


def test_a_missing_index_is_named_with_the_statement_that_creates_it() -> None:
    assert EVENTS.missing_index(EVENTS.queries[0]).endswith('CREATE INDEX events_id ON "events" ("id")')
