"""A real PostgreSQL of our own for tests: made in a temporary folder, and killed at will.

``tests/conftest.py`` has the fixture, so any test may ask for ``postgres``; a test's database is one of
``postgres.database()``.  Root starts the server as another user, since PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HOW_TO_GET_IT = "PostgreSQL is missing: apt-get install postgresql, or put initdb and pg_ctl on the PATH"
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "60",
    "shared_buffers": "64MB",
    "log_line_prefix": "%t %p %a ",
    "deadlock_timeout": "50ms",  # seconds pass before the default looks
}


def find_binaries() -> Path | None:
    """Return the folder of ``initdb`` and ``pg_ctl``: the newest that Debian has, or else that of the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda each: float(each.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which("initdb")
    return Path(found).resolve().parent if found else None


class PostgresServer:
    """A cluster of its own, on a free port of 127.0.0.1; anybody of this machine is its superuser, ``postgres``.

    Without ``fsync`` what was committed survives any kill of the server, but not of the machine: faster, and enough for
    most tests.
    """

    def __init__(self, *, fsync: bool = True, **settings: str) -> None:
        binaries = find_binaries()
        if binaries is None:
            raise FileNotFoundError(HOW_TO_GET_IT)
        self._binaries = binaries
        self._as: dict[str, Any] = _unprivileged()
        self._names = count(1)
        self._used: list[str] = []  # databases that nobody uses any more
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        if self._as:
            os.chown(self.folder, self._as["user"], self._as["group"])
        self.port = _free_port()
        every = {**_SETTINGS, **settings, "port": self.port, "unix_socket_directories": self.folder}
        every["fsync"] = "on" if fsync else "off"
        try:
            self._run("initdb", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
            with (self.folder / "data/postgresql.conf").open("a") as file:
                file.writelines(f"{key} = '{value}'\n" for key, value in every.items())
            access = self.folder / "data/pg_hba.conf"  # somebody who needs a password, to test wrong ones
            access.write_text(f"host all locked 127.0.0.1/32 scram-sha-256\n{access.read_text()}")
            self.start()
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it, and remove all traces."""
        self.remove()

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        self._run("pg_ctl", "start", "--wait", "--silent", f"--log={self.folder}/log")

    def stop(self, mode: str = "fast") -> None:
        """Stop it: ``fast`` ends every session and writes all out; ``immediate`` is a crash of all its processes."""
        self._run("pg_ctl", "stop", "--wait", "--silent", f"--mode={mode}")

    def restart(self, mode: str = "fast") -> None:
        """Stop it and start it again."""
        self.stop(mode)
        self.start()

    def remove(self) -> None:
        """Stop it if it runs, and delete its folder."""
        if (self.folder / "data/postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)  # a server that was killed may still take files away

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        """Return the URL of a database."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    @property
    def log(self) -> str:
        """What the server has logged."""
        return (self.folder / "log").read_text()

    def sql(self, sql: str, *parameters: object, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement outside any transaction, as superuser on a connection of its own."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True, application_name="test") as connection:
            cursor = connection.execute(sql, parameters or None)
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def database(self) -> Iterator[str]:
        """Return the name of a database with nothing in it; whoever still used it is thrown out.

        It is one that was used before, if there is: to empty it takes a fifth of the time.
        """
        if self._used:
            name = self._used.pop()
            users = f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{name}'"
            self.sql(f"{users}; ALTER DATABASE {name} RESET ALL")
            schema = "DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC"
            self.sql(schema, database=name)
        else:
            name = f"test_{next(self._names)}"
            self.sql(f"CREATE DATABASE {name}")
        yield name
        self._used.append(name)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), f"--pgdata={self.folder}/data", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # not a pipe: the server would keep it open
            stderr=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL,
            check=False,
            **self._as,
        )
        if done.returncode:
            log = self.folder / "log"
            said = (done.stderr or b"").decode() + (log.read_text()[-2000:] if log.exists() else "")
            raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{said}")


def _unprivileged() -> dict[str, Any]:
    """Return what makes a child of root another user; nothing for anybody else."""
    if os.geteuid():
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise RuntimeError("PostgreSQL does not run as root, and there is no user postgres or nobody here")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Start a server for all tests of this run; none is a reason to skip them, but on CI a failure."""
    if find_binaries() is None:
        if os.environ.get("CI"):
            pytest.fail(HOW_TO_GET_IT)
        pytest.skip(HOW_TO_GET_IT)
    with PostgresServer(fsync=False) as server:
        yield server
