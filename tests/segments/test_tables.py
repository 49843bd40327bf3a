"""Tests of reading tables in bulk: the same rows as in the store's pages."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.errors import SchemaError, StoreError
from replication.segments import tables
from replication.segments.databases import open_database
from replication.segments.run import StreamRange, WriterRange
from replication.segments.tables import open_table
from replication.storage.sqlite.joined import JoinedTable
from replication.storage.sqlite.mapped import MappedTable
from replication.storage.sqlite.session import SqliteSession
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.wire.grammar import InstanceName, Token
from tests.segments.histories import MASTER, OTHER, fact, write_database

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

UPTO = Token(1_000)


def read(
    url: str, definition: StreamDefinition, *writers: str, after: int = 0, upto: int = UPTO, exclusive: bool = False
) -> list[tuple[int, str | None, str]]:
    """Return all rows, with their writers where the table is asked for several."""
    with closing(open_database(url)) as database:
        table = open_table(database, definition)
        found: list[tuple[int, str | None, str]] = []
        ranges = tuple(WriterRange(InstanceName(each), Token(after), Token(upto)) for each in writers)
        part = StreamRange(definition, Token(after), Token(upto), ranges, exclusive)
        for tokens, numbers, rows in table.columns(part):
            whose = [None] * len(tokens) if numbers is None else [[*writers, None][each] for each in numbers]
            found += zip(tokens.tolist(), whose, rows.to_pylist(), strict=True)
        return found


def test_rows_can_be_read_of_all_writers_some_or_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write_database(
        tmp_path / "m.db", {MASTER: [fact(2, 1), fact(9, 2)], OTHER: [fact(3, 3, 4)], "x": [fact(5, 5)]}
    )
    every = [(2, MASTER, "1"), (3, OTHER, "3"), (3, OTHER, "4"), (5, "x", "5"), (9, MASTER, "2")]
    orders = StreamDefinition("orders")
    assert read(url, orders, MASTER, OTHER, "x", exclusive=True) == every
    others = [(token, None if writer == "x" else writer, text) for token, writer, text in every]
    assert read(url, orders, MASTER, OTHER, exclusive=True) == others, "others may be among them"
    assert read(url, orders, OTHER, MASTER, upto=2**48) == [*every[1:3], every[0], every[-1]], "one by one"
    assert read(url, orders, MASTER, OTHER, after=2, upto=2**48 + 1) == [*every[1:3], every[-1]], "a place in the span"
    assert read(url, orders, OTHER, "x") == every[1:4]
    assert read(url, orders, MASTER, after=2) == [(9, None, "2")]
    assert read(url, orders, "missing") == []
    monkeypatch.setattr(tables, "MAX_WRITERS", 2)
    assert read(url, orders, OTHER, MASTER) == [every[0], *every[1:3], every[-1]], "as many as there are numbers for"
    monkeypatch.setattr(tables, "MAX_WRITERS", 1)
    assert read(url, orders, OTHER, MASTER) == [*every[1:3], every[0], every[-1]], "more than there are numbers for"


def make_shop(path: Path, rows: Sequence[tuple[Any, ...]], columns: str = "n INTEGER, writer TEXT, a, b") -> str:
    with closing(sqlite3.connect(path)) as opened, opened:
        opened.execute(f"CREATE TABLE shop ({columns})")
        opened.execute("CREATE INDEX shop_n ON shop (n)")
        opened.executemany(f"INSERT INTO shop VALUES ({', '.join('?' * len(columns.split(',')))})", rows)
    return f"sqlite:///{path}"


values = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.sampled_from([None, MASTER, OTHER]), values, values), max_size=8),
    negative=st.booleans(),
    batch=st.integers(1, 4),
)
def test_a_mapped_row_has_the_same_bytes_as_in_the_store(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], *, negative: bool, batch: int
) -> None:
    sign = -1 if negative else 1
    path = tmp_path_factory.mktemp("mapped") / "m.db"
    try:
        url = make_shop(path, [(sign * n, *rest) for n, *rest in rows])
    except UnicodeEncodeError:  # a lone surrogate cannot be stored
        return
    shop = StreamDefinition(
        "shop", table="shop", id_column="n", instance_column="writer", row=("b", "a"), negative=negative
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "PAGE_ROWS", batch)
        found = read(url, shop, MASTER, OTHER)
        assert [each[::2] for each in found if each[1] == OTHER] == [each[::2] for each in read(url, shop, OTHER)]
    with closing(SqliteSession(str(path))) as opened:
        opened.connect()
        stored = MappedTable(shop)
        for writer in (MASTER, OTHER):
            page = stored.rows(opened, InstanceName(writer), after=Token(0), upto=UPTO, limit=1_000).page()
            want = [(token, writer, text) for token, texts in page.facts for text in texts]
            assert [each for each in found if each[1] == writer] == want


def test_the_longest_row_of_a_sample_is_measured(tmp_path: Path) -> None:
    """To measure all rows of a large table would take a third of the time of a replay."""
    for sign in (1, -1):
        name = f"part{sign}.db"
        facts = [fact(token, "é" * (500 if 7_400 < token <= 8_100 else 1)) for token in range(2, 10_002)]
        url = write_database(tmp_path / name, {MASTER: facts})
        stream = StreamDefinition("orders", negative=sign < 0)
        if sign < 0:
            with closing(sqlite3.connect(tmp_path / name)) as opened, opened:
                opened.execute("UPDATE stream_orders SET stream_id = -stream_id")
        with closing(open_database(url)) as database:
            table = open_table(database, stream)
            assert isinstance(table, tables.GenericTable)
            assert database.rows(table._longest(Token(0), Token(10_001))) == [(len(facts[7_500].texts[0].encode()),)]
            assert database.rows(table._longest(Token(0), Token(7_000))) == [(len(facts[0].texts[0].encode()),)]
            assert database.rows(table._longest(Token(20_000), Token(30_000))) == [(None,)]


def test_a_page_of_long_rows_has_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write_database(tmp_path / "m.db", {})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("CREATE TABLE shop (n INTEGER PRIMARY KEY, a TEXT)")
        rows = [(n, "x" * (100 if 10 < n <= 30 else 1)) for n in range(1, 51)]
        opened.executemany("INSERT INTO shop VALUES (?, ?)", rows)
    monkeypatch.setattr(tables, "FIRST_ROWS", 15)
    monkeypatch.setattr(tables, "PAGE_ROWS", 20)
    monkeypatch.setattr(tables, "PAGE_BYTES", 204)
    shop = StreamDefinition("shop", table="shop", id_column="n", row=("a",))
    with closing(open_database(url)) as database:
        part = StreamRange(shop, Token(0), UPTO, (WriterRange(MASTER, Token(0), UPTO),), exclusive=True)
        pages = [each.tokens.tolist() for each in open_table(database, shop).columns(part)]
    assert [token for page in pages for token in page] == [*range(1, 51)]
    assert [len(page) for page in pages] == [15, 5, *[1] * 11, 19]


def test_rows_without_a_writer_belong_to_the_requested_one(tmp_path: Path) -> None:
    url = make_shop(tmp_path / "m.db", [(2, None, 1, 2), (3, "x", 3, 4)])
    shop = StreamDefinition("shop", table="shop", id_column="n", row=("a", "b"), where="b < 4 OR b > 9")
    assert read(url, shop, MASTER) == [(2, None, "[1,2]")]
    assert read(url, shop, "other") == [(2, None, "[1,2]")]


def test_a_value_that_is_not_json_is_named(tmp_path: Path) -> None:
    url = make_shop(tmp_path / "m.db", [(2, None, 1, "x"), (3, None, 1, b"\x00")])
    shop = StreamDefinition("shop", table="shop", id_column="n", row=("a", "b"))
    with pytest.raises(StoreError, match=r"stream 'shop': column 'b' of table 'shop' has, at ID 3, what is no JSON"):
        read(url, shop, MASTER)


def test_reach_does_not_cut_a_fact(tmp_path: Path) -> None:
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, 1), fact(3, 1, 2, 3), fact(7, 1), fact(9, 1)]})
    with closing(open_database(url)) as database:
        table = open_table(database, StreamDefinition("orders"))
        assert [table.reach(Token(0), count) for count in range(1, 8)] == [2, 2, 2, 3, 7, None, None]
        assert [table.reach(Token(2), count) for count in range(1, 6)] == [3, 3, 3, 7, None]
        assert table.reach(Token(9), 1) is None
        assert not table.is_empty()
    write_database(tmp_path / "m.db", {}, stream="none")
    with closing(open_database(url)) as database:
        assert open_table(database, StreamDefinition("none")).is_empty()
    write_database(tmp_path / "m.db", {MASTER: [fact(1, 1)]}, stream="none")
    with closing(open_database(url)) as database:
        assert not open_table(database, StreamDefinition("none")).is_empty()


PETS = StreamDefinition(
    "pets",
    row=("kind", "data"),
    tables=[
        SourceTable(
            table="cats",
            id_column="id",
            instance_column="writer",
            kind="cat",
            row=["name", "owners.name"],
            joins="LEFT JOIN owners ON owners.id = source.owner",
            where="source.name <> 'hidden'",
        ),
        SourceTable(table="dogs", dialect="sqlite", id_column="id", kind="dog", row=["name"]),
        SourceTable(table="birds", dialect="postgresql", kind="bird", row=["name"]),
    ],
)


def make_pets(path: Path) -> str:
    with closing(sqlite3.connect(path)) as opened, opened:
        opened.execute("CREATE TABLE owners (id INTEGER PRIMARY KEY, name TEXT)")
        opened.execute("INSERT INTO owners VALUES (1, 'é')")
        for table in ("cats", "dogs"):
            opened.execute(f"CREATE TABLE {table} (id INTEGER, writer TEXT, name TEXT, owner INTEGER)")
            opened.execute(f"CREATE INDEX {table}_id ON {table} (id)")
        cats = [(2, None, "a", 1), (5, OTHER, "b", None), (5, OTHER, "hidden", 1), (7, MASTER, "c", 1)]
        opened.executemany("INSERT INTO cats VALUES (?, ?, ?, ?)", cats)
        opened.executemany("INSERT INTO dogs (id, name) VALUES (?, ?)", [(2, "d"), (2, "e"), (3, "f"), (9, "g")])
    return f"sqlite:///{path}"


def test_a_joined_row_has_the_same_bytes_as_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = make_pets(tmp_path / "m.db")
    stored = JoinedTable(PETS)
    for limit in (1, 2, 1_000):
        monkeypatch.setattr(tables, "PAGE_ROWS", limit)
        found = read(url, PETS, MASTER, OTHER)
        for writer in (MASTER, OTHER):
            with closing(SqliteSession(str(tmp_path / "m.db"))) as opened:
                opened.connect()
                page = stored.rows(opened, writer, after=Token(0), upto=UPTO, limit=1_000).page()
            want = [(token, writer, text) for token, texts in page.facts for text in texts]
            assert want
            assert [each for each in found if each[1] == writer] == want
    assert (2, MASTER, '["cat",["a","\\u00e9"]]') in found


def test_reach_does_not_cut_a_fact_of_several_tables(tmp_path: Path) -> None:
    with closing(open_database(make_pets(tmp_path / "m.db"))) as database:
        table = open_table(database, PETS)
        assert [table.reach(Token(0), count) for count in range(1, 9)] == [2, 2, 2, 3, 5, 7, None, None]
        assert table.reach(Token(5), 1) == 7
        assert table.reach(Token(9), 1) is None
        assert not table.is_empty()
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("DELETE FROM dogs")
        opened.execute("DELETE FROM cats WHERE name <> 'hidden'")
    with closing(open_database(f"sqlite:///{tmp_path}/m.db")) as database:
        assert open_table(database, PETS).is_empty()
        with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
            opened.execute("INSERT INTO dogs (id, name) VALUES (1, 'd')")
        assert not open_table(database, PETS).is_empty()


def test_a_table_of_another_kind_of_database_is_ignored(tmp_path: Path) -> None:
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, 1)]})
    orders = StreamDefinition("orders", table="elsewhere", row=("a",), dialect="postgresql")
    assert read(url, orders, MASTER) == [(2, None, "1")]


def test_a_stream_in_memory_has_no_history(tmp_path: Path) -> None:
    url = write_database(tmp_path / "m.db", {})
    with pytest.raises(StoreError, match="stream 'typing' has no history"):
        read(url, StreamDefinition("typing", in_memory=True), MASTER)


def test_a_missing_table_of_a_joined_stream_is_named(tmp_path: Path) -> None:
    url = make_pets(tmp_path / "m.db")
    with pytest.raises(SchemaError, match=r"'pets' cannot be joined from table 'fish': no such table"):
        read(url, StreamDefinition("pets", row=("a",), tables=[SourceTable(table="fish", row=["name"])]), MASTER)
