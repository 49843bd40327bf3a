"""The generic table, without a database."""

from __future__ import annotations

import pytest

from replication.errors import SchemaError
from replication.storage.generic import GenericRows, newest_of
from replication.storage.sqlite.generic import GenericTable
from replication.streams.definitions import StreamDefinition
from tests.contract.stream_store import ME, OTHER, empty, fact

ORDERS = GenericTable(StreamDefinition("orders"))


def test_a_table_with_other_columns_is_refused() -> None:
    ORDERS.check_columns(GenericRows.COLUMNS)
    with pytest.raises(SchemaError, match="has the columns id, name"):
        ORDERS.check_columns(["id", "name"])
    with pytest.raises(SchemaError, match="there is no table 'stream_orders'"):
        ORDERS.check_columns([])


def test_facts_become_rows_in_order() -> None:
    written = [(ME, [fact(2, '"a"', '"b"'), empty(3)]), (OTHER, [fact(4, '"c"')])]
    assert ORDERS.rows_of(written) == [(2, 0, ME, '"a"'), (2, 1, ME, '"b"'), (4, 0, OTHER, '"c"')]
    down = GenericTable(StreamDefinition("backfill", negative=True))
    assert down.rows_of([(ME, [fact(2, '"a"')])]) == [(-2, 0, ME, '"a"')]


def test_rows_of_writers_become_positions() -> None:
    assert newest_of([("master", 5), ("worker2", 7)]) == {ME: 5, OTHER: 7}
