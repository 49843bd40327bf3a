"""A master and a worker over a real PostgreSQL that fails in each of several ways.

Each fact is committed and published, or neither. The daemons stay up, and ``/health`` names the fault. After the fault,
both work again without a restart.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.system.daemons import Daemon, environment, get_json, until
from tests.system.databases import limit_files
from tests.system.peers import ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

LOOPBACK = "tcp:0:interface=127.0.0.1"
TABLE = "SELECT stream_id, ord, instance_name, row FROM stream_events ORDER BY 1, 2"
SESSIONS = "FROM pg_stat_activity WHERE datname = %s AND application_name LIKE 'replication %%'"


class Pair:
    """A master on a database of its own, and a worker that keeps a copy in another one of the same server."""

    def __init__(self, stack: ExitStack, folder: Path, server: PostgresServer) -> None:
        self.server = server
        self.here, self.copy = (stack.enter_context(server.database()) for _ in range(2))
        self.master = stack.enter_context(
            Daemon(
                folder,
                "master",
                "--stream=events",
                f"--database={server.url(self.here)}",
                f"--listen={LOOPBACK}",
                f"--http={LOOPBACK}",
            )
        )
        self.http = f"http://{self.master.address('HTTP')}"
        self.worker = stack.enter_context(
            Daemon(
                folder,
                "worker",
                f"--connect=tcp:{self.master.address('the wire')}",
                f"--catch-up={self.http}",
                f"--database={server.url(self.copy)}",
                f"--http={LOOPBACK}",
            )
        )
        self.worker_http = f"http://{self.worker.address('HTTP')}"
        self.append(0)
        table = "SELECT true WHERE to_regclass('stream_events') IS NOT NULL"
        until(lambda: server.sql(table, database=self.copy), "the worker has begun its copy")

    def append(self, number: int) -> tuple[int, str]:
        """Append a fact of one row; return the status and the body of the answer."""
        status, body = ask(
            f"{self.http}/v1/streams/events/facts",
            b'{"rows":[%d]}' % number,
            {"Content-Type": "application/json"},
        )
        return status, str(body)

    def health(self) -> tuple[int, str]:
        """Return the answer of the master's ``/health``."""
        return self.probe("/health")

    def probe(self, path: str) -> tuple[int, str]:
        """Return the answer of one of the master's probes."""
        status, body = ask(f"{self.http}{path}")
        return status, str(body)

    def sql(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run SQL in the master's database."""
        return self.server.sql(sql, *parameters, database=self.here)

    def sessions(self, database: str = "") -> list[int]:
        """Return the server's processes that serve the master, or the sessions of another database."""
        return [pid for (pid,) in self.server.sql(f"SELECT pid {SESSIONS}", database or self.here)]

    def end_sessions(self) -> None:
        """Let the master begin new sessions, which have the current settings."""
        self.server.end_sessions(SESSIONS, self.here)

    def configure(self, setting: str, value: str) -> None:
        """Change a setting of new sessions, and let the master begin new ones."""
        self.server.sql(f"ALTER DATABASE {self.here} {setting} {value}")
        self.end_sessions()

    def goes_on(self, number: int) -> None:
        """Check that the next append works, that no ID stays open, and that the worker has each committed fact."""
        assert until(lambda: self.append(number)[0] == 200, "an append works again")
        assert until(lambda: self.health()[0] == 200, "it is healthy again")
        until(lambda: self.waiting() == (0, 0), "no ID is open, and all are published")
        until(
            lambda: self.server.sql(TABLE, database=self.copy) == self.sql(TABLE), "the copy has just what is committed"
        )
        until(lambda: ask(f"{self.worker_http}/health")[0] == 200, "the worker is healthy, too")
        assert (self.master.starts, self.worker.starts) == (1, 1)

    def waiting(self) -> tuple[int, int]:
        """Return the number of open IDs at the master, and of settled IDs that are not published."""
        stream = get_json(self.http, "/v1/streams/events")
        return stream["open"], stream["writers"][0]["lag"]

    def rows(self) -> set[int]:
        """Return the rows that the worker has."""
        return {int(row) for *_, row in self.server.sql(TABLE, database=self.copy)}


@pytest.fixture
def pair(tmp_path: Path, postgres: PostgresServer) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, tmp_path, postgres)


