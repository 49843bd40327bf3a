"""Tests of streams that another program writes: former writers, and IDs of transactions in progress."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")

from replication.errors import StoreError
from replication.segments import foreign
from replication.segments.databases import open_database
from replication.segments.foreign import foreign_positions
from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.wire.grammar import InstanceName, Token
from tests.segments.histories import chain_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

ORDERS = StreamDefinition(
    "orders",
    table="their_orders",
    row=["item"],
    instance_column="writer",
    sequence="their_seq",
    position_name="app_orders",
)
UNSTORED = StreamDefinition(
    "orders", table="their_orders", row=["item"], instance_column="writer", sequence="their_seq", position_name=""
)


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[psycopg.Connection]:
    """A database with a table of another program, rows of two writers, and the position of one."""
    with postgres.database() as name, psycopg.connect(postgres.url(name), autocommit=True) as connection:
        connection.execute("CREATE SEQUENCE their_seq")
        connection.execute("CREATE TABLE their_orders (stream_id bigint PRIMARY KEY, writer text, item text)")
        connection.execute(
            "CREATE TABLE stream_positions (stream_name text, instance_name text, stream_id bigint NOT NULL)"
        )
        insert(connection, "old", "new", "old", "new")
        yield connection


def insert(connection: psycopg.Connection, *writers: str) -> None:
    """Insert a row of each of these writers."""
    for each in writers:
        connection.execute("INSERT INTO their_orders VALUES (nextval('their_seq'), %s, 'x')", [each])


def store(connection: psycopg.Connection, position: int) -> None:
    """Store the position of the writer that is left."""
    connection.execute("DELETE FROM stream_positions")
    connection.execute("INSERT INTO stream_positions VALUES ('app_orders', 'new', %s)", [position])


def replay(
    connection: psycopg.Connection, out: Path, definition: StreamDefinition, upto: int | None = None
) -> dict[str, list[int]]:
    """Replay, and return the tokens in all segments by writer."""
    url = f"postgresql://postgres@127.0.0.1:{connection.info.port}/{connection.info.dbname}"
    options = SegmentOptions(compression="none")
    run_in_process(ReplayRequest(url, str(out), definitions=[definition], upto=upto, options=options))
    found = {}
    for writer in sorted(path.name for path in out.glob("orders/*")):
        lines = chain_lines(out, writer).decode().splitlines()
        found[writer] = [int(line.split(" ")[3]) for line in lines]
    return found


def test_all_rows_of_a_former_writer_are_written(database: psycopg.Connection, tmp_path: Path) -> None:
    store(database, 2)
    assert replay(database, tmp_path, ORDERS) == {"new": [2], "old": [1, 3]}
    insert(database, "new")
    store(database, 5)
    assert replay(database, tmp_path, ORDERS) == {"new": [2, 4, 5], "old": [1, 3]}


def test_a_run_with_upto_is_continued_for_a_former_writer(database: psycopg.Connection, tmp_path: Path) -> None:
    store(database, 4)
    assert replay(database, tmp_path, ORDERS, upto=1) == {"new": [], "old": [1]}
    assert replay(database, tmp_path, ORDERS) == {"new": [2, 4], "old": [1, 3]}


def test_a_former_writer_whose_newest_row_was_deleted_is_no_error(database: psycopg.Connection, tmp_path: Path) -> None:
    store(database, 4)
    replay(database, tmp_path, ORDERS)
    database.execute("DELETE FROM their_orders WHERE stream_id = 3")
    assert replay(database, tmp_path, ORDERS) == {"new": [2, 4], "old": [1, 3]}


def test_without_stored_positions_a_run_waits_for_transactions_in_progress(
    database: psycopg.Connection, tmp_path: Path
) -> None:
    with psycopg.connect(database.info.dsn) as slow:
        slow.execute("INSERT INTO their_orders VALUES (nextval('their_seq'), 'old', 'late')")
        insert(database, "new")  # its ID is larger, and it is committed before
        committing = threading.Timer(1.0, slow.commit)
        committing.start()
        began = time.monotonic()
        found = replay(database, tmp_path, UNSTORED)
        assert time.monotonic() - began >= 0.9
        committing.join()
    assert found == {"new": [2, 4, 6], "old": [1, 3, 5]}


def test_without_stored_positions_later_rows_are_added(database: psycopg.Connection, tmp_path: Path) -> None:
    replay(database, tmp_path, UNSTORED)
    insert(database, "old")
    assert replay(database, tmp_path, UNSTORED) == {"new": [2, 4], "old": [1, 3, 5]}


def test_a_transaction_that_does_not_end_is_an_error_unless_upto_is_given(
    database: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "PATIENCE", 0.3)
    with psycopg.connect(database.info.dsn) as slow:
        slow.execute("INSERT INTO their_orders VALUES (nextval('their_seq'), 'old', 'late')")
        with pytest.raises(StoreError, match="is in progress for"):
            replay(database, tmp_path, UNSTORED)
        assert replay(database, tmp_path, UNSTORED, upto=4) == {"new": [2, 4], "old": [1, 3]}


def make_sqlite(path: Path, *writers: str) -> str:
    import sqlite3

    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE their_orders (stream_id INTEGER PRIMARY KEY, writer, item)")
        connection.executemany("INSERT INTO their_orders (writer) VALUES (?)", [(each,) for each in writers])
        connection.commit()
    return f"sqlite:///{path}"


def positions(
    url: str, definition: StreamDefinition, stored: dict[str, int], ends: dict[str, int], upto: int | None = None
) -> dict[str, int]:
    """Return each writer's position, where ``stored`` are stored and segments reach ``ends``."""
    with closing(open_database(url)) as database:
        tokens = {InstanceName(writer): Token(end) for writer, end in ends.items()}
        found = foreign_positions(
            database, definition, {InstanceName(writer): each for writer, each in stored.items()}, tokens, upto
        )
    return {str(writer): int(each) for writer, each in found.items()}


