"""A writer of the mapped table ``events``, and followers with copies; their configurations are in one folder."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tests.system.daemons import LOCAL, Daemon, run_command

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

MAPPING = """
[[streams]]
name = "events"
table = "events"
id_column = "id"
row = ["name"]
"""


class MappedCluster:
    """The folder and the database; ``sql`` runs a statement in the database. No process is started."""

    def __init__(self, folder: Path, url: str, sql: Callable[[str], object], *, streams: str = MAPPING) -> None:
        self.folder = folder
        self.sql = sql
        (folder / "master.toml").write_text(f'database = "{url}"\n{streams}')
        writes = 'connect = ["tcp:127.0.0.1:1"]\nwrites = ["events"]\ninstance_name = "master"'
        (folder / "writer.toml").write_text(f'database = "{url}"\n{writes}\n{streams}')

    def writer(self, *options: str, role: str = "master") -> Daemon:
        """Return a master or a worker that writes, not yet started."""
        return Daemon(self.folder, role, f"--config={'master' if role == 'master' else 'writer'}.toml", *options)

    def follower(self, name: str, wire: str, *sources: str) -> Daemon:
        """Return a worker with a copy, not yet started."""
        catch_up = [f"--catch-up={each}" for each in sources]
        options = [f"--instance-name={name}", f"--connect=tcp:{wire}", LOCAL[1]]
        return Daemon(self.folder, "worker", *options, *catch_up, name=name)

    def copy(self, name: str, stream: str = "events") -> list[tuple[int, str]]:
        """Return the IDs and the JSON of the rows that a worker has copied."""
        path = self.folder / f"replication-{name}.db"
        sql = f'SELECT stream_id, "row" FROM stream_{stream} ORDER BY stream_id, ord'
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
                return database.execute(sql).fetchall()
        except sqlite3.OperationalError:  # the database does not exist yet, or has no table
            return []

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this package."""
        return run_command("replication", *arguments, folder=self.folder)


@contextmanager
def on_postgres(folder: Path, server: PostgresServer, *, streams: str = MAPPING) -> Iterator[MappedCluster]:
    """Yield a cluster on PostgreSQL; its table is empty."""
    with server.database() as name:
        server.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)", database=name)
        yield MappedCluster(folder, server.url(name), partial(server.sql, database=name), streams=streams)


@contextmanager
def on_sqlite(folder: Path) -> Iterator[MappedCluster]:
    """Yield a cluster on SQLite; its table is empty."""
    with closing(sqlite3.connect(folder / "app.db", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, name TEXT)")
        yield MappedCluster(folder, f"sqlite:///{folder}/app.db", lambda sql: database.execute(sql).fetchall())