# ---- faults; each lasts while its block runs


@contextmanager
def server_away(pair: Pair) -> Iterator[None]:
    pair.server.stop("immediate")
    try:
        yield
    finally:
        pair.server.start()


@contextmanager
def read_only(pair: Pair) -> Iterator[None]:
    pair.configure("SET", "default_transaction_read_only = on")
    yield
    pair.configure("RESET", "default_transaction_read_only")


@contextmanager
def no_session_left(pair: Pair) -> Iterator[None]:
    """Other clients have all connections that the server allows."""
    taken: list[psycopg.Connection] = []
    with ExitStack() as stack:
        until(lambda: take_all(pair, taken, stack), "all connections are taken")
        yield


def take_all(pair: Pair, taken: list[psycopg.Connection], stack: ExitStack) -> bool:
    """End the master's sessions, and open sessions until the server refuses; return whether the master has none."""
    if not taken:
        pair.end_sessions()
    try:
        while True:
            taken.append(stack.enter_context(psycopg.connect(pair.server.url(), autocommit=True)))
    except psycopg.OperationalError:
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        return not taken[0].execute(end, (pair.here,)).fetchall()


@contextmanager
def statements_time_out(pair: Pair) -> Iterator[None]:
    """Another session has a lock on the table, and a statement may wait for 1 s."""
    pair.configure("SET", "statement_timeout = '1s'")
    with psycopg.connect(pair.server.url(pair.here), options="-c statement_timeout=0") as holder:
        holder.execute("LOCK TABLE stream_events IN EXCLUSIVE MODE")
        yield
    pair.configure("RESET", "statement_timeout")


@contextmanager
def disk_full(pair: Pair) -> Iterator[None]:
    """No file of the server may grow beyond 16 MiB, and the table is larger."""
    pair.sql("INSERT INTO stream_events SELECT -n, 0, 'filler', '7' FROM generate_series(1, 330000) n")
    ((size,),) = pair.sql("SELECT pg_relation_size('stream_events')")
    assert size > 2**24
    postmaster = int((pair.server.folder / "data/postmaster.pid").read_text().split()[0])
    limited = [postmaster, *pair.sessions()]
    limit_files(pair.server, limited, f"{2**24}:")
    try:
        yield
    finally:
        limit_files(pair.server, limited, "unlimited:")
        pair.end_sessions()  # the sessions of the fault have the limit, too
        pair.sql("DELETE FROM stream_events WHERE instance_name = 'filler'")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (server_away, "start the server"),
        (read_only, "takes no writes"),
        (no_session_left, "raise max_connections"),
        (statements_time_out, "raise the timeout"),
        (disk_full, "No space left|File too large|make room"),
    ],
)
def test_f14_an_append_that_fails_is_neither_committed_nor_sent_and_later_appends_work(
    pair: Pair, fault: Callable[[Pair], Any], words: str
) -> None:
    pair.goes_on(1)
    with fault(pair):
        failed = until(lambda: (answer := pair.append(2))[0] != 200 and answer, "an append fails")
        assert failed[0] == 503
        assert any(each in failed[1] for each in words.split("|")), failed
        until(lambda: pair.health()[0] == 503, "/health answers 503")
        for path in ("/health", "/health/ready"):
            status, why = pair.probe(path)
            assert (status, any(each in why for each in words.split("|"))) == (503, True), why
        assert pair.probe("/health/live")[0] == 200
    pair.goes_on(3)
    assert pair.rows() == {0, 1, 3}


def test_f14_a_server_that_stops_while_a_master_starts_is_waited_for(tmp_path: Path, postgres: PostgresServer) -> None:
    """The start waits for a lock when the server ends; the master goes on by itself when the server is back."""
    with postgres.database() as name:
        database = postgres.url(name)
        options = ("--stream=events", f"--database={database}", f"--listen={LOOPBACK}", f"--http={LOOPBACK}")
        with Daemon(tmp_path, "master", *options) as master:
            master.address("HTTP")
            assert master.terminate() == 0
            holder = psycopg.connect(postgres.url(name))
            holder.execute("LOCK TABLE stream_events IN ACCESS EXCLUSIVE MODE")
            master.start()
            blocked = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"
            until(lambda: postgres.sql(blocked, name), "the start waits for the lock")
            postgres.stop("immediate")
            holder.close()
            try:
                until(lambda: "the start waits: " in master.log or master.ended, "the log has the reason")
                waits = next(line for line in master.log.splitlines() if "the start waits: " in line)
                assert f"{name}'" in waits
                assert "next attempt in 2 s" in waits
                http = f"http://{master.address('HTTP')}"
                assert ask(f"{http}/health/live")[0] == 200
                assert ask(f"{http}/health/ready")[0] == 503
            finally:
                postgres.start()
            until(lambda: ask(f"{http}/health/ready")[0] == 200, "it is ready")
            append = ask(f"{http}/v1/streams/events/facts", b'{"rows":[1]}', {"Content-Type": "application/json"})
            assert append[0] == 200
            assert master.starts == 2