def test_the_position_of_a_former_writer_is_its_newest_row(tmp_path: Path) -> None:
    url = make_sqlite(tmp_path / "their.db", "old", "new", "old", "new", "other")
    assert positions(url, ORDERS, {"new": 2}, {}) == {"new": 2, "old": 3, "other": 5}
    assert positions(url, ORDERS, {"new": -2}, {}) == {"new": 2, "old": 3, "other": 5}
    assert positions(url, ORDERS, {}, {}) == {"old": 3, "new": 4, "other": 5}
    assert positions(url, ORDERS, {"new": 4}, {"new": 2, "old": 7}) == {"new": 4, "old": 7, "other": 5}
    assert positions(url, ORDERS, {"new": 4}, {"new": 4}) == {"new": 4, "other": 5}, "rows above the segments only"
    assert positions(url, ORDERS, {"new": 4, "late": 1}, {"new": 4}) == {"new": 4, "late": 1, "old": 3, "other": 5}


@pytest.mark.parametrize("tables", [("their_orders", "their_returns"), ("their_returns", "their_orders")])
def test_the_newest_row_of_a_former_writer_may_be_in_any_of_its_tables(tmp_path: Path, tables: tuple[str, str]) -> None:
    import sqlite3

    url = make_sqlite(tmp_path / "their.db", "new", "old", "old")
    with closing(sqlite3.connect(tmp_path / "their.db")) as theirs:
        theirs.execute("CREATE TABLE their_returns (stream_id INTEGER PRIMARY KEY, writer, item)")
        theirs.execute("INSERT INTO their_returns VALUES (2, 'old', 'x')")
        theirs.commit()
    sources = [SourceTable(table=each, row=("item",), instance_column="writer") for each in tables]
    joined = StreamDefinition("orders", row=["item"], tables=sources, position_name="theirs")
    assert positions(url, joined, {"new": 1}, {}) == {"new": 1, "old": 3}


def test_without_stored_positions_every_writer_is_at_the_last_id(tmp_path: Path) -> None:
    url = make_sqlite(tmp_path / "their.db", "old", "new", "old")
    assert positions(url, UNSTORED, {}, {}, upto=9) == {"old": 3, "new": 3}
    assert positions(url, UNSTORED, {}, {"new": 2, "gone": 2}, upto=9) == {"old": 3, "new": 3, "gone": 3}
    assert positions(make_sqlite(tmp_path / "empty.db"), UNSTORED, {}, {}) == {}


def test_a_database_without_such_locks_needs_upto(tmp_path: Path) -> None:
    import sqlite3

    with closing(sqlite3.connect(tmp_path / "their.db")) as connection:
        connection.execute("CREATE TABLE their_orders (stream_id INTEGER PRIMARY KEY, writer, item)")
        connection.execute("INSERT INTO their_orders VALUES (1, 'old', 'x'), (2, 'new', 'x')")
        connection.commit()
    request = ReplayRequest(f"sqlite:///{tmp_path}/their.db", str(tmp_path / "out"), definitions=[UNSTORED])
    with pytest.raises(StoreError, match="give --upto ID"):
        run_in_process(request)
