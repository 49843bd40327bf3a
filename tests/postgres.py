"""A real PostgreSQL of our own for tests: made in a temporary folder, and killed at will.

``tests/conftest.py`` has the fixture, so any test may ask for ``postgres``; a test's database is one of
``postgres.database()``.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

import pytest

from replication.bench.cluster import CURE, Cluster, find_binaries, free_ports
from tests.system.daemons import until

__all__ = ["HOW_TO_GET_IT", "PostgresServer", "find_binaries", "postgres"]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PGBOUNCER = "PgBouncer is missing: apt install pgbouncer (Debian, Ubuntu), or brew install pgbouncer"
HOW_TO_GET_IT = f"PostgreSQL is missing: {CURE}"


def _listens(port: int) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@cache
def data_directory() -> Path:
    """Make a data directory, of which each server of this process has a copy: initdb takes ten times the CPU time."""

    class Unstarted(Cluster):
        def start(self) -> None: ...

    folder = Unstarted().folder
    (folder / "data/postgresql.conf").write_text("")
    atexit.register(shutil.rmtree, folder)
    return folder / "data"


def copy_data_directory(server: Cluster) -> None:
    """Make a server's data directory."""
    subprocess.run(["cp", "-R", data_directory(), server.folder], check=True, **server._as)


class PostgresServer(Cluster):
    """A server, and databases for tests.

    Without ``fsync``, commits survive each kill of the server, but not of the machine. That is faster, and enough for
    most tests.
    """

    def __init__(self, *, fsync: bool = True, **settings: str) -> None:
        self._names = count(1)
        self._used: list[str] = []  # databases whose tests have ended
        super().__init__(
            fsync="on" if fsync else "off",
            max_connections=60,
            log_line_prefix="%t %p %a ",
            password_encryption="scram-sha-256",  # PostgreSQL 13 has another default
            deadlock_timeout="50ms",  # seconds pass before the default looks
            **settings,
        )

    def start(self) -> None:
        """Start the server. Its role ``locked`` needs a password, for tests with wrong passwords."""
        access = self.folder / "data/pg_hba.conf"
        if "locked" not in access.read_text():
            access.write_text(f"host all locked 127.0.0.1/32 scram-sha-256\n{access.read_text()}")
        super().start()

    def restart(self, mode: str = "fast") -> None:
        """Stop it and start it again."""
        self.stop(mode)
        self.start()

    def _create(self) -> None:
        copy_data_directory(self)

    @property
    def log(self) -> str:
        """What the server has logged."""
        return (self.folder / "log").read_text()

    def end_sessions(self, which: str, *parameters: object, database: str = "postgres") -> None:
        """End the sessions of the ``pid`` that ``SELECT pid {which}`` returns, and wait until they have ended.

        PostgreSQL 13 has no pg_terminate_backend() that waits.
        """
        found = self.sql(f"SELECT pid, pg_terminate_backend(pid) {which}", *parameters, database=database)
        pids = [pid for pid, _ in found]
        left = "SELECT pid FROM pg_stat_activity WHERE pid = ANY(%s)"
        until(lambda: not pids or not self.sql(left, pids), "the sessions have ended")

    @contextmanager
    def standby(self) -> Iterator[PostgresServer]:
        """Yield a hot standby; both have been stopped for that."""
        with PostgresServer(fsync=False) as other:
            settings = (other.folder / "data/postgresql.conf").read_text()
            owner = (other.folder / "data").stat()
            other.stop()
            self.stop()
            shutil.rmtree(other.folder / "data")
            shutil.copytree(self.folder / "data", other.folder / "data")
            self.start()
            (other.folder / "data/postgresql.conf").write_text(settings)
            (other.folder / "data/postgresql.auto.conf").write_text(
                f"primary_conninfo = 'host=127.0.0.1 port={self.port} user=postgres'\n"
            )
            (other.folder / "data/standby.signal").touch()
            for each in (other.folder / "data", *(other.folder / "data").rglob("*")):
                os.chown(each, owner.st_uid, owner.st_gid)
            other.start()
            yield other

    @contextmanager
    def pooler(self, database: str, mode: str, *, sessions: int = 20) -> Iterator[str]:
        """Start PgBouncer before the server, and yield the URL of a database; ``mode`` is its ``pool_mode``."""
        program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None:
            if os.environ.get("CI"):
                pytest.fail(PGBOUNCER)
            pytest.skip(PGBOUNCER)
        (port,) = free_ports(1)
        settings = self.folder / f"pgbouncer-{port}.ini"
        settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={self.port} user=postgres\n[pgbouncer]\nauth_type = any\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\npool_mode = {mode}\n"
            f"default_pool_size = {sessions}\n"
        )
        process = subprocess.Popen([program, "--quiet", settings], stderr=subprocess.DEVNULL, **self._as)
        try:
            until(lambda: _listens(port), "PgBouncer listens")
            yield f"postgresql://postgres@127.0.0.1:{port}/{database}"
        finally:
            process.kill()
            process.wait()

    @contextmanager
    def database(self) -> Iterator[str]:
        """Yield the name of an empty database; remaining sessions of it are ended.

        A database of an earlier test is emptied, because that takes a fifth of the time of a new one.
        """
        if self._used:
            name = self._used.pop()
            self.end_sessions("FROM pg_stat_activity WHERE datname = %s", name)
            self.sql(f"ALTER DATABASE {name} RESET ALL")
            schema = "DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC"
            self.sql(schema, database=name)
        else:
            name = f"test_{next(self._names)}"
            self.sql(f"CREATE DATABASE {name}")
        yield name
        self._used.append(name)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Start a server for all tests of this run; none is a reason to skip them, but on CI a failure."""
    if os.environ.get("TESTS_WITHOUT_POSTGRES"):  # tox -e mutants: for each mutant, a server would start
        pytest.skip("TESTS_WITHOUT_POSTGRES is set")
    if find_binaries() is None:
        if os.environ.get("CI"):
            pytest.fail(HOW_TO_GET_IT)
        pytest.skip(HOW_TO_GET_IT)
    # A checkpoint or a look of autovacuum takes a transaction number now and then, for which a test may wait in vain.
    with PostgresServer(fsync=False, checkpoint_timeout="1d", autovacuum="off") as server:
        yield server