def test_f14_a_server_that_sends_nothing_is_waited_for_and_health_does_not_wait(pair: Pair) -> None:
    """The server's processes are stopped by SIGSTOP; after SIGCONT the append is answered."""
    outcome: list[tuple[int, str]] = []
    append = Thread(target=lambda: outcome.append(pair.append(1)))
    frozen = pair.sessions()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        append.start()
        status, why = pair.health()
        assert (status, "has not answered" in why) == (503, True)
        assert outcome == []
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    append.join()
    assert outcome[0][0] == 200
    pair.goes_on(2)
    assert pair.rows() == {0, 1, 2}


def test_f14_sigterm_ends_processes_whose_server_sends_nothing(pair: Pair) -> None:
    """A supervisor need not kill them; what the master has not acknowledged may be lost."""
    append = Thread(target=lambda: pair.append(1))
    frozen = [*pair.sessions(), *pair.sessions(pair.copy)]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        append.start()
        until(lambda: pair.health()[0] == 503, "the master is not healthy")
        assert (pair.worker.terminate(), pair.master.terminate()) == (0, 0)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    append.join()


def test_f10_what_was_committed_when_the_connection_broke_is_found_out_and_sent(pair: Pair) -> None:
    """The server ends the session after the commit is on its disk, and before it answers."""
    outcome: list[tuple[int, str]] = []
    append = Thread(target=lambda: outcome.append(pair.append(1)))
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()"
    with no_standby(pair.server):
        append.start()
        ((pid,), *_) = until(lambda: pair.sql(waiting), "the commit waits for a standby")
        pair.server.sql("SELECT pg_terminate_backend(%s)", pid)
        until(lambda: (pid,) not in pair.sql(waiting), "the session has ended")
    append.join()
    assert outcome[0][0] == 200
    pair.goes_on(2)
    assert pair.rows() == {0, 1, 2}


@contextmanager
def no_standby(server: PostgresServer) -> Iterator[None]:
    """Let each COMMIT wait, after it is on the disk, for a standby that does not exist."""
    server.sql("ALTER SYSTEM SET synchronous_standby_names = 'missing'")
    server.sql("SELECT pg_reload_conf()")
    until(lambda: server.sql("SHOW synchronous_standby_names") == [("missing",)], "the server has read it")
    try:
        yield
    finally:
        server.sql("ALTER SYSTEM RESET synchronous_standby_names")
        server.sql("SELECT pg_reload_conf()")


def test_f14_a_server_that_is_killed_again_and_again_loses_and_doubles_nothing(
    pair: Pair, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills, facts = (20, 60_000) if request.config.getoption("--full") else (4, 4_000)
    command = ["replication", "append", "events", "-", "--http", pair.http, "--retry", "120"]
    with (tmp_path / "ids").open("w") as ids:
        append = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=ids, text=True, env=environment())
    assert append.stdin is not None
    for turn in range(kills):
        append.stdin.writelines(f"{number}\n" for number in range(1, facts) if number % kills == turn)
        append.stdin.flush()
        pair.server.restart(("immediate", "fast")[turn % 2])
    append.communicate()
    assert append.returncode == 0
    tokens = [int(line) for line in (tmp_path / "ids").read_text().split()]
    assert len(tokens) == len(set(tokens)) == facts - 1
    pair.goes_on(facts)
    assert sorted(int(row) for *_, row in pair.sql(TABLE)) == [*range(facts + 1)]
    assert set(tokens) < {token for token, *_ in pair.sql(TABLE)}
