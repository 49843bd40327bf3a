"""Which JSON each type of column has in a row of a mapped stream: the tables of docs/operations.md."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from replication.storage.postgres.store import PostgresStore
from replication.storage.sqlite.store import SqliteStore
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import Token
from tests.contract.stream_store import ME, ORDERS
from tests.storage.pump import Pump
from tests.system.daemons import CHECKOUT

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

Case = tuple[str, str, str]  # the type, a value in SQL, and the value in the row


def documented(head: str) -> list[Case]:
    """Return the cases of the table with this first column."""
    text = (CHECKOUT / "docs/operations.md").read_text()
    _, _, table = text.partition(f"\n| {head} | value in SQL | in the row |\n| --- | --- | --- |\n")
    lines = table.partition("\n\n")[0].splitlines()
    cells = [re.fullmatch(r"\| (.+) \| `(.+)` \| `(.+)` \|", line) for line in lines]
    return [(kind, each[2], each[3]) for each in cells if each for kind in re.findall("`(.+?)`", each[1])]


def create(cases: list[Case]) -> list[str]:
    """Return the statements that make the table with one row."""
    columns = ", ".join([f"c{place} {kind}" for place, (kind, _, _) in enumerate(cases)])
    values = ", ".join([value for _, value, _ in cases])
    return [f"CREATE TABLE mapped (id INTEGER PRIMARY KEY, {columns})", f"INSERT INTO mapped VALUES (2, {values})"]


def row_of(store: SqliteStore | PostgresStore, pump: Pump, cases: list[Case]) -> str:
    """Return the row of the stream."""
    names = [f"c{place}" for place in range(len(cases))]
    pump.wait(store.declare(StreamDefinition(ORDERS, table="mapped", id_column="id", row=names)))
    (fact,) = pump.wait(store.facts(ORDERS, ME, after=Token(0), upto=Token(9), limit=9)).facts
    return fact.texts[0]


def expected(cases: list[Case]) -> str:
    assert len(cases) > 15
    return f"[{','.join([text for _, _, text in cases])}]"


def test_each_type_of_sqlite_is_in_the_row_what_the_document_has() -> None:
    pump, cases = Pump(), documented("column")
    store = SqliteStore(":memory:", pump)
    pump.wait(store.open())
    transaction = store.transaction()
    for statement in create(cases):
        pump.wait(transaction.execute(statement))
    pump.wait(transaction.commit([]))
    assert row_of(store, pump, cases) == expected(cases)
    pump.wait(store.close())


def test_each_type_of_postgresql_is_in_the_row_what_the_document_has(postgres: PostgresServer) -> None:
    pump, cases = Pump(), documented("type")
    with postgres.database() as name:
        for statement in create(cases):
            postgres.sql(statement, database=name)
        store = PostgresStore(postgres.url(name), pump)
        pump.wait(store.open())
        assert row_of(store, pump, cases) == expected(cases)
        pump.wait(store.close())


@pytest.mark.parametrize("head", ["type", "column"])
def test_each_line_of_the_document_is_a_case(head: str) -> None:
    text = (CHECKOUT / "docs/operations.md").read_text()
    lines = text.partition(f"\n| {head} | value in SQL |")[2].partition("\n\n")[0].splitlines()[2:]
    kinds = [re.findall("`(.+?)`", line.split(" | ")[0]) for line in lines]
    assert len(documented(head)) == sum(map(len, kinds))
