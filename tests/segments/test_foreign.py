"""Tests of streams that another program writes: former writers, and IDs of transactions in progress."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import attrs
import psycopg
import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")

from replication.errors import StoreError
from replication.segments import export, foreign
from replication.segments.archive import Archive
from replication.segments.databases import open_database
from replication.segments.folders import LocalFolder
from replication.segments.foreign import foreign_positions
from replication.segments.histories import is_of_tables, stored_histories
from replication.segments.manifest import Manifest
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


def make_tables_anew(connection: psycopg.Connection) -> None:
    """Do what ``pg_restore`` does."""
    connection.execute("CREATE TABLE dump AS SELECT * FROM their_orders")
    connection.execute("DROP TABLE their_orders")
    connection.execute("CREATE TABLE their_orders (stream_id bigint PRIMARY KEY, writer text, item text)")
    connection.execute("INSERT INTO their_orders SELECT * FROM dump")


def test_a_folder_from_before_a_dump_was_restored_is_refused(database: psycopg.Connection, tmp_path: Path) -> None:
    """The tables may have other facts now, although their last ID is above those in the segments."""
    store(database, 4)
    replay(database, tmp_path, ORDERS)
    insert(database, "new")
    store(database, 5)
    assert replay(database, tmp_path, ORDERS)["new"] == [2, 4, 5]
    make_tables_anew(database)
    insert(database, "new")
    store(database, 6)
    words = (
        r"^segments of orders by new reach 5, but the database has other facts above 0: it was restored or exchanged"
    )
    with pytest.raises(StoreError, match=words):
        replay(database, tmp_path, ORDERS)


def test_tables_that_are_made_anew_while_they_are_read_add_nothing(
    database: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(database, 4)
    write = export.export_range

    def restore_first(*which: Any) -> Any:
        make_tables_anew(database)
        return write(*which)

    monkeypatch.setattr(export, "export_range", restore_first)
    with pytest.raises(StoreError, match="was restored or exchanged while orders by new was read up to 4"):
        replay(database, tmp_path, ORDERS)


def test_a_worker_compares_no_names_of_tables_with_a_history(database: psycopg.Connection, tmp_path: Path) -> None:
    store(database, 4)
    replay(database, tmp_path, ORDERS)
    (known,) = {*map(tuple, stored_histories(LocalFolder(tmp_path), Manifest()).values())}
    assert is_of_tables(known)
    assert Archive(LocalFolder(tmp_path)).history(ORDERS.name, InstanceName("new")) == ()


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
    assert positions(make_sqlite(tmp_path / "first.db", "old"), UNSTORED, {}, {}, upto=9) == {"old": 1}


def test_a_file_of_another_program_is_replayed_again_and_again(tmp_path: Path) -> None:
    import sqlite3

    url = make_sqlite(tmp_path / "their.db", "old", "new", "old", "new")
    out = tmp_path / "out"

    def replay_file(position: int, definition: StreamDefinition = ORDERS, **options: Any) -> dict[str, list[int]]:
        with closing(sqlite3.connect(tmp_path / "their.db")) as theirs, theirs:
            theirs.execute("DELETE FROM stream_positions")
            theirs.execute("INSERT INTO stream_positions VALUES ('app_orders', 'new', ?)", [position])
        settings = SegmentOptions(compression="none")
        run_in_process(ReplayRequest(url, str(out), definitions=[definition], options=settings, **options))
        lines = {path.name: chain_lines(out, path.name).decode().splitlines() for path in out.glob("orders/*")}
        return {writer: [int(line.split(" ")[3]) for line in some] for writer, some in lines.items()}

    with closing(sqlite3.connect(tmp_path / "their.db")) as theirs, theirs:
        theirs.execute("CREATE TABLE stream_positions (stream_name, instance_name, stream_id)")
    assert replay_file(2) == {"new": [2], "old": [1, 3]}
    with closing(sqlite3.connect(tmp_path / "their.db")) as theirs, theirs:
        theirs.execute("DELETE FROM their_orders WHERE stream_id = 3")
    assert replay_file(4) == {"new": [2, 4], "old": [1, 3]}
    out = tmp_path / "unstored"
    assert replay_file(4, UNSTORED, upto=2) == {"new": [2], "old": [1]}


def test_a_database_without_such_locks_needs_upto(tmp_path: Path) -> None:
    import sqlite3

    with closing(sqlite3.connect(tmp_path / "their.db")) as connection:
        connection.execute("CREATE TABLE their_orders (stream_id INTEGER PRIMARY KEY, writer, item)")
        connection.execute("INSERT INTO their_orders VALUES (1, 'old', 'x'), (2, 'new', 'x')")
        connection.commit()
    request = ReplayRequest(f"sqlite:///{tmp_path}/their.db", str(tmp_path / "out"), definitions=[UNSTORED])
    why = "because no position is stored: give --upto ID if every ID up to there is complete"
    with pytest.raises(StoreError, match=f"^stream 'orders': it is not known which IDs are complete, {why}$"):
        run_in_process(request)


class Time:
    """A clock that moves while its caller sleeps."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Locks:
    """A PostgreSQL with their table and this newest row: ``holders`` are the transactions that each query finds."""

    dialect = "postgresql"

    def __init__(self, *holders: str, standby: bool = False) -> None:
        self.holders, self.standby = [*holders], standby
        self.asked: list[str] = []

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        if "their_orders" in sql:
            return [("old", 7)]
        if "pg_is_in_recovery()" in sql:
            return [(1,)] if self.standby else []
        self.asked.append(sql)
        return [(each,) for each in (self.holders.pop(0) if len(self.holders) > 1 else self.holders[0])]


def wait_for(locks: Locks, monkeypatch: pytest.MonkeyPatch) -> float:
    """Wait for the transactions in progress, and return for how many seconds."""
    clock = Time()
    monkeypatch.setattr(foreign, "time", clock)
    database: Any = locks
    assert foreign_positions(database, UNSTORED, {}, {}, None) == {"old": 7}
    return clock.now - 1_000.0


def test_only_transactions_that_had_ids_at_first_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    locks = Locks("ab", "bc", "ac", "bd")
    assert wait_for(locks, monkeypatch) == pytest.approx(2 * foreign.POLL_INTERVAL)
    assert len(locks.asked) == 3
    assert [*{*locks.asked}] == [foreign._HOLDERS.format('"their_seq"')]
    assert wait_for(Locks(""), monkeypatch) == 0


def test_a_transaction_is_waited_for_with_patience_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "POLL_INTERVAL", 30.0)
    assert wait_for(Locks("a", "a", "a", ""), monkeypatch) == 90.0, "at the limit it is looked for once more"
    what = "stream 'orders': it is not known which IDs are complete"
    why = f"^{what}: a transaction with an ID is in progress for 60 s; try again later$"
    with pytest.raises(StoreError, match=why):
        wait_for(Locks("a"), monkeypatch)
    with pytest.raises(StoreError, match=f"^{what} on a standby: name the primary, or give --upto ID$"):
        wait_for(Locks("", standby=True), monkeypatch)


def test_a_sequence_must_be_known_to_wait_for_its_transactions() -> None:
    database: Any = Locks("")
    definition = attrs.evolve(UNSTORED, sequence=None)
    with pytest.raises(StoreError, match="which IDs are complete, because no position is stored: give --upto ID"):
        foreign_positions(database, definition, {}, {}, None)
