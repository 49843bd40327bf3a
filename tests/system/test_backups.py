"""Backups that are made while a writer commits: each has whole transactions, up to one point (docs/how-to/back-up.md).

That followers notice the restore of a backup is tested in test_restores.py and test_running_restores.py.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing, contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from replication.storage import open_store
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.history import Epoch
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.postgres import PostgresServer, find_binaries
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from replication.streams.interfaces import ISqlExecutor

ORDERS, MASTER = StreamName("orders"), InstanceName("master")
HISTORY = [Epoch("a", Token(1), Token(1))]
BEFORE, AFTER = 50, 20  # facts: committed before the backup begins, and after it has ended


@contextmanager
def committing(url: str) -> Iterator[Callable[[int], None]]:
    """Commit facts, each with a row of the application, until the block ends; yield what waits for a number of them."""
    ended, changed, count = Event(), Event(), [1]

    def commit() -> None:
        pump = Pump()
        store = open_store(url, pump)
        pump.wait(store.open())
        pump.wait(store.declare(StreamDefinition(ORDERS)))
        pump.wait(store.store_histories(MASTER, {ORDERS: HISTORY}))
        create = store.transaction()
        pump.wait(create.execute("CREATE TABLE shop (id BIGINT PRIMARY KEY)"))
        pump.wait(create.commit([]))
        while not ended.is_set():
            token = Token(count[0] + 1)
            transaction = store.transaction()
            pump.wait(transaction.execute(f"INSERT INTO shop VALUES ({token})"))
            pump.wait(transaction.commit([Write(ORDERS, MASTER, token, [Fact(token, (f"[{token}]", "[]"))])]))
            count[0] = token
            changed.set()
        pump.wait(store.close())

    def wait_for(more: int) -> None:
        target = count[0] + more
        while count[0] < target:
            changed.clear()
            assert changed.wait(30.0), "the writer does not commit"

    thread = Thread(target=commit)
    thread.start()
    try:
        yield wait_for
    finally:
        ended.set()
        thread.join()


def check(url: str) -> None:
    """Check that a database has the facts up to one token, all of them, and what was committed with them."""
    pump = Pump()
    store = open_store(url, pump)
    pump.wait(store.open())
    pump.wait(store.declare(StreamDefinition(ORDERS)))
    reached = pump.wait(store.positions(ORDERS))[MASTER]
    page = pump.wait(store.facts(ORDERS, MASTER, after=Token(0), upto=Token(10**9), limit=10**6))

    def shop(database: ISqlExecutor) -> list[int]:
        return [each for (each,) in database.execute("SELECT id FROM shop ORDER BY id")]

    assert reached > BEFORE
    assert [*page.facts] == [Fact(Token(each), (f"[{each}]", "[]")) for each in range(2, reached + 1)]
    assert pump.wait(store.read(shop)) == [*range(2, reached + 1)]
    assert [*pump.wait(store.history(ORDERS, MASTER))] == HISTORY
    pump.wait(store.close())


def back_up(source: sqlite3.Connection, target: Path) -> None:
    with closing(sqlite3.connect(target)) as copy:
        source.backup(copy, pages=5, sleep=0.001)


def vacuum(source: sqlite3.Connection, target: Path) -> None:
    source.execute("VACUUM INTO ?", (str(target),))


@pytest.mark.parametrize("make", [back_up, vacuum])
def test_a_backup_of_sqlite_is_whole(tmp_path: Path, make: Callable[[sqlite3.Connection, Path], None]) -> None:
    file, backup = tmp_path / "shop.db", tmp_path / "backup.db"
    with committing(f"sqlite:///{file}") as wait_for:
        wait_for(BEFORE)
        with closing(sqlite3.connect(file, timeout=30.0)) as source:
            make(source, backup)
        wait_for(AFTER)
    check(f"sqlite:///{backup}")


def run(program: str, *arguments: str) -> None:
    binaries = find_binaries()
    assert binaries is not None
    subprocess.run([str(binaries / program), *arguments], check=True, capture_output=True)


def test_a_dump_of_postgresql_is_whole(postgres: PostgresServer, tmp_path: Path) -> None:
    with postgres.database() as database, postgres.database() as other:
        with committing(postgres.url(database)) as wait_for:
            wait_for(BEFORE)
            run("pg_dump", f"--dbname={postgres.url(database)}", "--format=custom", f"--file={tmp_path}/dump")
            wait_for(AFTER)
        run("pg_restore", f"--dbname={postgres.url(other)}", "--exit-on-error", f"{tmp_path}/dump")
        check(postgres.url(other))


def test_a_base_backup_of_postgresql_is_whole(postgres: PostgresServer, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with postgres.database() as database, PostgresServer(fsync=False) as other:
        with committing(postgres.url(database)) as wait_for:
            wait_for(BEFORE)
            place = ["--host=127.0.0.1", f"--port={postgres.port}", "--username=postgres"]
            run("pg_basebackup", *place, f"--pgdata={copy}", "--checkpoint=fast")
            wait_for(AFTER)
        data = other.folder / "data"
        settings, owner = (data / "postgresql.conf").read_text(), data.stat()
        other.stop()
        shutil.rmtree(data)
        shutil.move(copy, data)
        (data / "postgresql.conf").write_text(settings)
        for each in (data, *data.rglob("*")):
            os.chown(each, owner.st_uid, owner.st_gid)
        other.start()
        check(other.url(database))
