"""A database loses commits while its master runs: the master ends, and followers go back once it is started again."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from urllib.error import URLError

import psycopg
import pytest

from replication.bench.cluster import find_binaries
from replication.errors import PositionMovedError
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.postgres import PostgresServer
from tests.system.daemons import LOCAL, Daemon, append, fixed_ports, until
from tests.system.databases import OpenFile, PostgresDatabase, SqliteDatabase
from tests.system.test_kills import has, table
from tests.system.test_restores import SEEN, Shop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.system.databases import Database

LOST = "has lost commits of this process"
TABLES = "SELECT tablename FROM pg_tables"
TOTALS = """
def register(worker):
    @worker.on("orders")
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS totals (n integer)")
        await txn.execute("INSERT INTO totals VALUES (%s)", [len(facts)])
"""
UNDO_TOTALS = """
    @worker.on_reset("orders")
    async def undo(writer, to, txn):
        print("undone")
"""


class DumpedDatabase(PostgresDatabase):
    """The backup is a dump, which is restored into the same database; no session is ended for that."""

    def __init__(self, server: PostgresServer, database: str, folder: Path) -> None:
        super().__init__(server, database)
        self.file = str(folder / "dump")

    def back_up(self) -> None:
        """Dump the database."""
        self._run("pg_dump", "--format=custom", f"--file={self.file}")

    def restore(self) -> None:
        """Restore the dump."""
        self._run("pg_restore", "--clean", "--if-exists", "--single-transaction", self.file)

    def _run(self, program: str, *arguments: str) -> None:
        binaries = find_binaries()
        assert binaries is not None
        command = [str(binaries / program), f"--dbname={self.server.url(self.database)}", *arguments]
        subprocess.run(command, check=True)


class CopiedServer(PostgresDatabase):
    """The backup is a copy of the server's data directory, which replaces it while the server is stopped."""

    def back_up(self) -> None:
        """Copy the data directory; the server is restarted for that."""
        folder = self.server.folder
        self.server.stop()
        _copy_tree(folder / "data", folder / "backup")
        self.server.start()

    def restore(self) -> None:
        """Replace the data directory."""
        folder = self.server.folder
        self.server.stop("immediate")
        shutil.rmtree(folder / "data")
        _copy_tree(folder / "backup", folder / "data")
        self.server.start()


def _copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for each in (target, *target.rglob("*")):
        found = (source / each.relative_to(target)).stat()
        shutil.chown(each, found.st_uid, found.st_gid)


