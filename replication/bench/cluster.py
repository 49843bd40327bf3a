"""The measured databases: SQLite files and, if PostgreSQL is installed, a server; both in temporary folders.

PostgreSQL refuses to run as root, so root starts it as another user.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import count, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from replication.bench.daemons import database_in
from replication.bench.processes import BenchError
from replication.errors import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

POSTGRES: Final = "PostgreSQL"
CURE: Final = "apt-get install postgresql, or put initdb and pg_ctl on the PATH"
_DEBIAN: Final = Path("/usr/lib/postgresql")
_PORTS: Final = 10_000, 32_000  # the first, and the end
_PORTS_OF_ONE: Final = 250  # of one process
_SETTINGS: Final[Mapping[str, object]] = {"listen_addresses": "127.0.0.1", "shared_buffers": "64MB"}


def find_binaries() -> Path | None:
    """Return the folder of ``initdb`` and ``pg_ctl``: Debian's newest version, or else the one on the PATH."""
    versions = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda each: float(each.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which("initdb")
    return Path(found).resolve().parent if found else None


class Cluster:
    """A server on a free port of 127.0.0.1, to which every local user may connect as superuser ``postgres``.

    ``settings`` go into postgresql.conf.  BenchError if PostgreSQL is not installed, or does not start.
    """

    def __init__(self, **settings: object) -> None:
        binaries = find_binaries()
        if binaries is None:
            raise BenchError(f"PostgreSQL is missing: {CURE}")
        self._binaries = binaries
        self._as = _unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-", dir=_place(self._as)))
        if self._as:
            os.chown(self.folder, self._as["user"], self._as["group"])
        try:
            self._create()
            (self.port,) = free_ports(1)
            every = {**_SETTINGS, **settings, "port": self.port, "unix_socket_directories": self.folder}
            with (self.folder / "data/postgresql.conf").open("a") as file:
                file.writelines(f"{key} = '{value}'\n" for key, value in every.items())
            self.start()
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        """Return the running server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server and delete its folder."""
        self.remove()

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        self._run("pg_ctl", "start", "--wait", "--timeout=600", "--silent", f"--log={self.folder}/log")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: ``fast`` ends every session and shuts down cleanly; ``immediate`` is a crash."""
        self._run("pg_ctl", "stop", "--wait", "--timeout=600", "--silent", f"--mode={mode}")

    def remove(self) -> None:
        """Stop the server if it runs, and delete its folder."""
        if (self.folder / "data/postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)  # a killed server may still be deleting files

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        """Return the URL of a database."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def sql(self, sql: str, *parameters: object, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement outside any transaction, as superuser on a connection of its own."""
        import psycopg  # noqa: PLC0415 (an extra)

        with psycopg.connect(self.url(database), autocommit=True, application_name="test") as connection:
            cursor = connection.execute(sql, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def _create(self) -> None:
        """Make the data directory."""
        self._run("initdb", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), f"--pgdata={self.folder}/data", *arguments]
        done = subprocess.run(  # noqa: S603 (constant arguments)
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
            output = (done.stderr or b"").decode() + (log.read_text()[-2000:] if log.exists() else "")
            raise BenchError(f"{' '.join(command)}: exit status {done.returncode}\n{output}")


def _unprivileged() -> dict[str, Any]:
    """Return the arguments that make root's child process run as another user; none if this user is not root."""
    if os.geteuid():
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise BenchError("PostgreSQL does not run as root, and there is no user postgres or nobody")


def _place(other: Mapping[str, Any]) -> Path:
    """Return the folder for temporary folders; /tmp if the ``other`` user cannot enter it, as in root's home."""
    place = Path(tempfile.gettempdir())
    closed = other and not all(each.stat().st_mode & 1 for each in (place, *place.parents))
    return Path("/tmp") if closed else place  # noqa: S108 (mkdtemp makes it safe)


def free_ports(number: int) -> list[int]:
    """Return free ports of 127.0.0.1, below the range of ephemeral ports.

    No other process that calls this receives one of them while this one runs: a port may be used much later.
    """
    return list(islice((port for port in _ports() if _is_free(port)), number))


@cache
def _ports() -> Iterator[int]:
    """Return the ports of this process, again and again.

    It holds the port below them until it ends: that shows other processes that they are in use.
    """
    slots = range(*_PORTS, _PORTS_OF_ONE)
    for first in random.SystemRandom().sample(slots, len(slots)):
        try:
            socket.create_server(("127.0.0.1", first)).detach()
        except OSError:
            continue
        return cycle(range(first + 1, first + _PORTS_OF_ONE))
    raise BenchError(f"{len(slots)} processes use all ports from {_PORTS[0]} to {_PORTS[1]}")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class DatabaseKind(msgspec.Struct, frozen=True):
    """A kind of database; ``make`` returns the URL of an empty one."""

    name: str
    make: Callable[[], str]


@contextmanager
def database_kinds() -> Iterator[list[DatabaseKind]]:
    """Give the kinds of databases on this machine; without PostgreSQL, print the reason on standard error."""
    numbers = count(1)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="replication-bench-"))
        found = [DatabaseKind("SQLite", lambda: database_in(folder, f"bench{next(numbers)}"))]
        why = missing()
        if why:
            print(f"PostgreSQL is not measured: {why}", file=sys.stderr)
        else:
            cluster = stack.enter_context(Cluster())

            def make() -> str:
                name = f"bench{next(numbers)}"
                cluster.sql(f"CREATE DATABASE {name}")
                return cluster.url(name)

            found.append(DatabaseKind(POSTGRES, make))
        yield found


def missing() -> str | None:
    """Return why PostgreSQL cannot be measured, None if it can."""
    if find_binaries() is None:
        return f"it is not installed: {CURE}"
    if find_spec("psycopg") is None:
        return f"psycopg is not installed: {install_command('postgres')}"
    return None
