"""After a restore, an application inserts as many rows in its table as were lost; the master starts after that."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.system.daemons import Daemon, fixed_ports, until
from tests.system.databases import PostgresDatabase, SqliteDatabase
from tests.system.mapped import MappedCluster
from tests.system.test_kills import has
from tests.system.test_restores import APP, UNDO, passed_by_another_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.system.databases import Database

UNDOING = (APP + UNDO).replace('"orders"', '"events"')
CREATE = "CREATE TABLE events (id {} PRIMARY KEY, name text)"
SHARED = """
[[streams]]
name = "events"
table = "events"
id_column = "id"
instance_column = "writer"
row = ["name"]
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Database, Callable[[str], object]]]:
    """Return a database with an empty mapped table, and what runs SQL in it."""
    if request.param == "sqlite":
        sqlite = SqliteDatabase(tmp_path)

        def run(sql: str) -> None:
            with closing(sqlite3.connect(sqlite.file, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(sql)

        run(CREATE.format("INTEGER"))
        yield sqlite, run
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as name:
        sql = partial(server.sql, database=name)
        sql(CREATE.format("bigserial"))
        yield PostgresDatabase(server, name), sql
        server.sql(f"DROP DATABASE IF EXISTS {name}_backup WITH (FORCE)")


def test_a_copy_and_a_function_that_undoes_keep_no_lost_row(
    tmp_path: Path, place: tuple[Database, Callable[[str], object]]
) -> None:
    """The largest ID is the same as before the restore, so only the rows differ."""
    database, sql = place
    mapped = MappedCluster(tmp_path, database.url, sql)
    (tmp_path / "undoing.py").write_text(UNDOING)

    def insert(*names: str) -> None:
        for name in names:
            sql(f"INSERT INTO events (name) VALUES ('{name}')")

    def seen(expected: str) -> bool:
        rows = mapped.copy("copy")
        same = has(tmp_path / "replication-undoing.db", "SELECT token, row FROM seen ORDER BY 1", [*rows])
        return same and "".join(row.strip('["]') for _, row in rows) == expected

    master = mapped.writer()
    with ExitStack() as stack:
        wire, http = stack.enter_context(fixed_ports(master))
        stack.enter_context(mapped.follower("copy", wire, f"http://{http}"))
        options = ("--instance-name=undoing", f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--app=undoing")
        stack.enter_context(Daemon(tmp_path, "worker", *options, name="undoing"))
        insert(*"abc")
        until(lambda: seen("abc"), "both have the rows")
        database.back_up()
        insert(*"lost")
        until(lambda: seen("abclost"), "both have the rows that will be lost")
        master.kill()
        database.restore()
        insert(*"news")
        master.start()
        until(lambda: seen("abcnews"), "both have the rows of now", 30)


def test_a_function_stops_where_another_writer_was_started_first_after_a_restore(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """The other one has written the lost IDs again; a function without ``on_reset`` kept the lost rows silently."""
    with postgres.database() as name:
        database = PostgresDatabase(postgres, name, "events")
        postgres.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text, writer text)", database=name)
        (tmp_path / "master.toml").write_text(f'database = "{database.url}"\n{SHARED}')
        (tmp_path / "plain.py").write_text(APP.replace('"orders"', '"events"'))

        def followed() -> bool:
            rows: list[tuple[object, ...]] = [*postgres.sql("SELECT id, name FROM events ORDER BY 1", database=name)]
            return has(tmp_path / "replication-plain.db", "SELECT token, row ->> 0 FROM seen ORDER BY token", rows)

        options = "--config=master.toml"
        with passed_by_another_writer(tmp_path, database, "plain", options, row="[{}]", followed=followed) as plain:
            until(lambda: "a went back from" in plain.log, "the stream stops", 30)
