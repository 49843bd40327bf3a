"""A master's database is replaced by a backup, emptied or exchanged: followers go back with it, or stop."""

from __future__ import annotations

import socket
import sqlite3
from contextlib import ExitStack, closing, contextmanager
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from replication.bench.cluster import free_ports
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import Daemon, append, fixed_ports, run_command, until
from tests.system.databases import PostgresDatabase, SqliteDatabase
from tests.system.test_kills import has, rows_of, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.system.databases import Database

APP = """
def register(worker):
    @worker.on("orders")
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS seen (token INTEGER PRIMARY KEY, row TEXT)")
        rows = [(each.token, each.texts[0]) for each in facts]
        await txn.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?)", rows)
"""
UNDO = """
    @worker.on_reset("orders")
    async def undo(writer, to, txn):
        await txn.execute("DELETE FROM seen WHERE token > ?", [to])
"""
WRITING_WORKER = """
instance_name = "master"
database = "DATABASE"
writes = ["orders"]
connect = "tcp:127.0.0.1:1"
"""
STOPPED = "Nothing is deleted here"
COPY = "SELECT stream_id, ord, instance_name, row FROM stream_orders ORDER BY 1, 2"
SEEN = "SELECT token, row FROM seen ORDER BY token"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Return a database of each kind."""
    if request.param == "sqlite":
        yield SqliteDatabase(tmp_path)
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as name:
        yield PostgresDatabase(server, name)
        server.sql(f"DROP DATABASE IF EXISTS {name}_backup WITH (FORCE)")


class Shop:
    """A master that appends, a copy, and workers with functions: one can undo what it has applied.

    If ``relayed``, these follow a relay.
    """

    def __init__(
        self, folder: Path, stack: ExitStack, database: str, *, writing_worker: bool = False, relayed: bool = False
    ) -> None:
        self.folder = folder
        (folder / "plain.py").write_text(APP)
        (folder / "undoing.py").write_text(APP + UNDO)
        (folder / "writing.toml").write_text(WRITING_WORKER.replace("DATABASE", database))
        options = ["--config=writing.toml"] if writing_worker else ["--stream=orders", f"--database={database}"]
        self.master = Daemon(folder, "worker" if writing_worker else "master", *options, name="writer")
        wire, self.http = stack.enter_context(fixed_ports(self.master))
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{self.http}")
        if relayed:
            self.relay = Daemon(folder, "worker", "--instance-name=relay", *follow, name="relay")
            wire, http = stack.enter_context(fixed_ports(self.relay))
            follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
        self.copy, self.undoing, self.plain = (
            stack.enter_context(Daemon(folder, "worker", *follow, f"--instance-name={name}", *more, name=name))
            for name, *more in (("copy",), ("undoing", "--app=undoing"), ("plain", "--app=plain"))
        )

    def append(self, *rows: str) -> None:
        """Append a fact for each row."""
        append(self.http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

    def restart_master(self, *rows: str) -> None:
        """Start the master and append."""
        self.master.start()
        self.master.address("HTTP")
        self.append(*rows)

    def file(self, worker: Daemon) -> Path:
        """Return the database of a worker."""
        return self.folder / f"replication-{worker.name}.db"

    def is_at(self, token: int, *workers: Daemon) -> None:
        """Wait until workers have stored this position."""
        sql = "SELECT stream_id FROM stream_positions WHERE stream_name = 'orders' AND instance_name = 'master'"
        for each in workers:
            until(lambda each=each: has(self.file(each), sql, [(token,)]), f"{each.name} is at {token}")  # type: ignore[misc]

    def stop_followers(self) -> None:
        """Kill all followers."""
        for each in (self.copy, self.undoing, self.plain):
            each.kill()


@pytest.mark.parametrize("new", [8, 2])
def test_a_restored_master_is_followed_from_the_end_of_the_backup(tmp_path: Path, database: Database, new: int) -> None:
    """At 11; the backup ends at 6; new facts reach 14, or only 8, before the followers connect."""
    with ExitStack() as stack:
        shop = Shop(tmp_path, stack, database.url)
        shop.append(*"abcde")
        shop.is_at(6, shop.copy, shop.undoing, shop.plain)
        database.back_up()
        shop.append(*"lost!")
        shop.is_at(11, shop.copy, shop.undoing, shop.plain)
        shop.stop_followers()
        shop.master.kill()
        database.restore()
        shop.restart_master(*(f"new {number}" for number in range(new)))
        rows = database.rows()
        assert [row for *_, row in rows] == [*(f'"{each}"' for each in "abcde"), *(f'"new {n}"' for n in range(new))]
        for each in (shop.copy, shop.undoing, shop.plain):
            each.start()
        shop.is_at(6 + new, shop.copy, shop.undoing)
        assert table(shop.file(shop.copy), "orders") == rows
        assert rows_of(shop.file(shop.undoing), SEEN) == [(token, row) for token, _, _, row in rows]
        until(lambda: "register a function with @worker.on_reset('orders')" in shop.plain.log, "the stream stops")
        shop.is_at(11, shop.plain)
        shop.plain.kill()
        shop.plain.options += ("--accept-new-history",)
        shop.plain.start()
        shop.is_at(6 + new, shop.plain)


def test_a_former_writer_has_lost_facts_and_its_position_was_raised_beyond_them(
    tmp_path: Path, database: Database
) -> None:
    """Its copy was kept at 10 by a position of 12, and refused the new facts, which have the IDs of the lost ones."""
    wire, port = free_ports(2)
    http, file = f"127.0.0.1:{port}", tmp_path / "replication-copy.db"

    def writer(name: str) -> Daemon:
        own = [f"--listen=tcp:{wire}:interface=127.0.0.1", f"--http=tcp:{port}:interface=127.0.0.1"]
        options = [f"--instance-name={name}", "--stream=orders", f"--database={database.url}", *own]
        return Daemon(tmp_path, "master", *options, name=name)

    def write(daemon: Daemon, *rows: str) -> None:
        daemon.address("HTTP")
        append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

    def followed() -> bool:
        sql = 'SELECT stream_id, ord, instance_name, row FROM "stream_orders" ORDER BY 1, 2'
        return has(file, sql, database.rows())

    anna, ben = writer("anna"), writer("ben")
    follow = [f"--connect=tcp:127.0.0.1:{wire}", "--instance-name=copy"]
    with Daemon(tmp_path, "worker", *follow, name="copy") as copy:
        for daemon, row in ((ben, "b1"), (anna, "a1"), (ben, "b2")):
            with daemon:
                write(daemon, row, row)
        with anna:
            write(anna, "a2")
            until(followed, "the copy has all")
            database.back_up()
            write(anna, "lost 1", "lost 2")
            until(followed, "the copy has what will be lost")
            known = "SELECT count(*) FROM stream_histories WHERE instance_name = 'anna' AND stream_name = 'orders'"
            until(lambda: has(file, known, [(1,)]), "the copy knows the history")  # from anna, while it runs
        copy.kill()
        database.restore()
        with ben:
            write(ben, "b3", "b4", "b5")
            with socket.create_connection(("127.0.0.1", wire)) as other:
                other.sendall(b"REPLICATE orders\n")
                lines = other.makefile("rb")
                until(lambda: lines.readline() == b"POSITION orders anna 8 11\n", "the position is raised")
                lines.close()
            copy.start()
            until(followed, "the copy goes back", 30)
        with anna:
            write(anna, "a3")
            until(followed, "the copy follows", 30)
        assert copy.log.count("went back") == 1


def test_a_relay_notices_that_the_position_of_a_former_writer_is_raised_beyond_lost_facts(
    tmp_path: Path, database: Database
) -> None:
    """It stayed connected meanwhile: a copy that connected to it later kept the lost facts, and refused new ones."""
    wire, port = free_ports(2)
    own = (f"--listen=tcp:{wire}:interface=127.0.0.1", f"--http=tcp:{port}:interface=127.0.0.1")
    anna, ben = (
        Daemon(tmp_path, "master", f"--instance-name={name}", "--stream=orders", f"--database={database.url}", *own)
        for name in ("anna", "ben")
    )
    relay = Daemon(tmp_path, "worker", "--instance-name=relay", f"--connect=tcp:127.0.0.1:{wire}", name="relay")

    def write(daemon: Daemon, *rows: str) -> None:
        daemon.address("HTTP")
        append(f"127.0.0.1:{port}", "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

    def followed(name: str) -> bool:
        return has(tmp_path / f"replication-{name}.db", COPY, database.rows())

    with ben:
        write(ben, "b1")
    with ExitStack() as stack:
        below, _ = stack.enter_context(fixed_ports(relay))
        copy = Daemon(tmp_path, "worker", "--instance-name=copy", f"--connect=tcp:{below}", name="copy")
        stack.enter_context(copy)
        with anna:
            write(anna, "a1")
            until(lambda: followed("copy"), "the copy has all")
            database.back_up()
            write(anna, "lost 1", "lost 2")
            until(lambda: followed("copy"), "the copy has what will be lost")
            known = "SELECT count(*) FROM stream_histories WHERE instance_name = 'anna' AND stream_name = 'orders'"
            until(lambda: has(tmp_path / "replication-copy.db", known, [(1,)]), "the copy knows the history")
        copy.kill()
        database.restore()
        with ben:
            write(ben, "b2", "b3", "b4")
            raised = "SELECT stream_id FROM stream_positions WHERE instance_name = 'anna' AND stream_name = 'orders'"
            (newest,) = database.rows()[-1:]
            until(lambda: has(tmp_path / "replication-relay.db", raised, [newest[:1]]), "the position is raised")
            copy.start()
            until(lambda: followed("copy"), "the copy goes back", 30)


@contextmanager
def passed_by_another_writer(
    folder: Path, database: PostgresDatabase, app: str, *options: str, row: str, followed: Callable[[], bool]
) -> Iterator[Daemon]:
    """Restore the writers a and b of a stream: b writes the lost IDs of a again, then a and the worker ``app`` start.

    ``options`` are those of a writer; ``row`` has ``{}`` for its text.
    """
    with ExitStack() as stack:
        stack.callback(database.server.sql, f"DROP DATABASE IF EXISTS {database.backup} WITH (FORCE)")
        writers = {each: Daemon(folder, "master", f"--instance-name={each}", *options, name=each) for each in "ab"}
        at = {each: stack.enter_context(fixed_ports(daemon)) for each, daemon in writers.items()}
        follow = [f"--connect=tcp:{wire}" for wire, _ in at.values()]
        worker = Daemon(folder, "worker", f"--instance-name={app}", *follow, f"--app={app}", name=app)
        stack.enter_context(worker)

        def write(writer: str, *texts: str) -> None:
            writers[writer].address("HTTP")
            append(at[writer][1], database.stream, [Fact(Token(0), (row.format(f'"{each}"'),)) for each in texts])

        write("a", "a1", "a2")
        write("b", "b1")
        until(followed, "all is applied")
        database.back_up()
        write("a", "lost 1", "lost 2")
        until(followed, "what will be lost is applied")
        for each in (worker, *writers.values()):
            each.kill()
        database.restore()
        writers["b"].start()
        write("b", *"new facts of b")
        writers["a"].start()
        write("a", "a3")
        worker.start()
        yield worker


def test_a_function_goes_back_where_another_writer_was_started_first_after_a_restore(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """The other one passes the lost IDs, and the function was started since: it kept the lost facts, and no error."""
    app = """
    def register(worker):
        @worker.on("orders")
        async def apply(facts, txn):
            await txn.execute("CREATE TABLE IF NOT EXISTS seen (token INTEGER, writer TEXT, row TEXT)")
            rows = [(each.token, txn.writer, each.texts[0]) for each in facts]
            await txn.executemany("INSERT INTO seen VALUES (?, ?, ?)", rows)

        @worker.on_reset("orders")
        async def undo(writer, to, txn):
            await txn.execute("DELETE FROM seen WHERE writer = ? AND token > ?", [writer, to])
    """
    (tmp_path / "seeing.py").write_text(dedent(app))
    with postgres.database() as name:
        database = PostgresDatabase(postgres, name)

        def followed() -> bool:
            rows: list[tuple[object, ...]] = [(token, writer, row) for token, _, writer, row in database.rows()]
            return has(tmp_path / "replication-seeing.db", "SELECT token, writer, row FROM seen ORDER BY token", rows)

        options = ("--stream=orders", f"--database={database.url}")
        with passed_by_another_writer(tmp_path, database, "seeing", *options, row="{}", followed=followed):
            until(followed, "the function goes back", 30)


def test_the_database_of_a_worker_that_writes_is_restored(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path)
    with ExitStack() as stack:
        shop = Shop(tmp_path, stack, database.url, writing_worker=True)
        shop.append(*"abcde")
        shop.is_at(6, shop.copy)
        database.back_up()
        shop.append(*"lost!")
        shop.is_at(11, shop.copy)
        shop.master.kill()
        database.restore()
        shop.restart_master(*"new facts")
        shop.is_at(15, shop.copy)
        assert table(shop.file(shop.copy), "orders") == database.rows()


def test_an_emptied_database_deletes_no_copy_unless_that_is_accepted(tmp_path: Path) -> None:
    """The copy also outlives an exchanged database, and goes on when the right one is back."""
    database = SqliteDatabase(tmp_path)
    with ExitStack() as stack:
        shop = Shop(tmp_path, stack, database.url)
        shop.append(*"abcde")
        shop.is_at(6, shop.copy)
        database.back_up()
        before = database.rows()
        for number, others in enumerate(["x", "other facts"]):
            shop.master.kill()
            database.empty()
            stops = shop.copy.log.count(STOPPED)
            shop.restart_master(*others)
            until(lambda stops=stops: shop.copy.log.count(STOPPED) > stops, "the stream stops")  # type: ignore[misc]
            assert table(shop.file(shop.copy), "orders") == before
            shop.master.kill()
            database.restore()
            shop.restart_master(f"more {number}")
            before = database.rows()
            until(lambda before=before: table(shop.file(shop.copy), "orders") == before, "it goes on")  # type: ignore[misc]
        shop.copy.kill()
        shop.master.kill()
        database.empty()
        shop.restart_master(*"other")
        shop.copy.options += ("--accept-new-history",)
        shop.copy.start()
        until(lambda: table(shop.file(shop.copy), "orders") == database.rows(), "the copy begins anew")


def test_a_follower_notices_a_restore_although_its_source_is_a_copy_that_has_not(tmp_path: Path) -> None:
    """The copy does not reach the restored master; the follower does."""
    database = SqliteDatabase(tmp_path)
    master = Daemon(tmp_path, "master", "--stream=orders", f"--database={database.url}", name="writer")
    copy = Daemon(tmp_path, "worker", "--instance-name=copy", name="copy")
    with fixed_ports(master) as (wire, http), ExitStack() as stack:
        here, nowhere = f"--connect=tcp:{wire}", "--connect=tcp:127.0.0.1:1"
        copy.options += (f"--catch-up=http://{http}", here)
        _, source = stack.enter_context(fixed_ports(copy))
        options = (here, f"--catch-up=http://{source}", "--instance-name=follower")
        follower = stack.enter_context(Daemon(tmp_path, "worker", *options, name="follower"))
        files = [tmp_path / f"replication-{each.name}.db" for each in (copy, follower)]

        def add(*rows: str) -> None:
            append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

        def both_have_all() -> bool:
            rows, known = database.rows(), "SELECT count(*) FROM stream_histories WHERE stream_name = 'orders'"
            return all(has(each, COPY, rows) and has(each, known, [(1,)]) for each in files)

        add(*"abcde")
        until(both_have_all, "both have the first facts, and know the history")
        database.back_up()
        add(*"lost!")
        until(both_have_all, "both have facts that will be lost")
        for each in (follower, copy, master):
            each.kill()
        database.restore()
        master.start()
        master.address("HTTP")
        add(*"other")
        copy.options = tuple(nowhere if each == here else each for each in copy.options)
        copy.start()
        copy.address("HTTP")
        follower.start()
        until(lambda: table(files[1], "orders") == database.backup_rows(), "the follower goes back")
        copy.kill()
        copy.options = tuple(here if each == nowhere else each for each in copy.options)
        copy.start()
        until(both_have_all, "both have the new facts")


def test_a_new_follower_takes_no_lost_facts_from_segments_while_the_writer_does_not_answer(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    database = SqliteDatabase(tmp_path)
    master = Daemon(tmp_path, "master", "--stream=orders", f"--database={database.url}", name="writer")
    with fixed_ports(master) as (wire, http), ExitStack() as stack:
        for rows in ("abcde", "lost!"):
            append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])
            if not database.backup.exists():
                database.back_up()

        stored = "SELECT stream_id FROM stream_positions WHERE stream_name = 'orders'"
        until(lambda: has(database.file, stored, [(11,)]), "the position is stored")
        command = ("replication", "replay", f"--database={database.url}", "--out=segments", "--master=none")
        assert run_command(*command, folder=tmp_path).returncode == 0
        master.kill()
        database.restore()
        master.start()
        master.address("HTTP")
        append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in "new facts"])
        (later,) = free_ports(1)
        own = f'[writers.master]\nconnect = "tcp:{wire}"\nhttp = "http://127.0.0.1:{later}"\n'
        (tmp_path / "worker.toml").write_text(f'instance_name = "new"\ncatch_up = ["segments"]\n{own}')
        stack.enter_context(Daemon(tmp_path, "worker", "--config=worker.toml"))
        count = "SELECT count(*) FROM stream_orders"
        until(lambda: has(tmp_path / "replication-new.db", count, [(5,)]), "it has what both have")
        assert {*table(tmp_path / "replication-new.db", "orders")} < {*database.rows()}
        master.kill()
        master.options += (f"--http=tcp:{later}:interface=127.0.0.1",)
        master.start()
        until(lambda: table(tmp_path / "replication-new.db", "orders") == database.rows(), "it has what the master has")


def test_the_history_of_a_database_that_is_older_than_a_restore_is_not_used(tmp_path: Path) -> None:
    """While the writer's HTTP was closed, the follower kept the lost facts in place of the new ones."""
    database = SqliteDatabase(tmp_path)
    master = Daemon(tmp_path, "master", "--stream=orders", f"--database={database.url}", name="writer")
    copied = tmp_path / "replication-copy.db"
    known = "SELECT count(*) FROM stream_histories WHERE stream_name = 'orders'"

    def add(*rows: str) -> None:
        append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

    with fixed_ports(master) as (wire, http), ExitStack() as stack:
        add(*"abcde")
        database.back_up()
        add(*"lost!")
        with closing(sqlite3.connect(database.file)) as connection:
            connection.execute("VACUUM INTO ?", [str(tmp_path / "older.db")])
        (later,) = free_ports(1)
        own = f'[writers.master]\nconnect = "tcp:{wire}"\nhttp = "http://127.0.0.1:{later}"\n'
        (tmp_path / "worker.toml").write_text(f'instance_name = "copy"\ncatch_up = ["sqlite:///older.db"]\n{own}')
        worker = stack.enter_context(Daemon(tmp_path, "worker", "--config=worker.toml", name="copy"))
        until(lambda: has(copied, known, [(1,)]), "the history is learned from the database")
        until(lambda: table(copied, "orders") == database.rows(), "the follower has all facts")
        worker.kill()
        master.kill()
        database.restore()
        master.start()
        master.address("HTTP")
        add(*"other")
        worker.start()
        until(lambda: {*table(copied, "orders")} <= {*database.rows()}, "the lost facts are gone, without any HTTP")
        master.kill()
        master.options += (f"--http=tcp:{later}:interface=127.0.0.1",)
        master.start()
        until(lambda: table(copied, "orders") == database.rows(), "the follower goes back")