@pytest.fixture(params=["an SQLite file", "a database", "a dump", "a data directory"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Return a database for each kind of backup."""
    if request.param == "an SQLite file":
        yield OpenFile(tmp_path)
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    if request.param == "a data directory":
        with PostgresServer(fsync=False) as own:
            yield CopiedServer(own, "postgres")
        return
    with server.database() as name:
        if request.param == "a dump":
            yield DumpedDatabase(server, name, tmp_path)
            return
        yield PostgresDatabase(server, name)
        server.sql(f"DROP DATABASE IF EXISTS {name}_backup WITH (FORCE)")


def loses_commits(shop: Shop, back_up: Callable[[], object], lose: Callable[[], object], *, busy: bool) -> None:
    """Let the database of a running master lose five facts; with ``busy``, append before the master has noticed."""
    shop.append(*"abcde")
    shop.is_at(6, shop.copy, shop.undoing)
    back_up()
    until(lambda: appended(shop, "l"), "the master appends after the backup")
    shop.append(*"ost!")
    shop.is_at(11, shop.copy, shop.undoing)
    lose()
    while busy and not shop.master.ended:
        assert not appended(shop, "too late")
    assert shop.master.wait() == 1
    assert shop.master.log.count(LOST) == 2  # once logged, and once as the last line
    assert LOST in shop.copy.log
    assert LOST in shop.undoing.log


def appended(shop: Shop, row: str) -> bool:
    """Append a fact; return whether that succeeded."""
    try:
        shop.append(row)
    except (URLError, ConnectionError):
        return False
    return True


def are_equal(shop: Shop, database: Database, *rows: str) -> None:
    """Check that the database has these rows, and that the followers have the same."""
    found = database.rows()
    assert [row for *_, row in found] == [f'"{each}"' for each in rows]
    until(lambda: table(shop.file(shop.copy), "orders") == found, "the copy is equal")
    seen: list[tuple[object, ...]] = [(token, row) for token, _, _, row in found]
    until(lambda: has(shop.file(shop.undoing), SEEN, seen), "the function has applied the same")


@pytest.mark.parametrize("busy", [True, False])
def test_a_master_ends_when_its_database_is_restored(tmp_path: Path, database: Database, busy: bool) -> None:
    """It commits and publishes nothing after that; new facts then exceed those that were lost."""
    with ExitStack() as stack:
        shop = Shop(tmp_path, stack, database.url)
        loses_commits(shop, database.back_up, database.restore, busy=busy)
        shop.restart_master(*"new facts")
        are_equal(shop, database, *"abcde", *"new facts")


@pytest.mark.parametrize("database", ["an SQLite file", "a database"], indirect=True)
def test_a_worker_that_writes_ends_when_its_database_is_restored(tmp_path: Path, database: Database) -> None:
    with ExitStack() as stack:
        shop = Shop(tmp_path, stack, database.url, writing_worker=True)
        loses_commits(shop, database.back_up, database.restore, busy=True)
        shop.restart_master(*"new facts")
        are_equal(shop, database, *"abcde", *"new facts")


@pytest.mark.parametrize("database", ["an SQLite file", "a database"], indirect=True)
def test_a_worker_ends_when_its_own_database_is_restored_and_then_continues(tmp_path: Path, database: Database) -> None:
    """Its supervisor starts it again, and it applies the lost facts once more."""
    with ExitStack() as stack:
        master = Daemon(tmp_path, "master", "--stream=orders", "--database=sqlite:///master.db")
        wire, http = stack.enter_context(fixed_ports(master))
        options = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", f"--database={database.url}", LOCAL[1])
        worker = stack.enter_context(Daemon(tmp_path, "worker", *options))

        def has_rows(*rows: str) -> None:
            until(lambda: found() == [f'"{each}"' for each in rows], "the copy is equal")

        def found() -> list[object]:
            try:
                return [row for *_, row in database.rows()]
            except (sqlite3.OperationalError, psycopg.errors.UndefinedTable):
                return []  # the worker has not made its table yet

        def put(*rows: str) -> None:
            append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

        worker.address("HTTP")
        put(*"abc")
        has_rows(*"abc")
        database.back_up()
        put(*"de")
        has_rows(*"abcde")
        database.restore()
        put("f")
        assert worker.wait() == 1
        assert LOST in worker.log
        worker.start()
        has_rows(*"abcdef")


@pytest.mark.parametrize("database", ["an SQLite file", "a database"], indirect=True)
@pytest.mark.parametrize("idle", [False, True])
def test_a_worker_ends_when_a_backup_is_restored_from_before_its_writer_went_back(
    tmp_path: Path, database: Database, idle: bool
) -> None:
    """The backup has a larger position than the worker.  After a restart, the copy kept what the writer had lost."""
    (tmp_path / "master").mkdir()
    written = SqliteDatabase(tmp_path / "master")
    with ExitStack() as stack:
        master = Daemon(tmp_path, "master", "--stream=orders", f"--database={written.url}")
        wire, http = stack.enter_context(fixed_ports(master))
        options = (f"--connect=tcp:{wire}", f"--database={database.url}", LOCAL[1])
        worker = stack.enter_context(Daemon(tmp_path, "worker", *options))

        def put(*rows: str) -> None:
            append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

        def is_equal() -> bool:
            try:
                return database.rows() == written.rows()
            except (sqlite3.OperationalError, psycopg.errors.UndefinedTable):
                return False  # the worker has not made its table yet

        put(*"abc")
        until(is_equal, "the copy is equal")
        written.back_up()
        put(*"lost")
        until(is_equal, "the copy is equal")
        database.back_up()
        master.kill()
        written.restore()
        master.start()
        until(is_equal, "the copy goes back")
        if idle:
            worker.kill()
            worker.start()
            worker.address("HTTP")
        database.restore()
        master.kill()
        master.start()
        master.address("HTTP")
        put("new")
        assert worker.wait() == 1
        assert LOST in worker.log
        worker.start()
        until(is_equal, "the copy goes back once more")


@pytest.mark.parametrize("undoes", [False, True])
def test_a_worker_on_the_writers_database_ends_when_that_is_restored(
    tmp_path: Path, postgres: PostgresServer, undoes: bool
) -> None:
    """Its totals went back with its positions: it undoes nothing, and a start is the whole cure."""
    (tmp_path / "totals.py").write_text(TOTALS + (UNDO_TOTALS if undoes else ""))
    with postgres.database() as name, ExitStack() as stack:
        database = DumpedDatabase(postgres, name, tmp_path)
        master = Daemon(tmp_path, "master", "--stream=orders", f"--database={database.url}")
        wire, http = stack.enter_context(fixed_ports(master))
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", f"--database={database.url}", "--app=totals")
        worker = stack.enter_context(Daemon(tmp_path, "worker", *follow))

        def put(rows: str) -> None:
            append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

        def has_total(total: int) -> None:
            until(lambda: postgres.sql("SELECT sum(n) FROM totals", database=name) == [(total,)], f"{total} facts")

        put("abc")
        until(lambda: "totals" in [each for (each,) in postgres.sql(TABLES, database=name)], "the function was called")
        has_total(3)
        database.back_up()
        put("lost!")
        has_total(8)
        database.restore()
        assert master.wait() == 1
        master.start()
        master.address("HTTP")
        put("d")
        assert worker.wait() == 1
        assert LOST in worker.log
        assert "nothing undoes what was applied" not in worker.log
        assert "undone" not in worker.log
        assert PositionMovedError.__name__ not in worker.log
        worker.start()
        has_total(4)


def test_a_master_ends_after_a_failover_that_has_lost_commits(tmp_path: Path) -> None:
    with PostgresServer(fsync=False) as primary, primary.standby() as standby, ExitStack() as stack:
        url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        shop = Shop(tmp_path, stack, url)

        def cut_off() -> None:
            rows = "SELECT count(*) FROM stream_orders"
            until(lambda: standby.sql(rows) == [(5,)], "the standby has the first facts")
            standby.sql("ALTER SYSTEM SET primary_conninfo = ''")
            standby.sql("SELECT pg_reload_conf()")
            until(lambda: not primary.sql("SELECT pid FROM pg_stat_replication"), "the standby is cut off")

        def fail_over() -> None:
            primary.stop("immediate")
            standby.sql("SELECT pg_promote()")

        loses_commits(shop, cut_off, fail_over, busy=True)
        shop.restart_master(*"new facts")
        are_equal(shop, PostgresDatabase(standby, "postgres"), *"abcde", *"new facts")


@pytest.mark.parametrize("kept", [False, True])
def test_followers_go_back_after_a_failover_that_has_lost_rows_of_plain_sql(tmp_path: Path, kept: bool) -> None:
    """One of them is behind a relay; with ``kept``, the failover has lost a row below one that it has kept."""
    mapping = '[[streams]]\nname = "events"\ntable = "events"\nid_column = "id"\nrow = ["name"]\n'
    with PostgresServer(fsync=False) as primary, primary.standby() as standby, ExitStack() as stack:
        url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        primary.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        (tmp_path / "master.toml").write_text(f'database = "{url}"\n{mapping}')
        master = Daemon(tmp_path, "master", "--config=master.toml")
        wire, http = stack.enter_context(fixed_ports(master))
        near = Daemon(tmp_path, "worker", f"--connect=tcp:{wire}", f"--catch-up=http://{http}", name="near")
        near.options += ("--instance-name=near",)
        wire, http = stack.enter_context(fixed_ports(near))
        far = Daemon(tmp_path, "worker", f"--connect=tcp:{wire}", f"--catch-up=http://{http}", name="far")
        far.options += ("--instance-name=far",)
        stack.enter_context(far)

        def insert(server: PostgresServer, *names: str) -> None:
            for name in names:
                server.sql("INSERT INTO events (name) VALUES (%s)", name)

        def have(*names: str) -> None:
            rows = 'SELECT "row" FROM stream_events ORDER BY stream_id'
            expected: list[tuple[object, ...]] = [(f'["{name}"]',) for name in names]
            for each in (near, far):
                path = tmp_path / f"replication-{each.name}.db"
                until(partial(has, path, rows, expected), f"{path} has {names}")

        insert(primary, *"abc")
        have(*"abc")
        names = ["a", "b", "c"]
        late = stack.enter_context(psycopg.connect(primary.url()))
        if kept:
            late.execute("INSERT INTO events (name) VALUES ('late')")
            insert(primary, "kept")
            names.append("kept")
        rows = "SELECT count(*) FROM events"
        until(lambda: standby.sql(rows) == [(len(names),)], "the standby has the first rows")
        standby.sql("ALTER SYSTEM SET primary_conninfo = ''")
        standby.sql("SELECT pg_reload_conf()")
        until(lambda: not primary.sql("SELECT pid FROM pg_stat_replication"), "the standby is cut off")
        if kept:
            late.commit()
            have(*"abc", "late", "kept")
        else:
            insert(primary, *"lost")
            have(*"abc", *"lost")
        position = "SELECT max(stream_id) FROM stream_positions WHERE stream_name = 'events'"
        until(lambda: primary.sql(position) == primary.sql("SELECT max(id) FROM events"), "the position is stored")
        primary.stop("immediate")
        standby.sql("SELECT pg_promote()")
        assert master.wait() == 1
        assert LOST in master.log
        master.start()
        master.address("the wire")
        insert(standby, *"new rows of it")
        have(*names, *"new rows of it")


def test_a_master_goes_on_after_a_planned_restart_of_postgresql_and_after_a_crash(tmp_path: Path) -> None:
    with PostgresServer() as server, ExitStack() as stack:
        database = PostgresDatabase(server, "postgres")
        shop = Shop(tmp_path, stack, database.url)
        rows = ["a", "b"]
        shop.append(*rows)
        shop.is_at(3, shop.copy, shop.undoing)
        for mode in ("fast", "immediate", "fast"):
            server.restart(mode)
            until(lambda: appended(shop, "more"), "the master appends again")
            rows.append("more")
        before = len(shop.master.log)
        server.stop("fast")
        assert [appended(shop, "lost"), appended(shop, "lost")] == [False, False]
        server.start()
        until(lambda: appended(shop, "more"), "the master appends again")
        are_equal(shop, database, *rows, "more")
        log = shop.master.log[before:]
        assert "the database does not work: " in log
        assert log.count("the database works again") == 1
        assert not shop.master.ended
        assert LOST not in shop.master.log
