"""The generic table, without a database."""

from __future__ import annotations

from typing import Any, cast

import pytest

from replication.errors import SchemaError
from replication.storage.generic import GenericRows, newest_of
from replication.storage.postgres.joined import table_of as table_in_postgres
from replication.storage.sqlite.generic import GenericTable
from replication.storage.sqlite.joined import table_of as table_in_sqlite
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.wire.grammar import Token
from tests.contract.stream_store import ME, OTHER, empty, fact

ORDERS = GenericTable(StreamDefinition("orders"))


def test_a_table_with_other_columns_is_refused() -> None:
    ORDERS.check_columns(GenericRows.COLUMNS)
    with pytest.raises(SchemaError, match="has the columns id, name"):
        ORDERS.check_columns(["id", "name"])
    with pytest.raises(SchemaError, match=r"there is no table 'stream_orders'.*define it in"):
        ORDERS.check_columns([])


def test_facts_become_rows_in_order() -> None:
    written = [(ME, [fact(2, '"a"', '"b"'), empty(3)]), (OTHER, [fact(4, '"c"')])]
    assert ORDERS.rows_of(written) == [(2, 0, ME, '"a"'), (2, 1, ME, '"b"'), (4, 0, OTHER, '"c"')]
    down = GenericTable(StreamDefinition("backfill", negative=True))
    assert down.rows_of([(ME, [fact(2, '"a"')])]) == [(-2, 0, ME, '"a"')]


def test_rows_of_writers_become_positions() -> None:
    assert newest_of([("master", 5), ("worker2", 7)]) == {ME: 5, OTHER: 7}


@pytest.mark.parametrize(("table_of", "other"), [(table_in_sqlite, "postgresql"), (table_in_postgres, "sqlite")])
@pytest.mark.parametrize("joined", [False, True], ids=["mapped", "joined"])
def test_a_stream_with_tables_only_in_another_kind_of_database_has_none_of_the_application_here(
    table_of: Any, other: Any, joined: bool
) -> None:
    """A start asks for ID 1 in tables of the application; there is no session to ask here."""
    where: dict[str, Any] = {"table": "orders", "dialect": other}
    if joined:
        where = {"tables": [SourceTable(table="orders", row=["item"], dialect=other)]}
    definition = StreamDefinition("orders", row=["item"], **where)
    assert definition.in_tables, "so a start asks"
    table = table_of(definition)
    assert isinstance(table, GenericRows)
    assert table.present(cast("Any", None), ME, Token(0), Token(9)) == set()
