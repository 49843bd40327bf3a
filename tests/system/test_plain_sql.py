"""External writers insert into a mapped table. A follower receives each row, and passes no ID before its commit."""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.postgres import find_binaries
from tests.system.daemons import LOCAL, PATIENCE, Daemon, environment, get_json, run_command, until
from tests.system.mapped import MAPPING
from tests.system.test_kills import has, rows_of, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer

WRITER = Path(__file__).with_name("plain_writer.py")
# Stores what it applies under a primary key, so that a fact that is applied twice fails.
APP = """
def register(worker):
    @worker.on("events")
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS seen (token INTEGER, ord INTEGER, row TEXT, "
                          "PRIMARY KEY (token, ord))")
        await txn.executemany("INSERT INTO seen VALUES (?, ?, ?)",
            [(fact.token, n, text) for fact in facts for n, text in enumerate(fact.texts)])
"""


class Follower(threading.Thread):
    """A follower that stores each line with its time. It sends no PING, so the master does not time it out."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(b"REPLICATE events\n")
        self.received: list[tuple[float, str]] = []
        self.start()

    def run(self) -> None:
        with self._socket, self._socket.makefile() as lines:
            for line in lines:
                self.received.append((time.monotonic(), line.rstrip("\n")))

    @property
    def rows(self) -> list[int]:
        """The tokens of all rows."""
        return [int(line.split(" ")[3]) for _, line in self.received if line.startswith("RDATA")]

    @property
    def position(self) -> int:
        """The position after the last line."""
        return max([token for _, token in self.positions()], default=0)

    def positions(self) -> Iterator[tuple[float, int]]:
        """Yield the time of each line, and the position after it."""
        for at, line in self.received:
            words = line.split(" ")
            if words[0] in ("RDATA", "POSITION") and words[3] != "batch":
                yield at, int(words[4] if words[0] == "POSITION" else words[3])


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """Return the URL of a database with a mapped table whose IDs come from a sequence."""
    with postgres.database() as name:
        postgres.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)", database=name)
        yield postgres.url(name)


def start_master(folder: Path, database: str, more: str = "") -> Daemon:
    (folder / "master.toml").write_text(f'database = "{database}"\n{more}{MAPPING}')
    local = [f"--{what}=tcp:0:interface=127.0.0.1" for what in ("listen", "http")]
    return Daemon(folder, "master", "--config=master.toml", *local)


def start_writers(stack: ExitStack, database: str, transactions: int) -> list[subprocess.Popen[str]]:
    """Start six programs with psycopg and two psql."""
    binaries = find_binaries()
    assert binaries is not None
    writers = []
    for seed in range(8):
        how = "psycopg" if seed < 6 else str(binaries / "psql")
        command = [sys.executable, str(WRITER), database, str(seed), str(transactions), how]
        writer = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        stack.callback(writer.communicate)
        stack.callback(writer.kill)
        writers.append(writer)
    return writers


@pytest.mark.parametrize("installed", [True, False], ids=["with the trigger", "without"])
def test_eight_writers_with_plain_sql(
    tmp_path: Path, database: str, request: pytest.FixtureRequest, *, installed: bool
) -> None:
    transactions = 600 if request.config.getoption("--full") else 40
    (tmp_path / "account.py").write_text(APP)
    with ExitStack() as stack:
        master = stack.enter_context(start_master(tmp_path, database))
        wire, http = master.address("the wire"), master.address("HTTP")
        if installed:
            command = ["replication", "streams", "install", "--config=master.toml"]
            assert run_command(*command, folder=tmp_path).returncode == 0
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
        for name, more in (("copy", ()), ("seen", ("--app=account",))):
            stack.enter_context(Daemon(tmp_path, "worker", f"--instance-name={name}", *follow, *more, name=name))
        followers = [Follower(wire)]  # each ends with the master
        until(lambda: any(line.startswith("POSITION") for _, line in followers[0].received), "the master has begun")
        writers = start_writers(stack, database, transactions)
        log: list[tuple[list[int], float | None]] = []  # the IDs of each transaction, and the time of its COMMIT
        until(lambda: len(followers[0].rows) > 100, "more than 100 rows are published")
        followers.append(Follower(wire))  # connects while they write
        for writer in writers:
            output, _ = writer.communicate(timeout=PATIENCE * 8)
            assert writer.returncode == 0
            log += [(ids, at) for ids, at in map(json.loads, output.splitlines())]
        committed = {id_: at for ids, at in log if at is not None for id_ in ids}
        last = max(id_ for ids, _ in log for id_ in ids)
        assert len(log) == 8 * transactions
        assert any(at is None for _, at in log)
        until(lambda: all(follower.position >= last for follower in followers), "each follower has the last position")
        for name, kept in (("copy", "stream_events"), ("seen", "seen")):
            count = f"SELECT count(*) FROM {kept}"
            path = tmp_path / f"replication-{name}.db"
            until(partial(has, path, count, [(len(committed),)]), f"{name} has all rows")
        tokens = [(each,) for each in sorted(committed)]
        assert rows_of(tmp_path / "replication-copy.db", "SELECT stream_id FROM stream_events ORDER BY 1") == tokens
        assert rows_of(tmp_path / "replication-seen.db", "SELECT token FROM seen ORDER BY 1") == tokens
        assert followers[0].rows == sorted(committed)
        first = min(followers[1].rows, default=last + 1)
        assert followers[1].rows == [each for each in sorted(committed) if each >= first]
        order = sorted(committed.items(), key=lambda each: each[1])
        assert [id_ for id_, _ in order] != sorted(committed), "no transaction has committed out of order"
        for follower in followers:
            reached, ascending = 0, deque(sorted(committed.items()))
            for at, position in follower.positions():
                assert position >= reached
                reached = position
                while ascending and ascending[0][0] <= position:
                    id_, asked = ascending.popleft()
                    assert asked <= at, f"at {position} before {id_} was committed"
        until(lambda: get_json(f"http://{http}", "/v1/streams")["streams"][0]["open"] == 0, "nothing is open")
        master.kill()
        for follower in followers:
            follower.join()


def test_appends_over_http_among_external_writers_and_a_bulk(
    tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    """The master never has a bulk that commits at once in its memory: followers fetch it in pages."""
    full = bool(request.config.getoption("--full"))
    appends, transactions, bulk = (20_000, 500, 1_000_000) if full else (1_000, 30, 100_000)
    with ExitStack() as stack:
        master = stack.enter_context(start_master(tmp_path, database))
        wire, http = master.address("the wire"), master.address("HTTP")
        worker = Daemon(tmp_path, "worker", f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
        stack.enter_context(worker)
        until(lambda: "worker1" in str(get_json(f"http://{http}", "/v1/connections")), "the worker follows")
        writers = start_writers(stack, database, transactions)
        appended = subprocess.run(
            ["replication", "append", "events", "-", f"--http=http://{http}"],
            input="".join(f'["appended {number}"]\n' for number in range(appends)),
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        assert len(appended.split()) == appends
        for writer in writers:
            writer.communicate(timeout=PATIENCE * 8)
            assert writer.returncode == 0
        before = memory(master, "VmRSS")
        with psycopg.connect(database) as connection:
            connection.execute("INSERT INTO events (name) SELECT 'bulk' FROM generate_series(1, %s)", [bulk])
        with psycopg.connect(database) as connection:
            rows = connection.execute(
                "SELECT id, 0, 'master', format('[\"%s\"]', name) FROM events ORDER BY 1"
            ).fetchall()
        copy = tmp_path / "replication-worker1.db"
        count = "SELECT count(*) FROM stream_events"
        until(partial(has, copy, count, [(len(rows),)]), "the worker has all rows", PATIENCE * 4)
        assert table(copy, "events") == rows
        assert {id_ for id_, _, _, row in rows if "appended" in row} == {int(each) for each in appended.split()}
        grown = memory(master, "VmHWM") - before
        assert grown < (96 if full else 24) * 2**20, f"the master grew by {grown} bytes"


@pytest.fixture
def limited_url(postgres: PostgresServer, database: str) -> Iterator[str]:
    """Return the URL of that database for a user who has no rights there yet."""
    name = database.rpartition("/")[2]
    postgres.sql("CREATE ROLE modest LOGIN")
    yield postgres.url(name, "modest")
    for each in ("DROP OWNED BY modest CASCADE", "DROP ROLE modest"):
        postgres.sql(each, database=name)


def test_a_user_with_the_rights_that_the_documents_name(
    tmp_path: Path, postgres: PostgresServer, database: str, limited_url: str
) -> None:
    """The rights are enough. ``check`` and the start name each missing right, and the SQL that grants it."""
    name = database.rpartition("/")[2]
    start_master(tmp_path, limited_url)  # writes its configuration

    def run(*command: str) -> str:
        done = run_command(*command, folder=tmp_path)
        return done.stdout + done.stderr

    def check() -> str:
        return run("replication", "streams", "check", "--config=master.toml")

    postgres.sql("GRANT CREATE ON SCHEMA public TO modest", database=name)
    assert "permission denied for table events" in check()
    postgres.sql("GRANT SELECT ON events TO modest", database=name)
    error = check().removeprefix("events: ")
    assert error in run("twistd", "-n", "--pidfile=", "replication", "master", "--config=master.toml", *LOCAL)
    grant = error.partition(" by modest: ")[2]
    assert grant == "GRANT SELECT, UPDATE ON SEQUENCE events_id_seq TO modest\n"
    postgres.sql(grant, database=name)
    assert "of stream" not in check()
    with start_master(tmp_path, limited_url) as master, psycopg.connect(database) as open_one:
        follower, http = Follower(master.address("the wire")), master.address("HTTP")
        until(lambda: follower.position == 1, "the follower has the position of the stream")
        open_one.execute("INSERT INTO events (name) VALUES ('slow')")
        postgres.sql("INSERT INTO events (name) VALUES ('quick')", database=name)
        waits = f"wait for session {open_one.info.backend_pid} of postgres"
        until(lambda: waits in str(get_json(f"http://{http}", "/v1/streams")), "the master names the session")
        assert follower.rows == []
        open_one.commit()
        until(lambda: follower.rows == [2, 3], "both rows are published")
        open_one.execute("INSERT INTO events (name) VALUES ('nothing')")
        open_one.rollback()
        until(lambda: follower.position == 4, "the position passes the rollback")
        append = ("replication", "append", "events", '["appended"]', f"--http=http://{http}", "--retry=0")
        assert "permission denied for table events" in run(*append)
        postgres.sql("GRANT INSERT ON events TO modest", database=name)
        token = int(run(*append))
        until(lambda: follower.rows == [2, 3, token], "the appended fact is published, too")
    follower.join()


def test_another_process_writes_into_the_file(tmp_path: Path) -> None:
    """SQLite has one writer at a time, so all IDs below a visible one are settled."""
    with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as database:
        database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT)")
        database.execute("INSERT INTO events (name) VALUES ('before')")
        with start_master(tmp_path, "sqlite:///app.db") as master:
            wire, http = master.address("the wire"), master.address("HTTP")
            follower = Follower(wire)
            until(lambda: follower.position == 1, "the follower has the position of the stream")
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT INTO events (name) VALUES (?)", [("a",), ("b",)])
            time.sleep(0.2)
            assert follower.rows == []
            database.execute("COMMIT")
            until(lambda: follower.rows == [2, 3], "the rows are published")
            append = ["replication", "append", "events", '["appended"]', f"--http=http://{http}"]
            assert run_command(*append).stdout == "4\n"
            until(lambda: follower.rows == [2, 3, 4], "the appended fact is published")
            database.execute("DELETE FROM events WHERE id > 2")
            database.execute("INSERT INTO events (name) VALUES ('after')")
            until(lambda: follower.rows == [2, 3, 4, 5], "rows of both writers are published in order")
        follower.join()


def memory(daemon: Daemon, which: str) -> int:
    """Return the resident memory of a process in bytes: VmRSS is the current size, VmHWM the largest so far."""
    for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(which)
