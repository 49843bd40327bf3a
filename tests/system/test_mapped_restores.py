"""After a restore, an application inserts as many rows in its table as were lost; the master starts after that."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import Daemon, append, fixed_ports, until
from tests.system.databases import PostgresDatabase, SqliteDatabase
from tests.system.mapped import MappedCluster
from tests.system.test_kills import has
from tests.system.test_restores import APP, UNDO

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
    with ExitStack() as stack, postgres.database() as name:
        database = PostgresDatabase(postgres, name)
        stack.callback(postgres.sql, f"DROP DATABASE IF EXISTS {name}_backup WITH (FORCE)")
        postgres.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text, writer text)", database=name)
        (tmp_path / "master.toml").write_text(f'database = "{database.url}"\n{SHARED}')
        (tmp_path / "plain.py").write_text(APP.replace('"orders"', '"events"'))
        options = ("--config=master.toml",)
        writers = {each: Daemon(tmp_path, "master", f"--instance-name={each}", *options, name=each) for each in "ab"}
        at = {each: stack.enter_context(fixed_ports(daemon)) for each, daemon in writers.items()}
        follow = [f"--connect=tcp:{wire}" for wire, _ in at.values()]
        plain = Daemon(tmp_path, "worker", "--instance-name=plain", *follow, "--app=plain", name="plain")
        stack.enter_context(plain)

        def write(writer: str, *rows: str) -> None:
            writers[writer].address("HTTP")
            append(at[writer][1], "events", [Fact(Token(0), (f'["{row}"]',)) for row in rows])

        def followed() -> bool:
            rows: list[tuple[object, ...]] = [*postgres.sql("SELECT id, name FROM events ORDER BY 1", database=name)]
            return has(tmp_path / "replication-plain.db", "SELECT token, row ->> 0 FROM seen ORDER BY token", rows)

        write("a", "a1", "a2")
        write("b", "b1")
        until(followed, "all is applied")
        database.back_up()
        write("a", "lost 1", "lost 2")
        until(followed, "what will be lost is applied")
        for each in (plain, *writers.values()):
            each.kill()
        database.restore()
        writers["b"].start()
        write("b", *"new facts of b")
        writers["a"].start()
        write("a", "a3")
        plain.start()
        until(lambda: "a went back from" in plain.log, "the stream stops", 30)
