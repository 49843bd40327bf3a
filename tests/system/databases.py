"""Databases of writers that tests back up, replace and empty."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.system.test_kills import table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.postgres import PostgresServer


class SqliteDatabase:
    """The master's database: a file, which is replaced while the master is stopped."""

    def __init__(self, folder: Path, stream: str = "orders") -> None:
        self.file, self.backup = folder / "replication.db", folder / "backup.db"
        self.stream = stream
        self.url = f"sqlite:///{self.file}"

    def back_up(self) -> None:
        """Make a backup while the master runs."""
        with closing(sqlite3.connect(self.file)) as source, closing(sqlite3.connect(self.backup)) as target:
            source.backup(target)

    def empty(self) -> None:
        """Delete everything."""
        for each in ("", "-wal", "-shm"):
            Path(f"{self.file}{each}").unlink(missing_ok=True)

    def restore(self) -> None:
        """Put the backup in place."""
        self.empty()
        self.file.write_bytes(self.backup.read_bytes())

    def rows(self) -> list[tuple[object, ...]]:
        """Return the rows of the stream."""
        return table(self.file, self.stream)

    def backup_rows(self) -> list[tuple[object, ...]]:
        """Return the rows of the stream in the backup."""
        return table(self.backup, self.stream)


class OpenFile(SqliteDatabase):
    """The backup is restored into the file that the master has open."""

    def restore(self) -> None:
        """Do what ``sqlite3 FILE ".restore COPY"`` does."""
        with closing(sqlite3.connect(self.backup)) as source, closing(sqlite3.connect(self.file)) as target:
            source.backup(target)


class PostgresDatabase:
    """The same in PostgreSQL: the backup is a copy of the database."""

    def __init__(self, server: PostgresServer, database: str, stream: str = "orders") -> None:
        self.server, self.database, self.backup = server, database, f"{database}_backup"
        self.stream = stream
        self.url = server.url(database)

    def back_up(self) -> None:
        """Make a backup while the master runs; its sessions are ended for that, and it connects again."""
        self._copy(self.database, self.backup)

    def restore(self) -> None:
        """Put the backup in place."""
        self._copy(self.backup, self.database)

    def _copy(self, source: str, target: str) -> None:
        self.server.sql(f"DROP DATABASE IF EXISTS {target} WITH (FORCE)")
        self.server.sql(f"ALTER DATABASE {source} ALLOW_CONNECTIONS false")
        self.server.end_sessions("FROM pg_stat_activity WHERE datname = %s", source)
        self.server.sql(f"CREATE DATABASE {target} TEMPLATE {source}")
        self.server.sql(f"ALTER DATABASE {source} ALLOW_CONNECTIONS true")

    def rows(self) -> list[tuple[object, ...]]:
        """Return the rows of the stream."""
        return self._rows(self.database)

    def backup_rows(self) -> list[tuple[object, ...]]:
        """Return the rows of the stream in the backup."""
        return self._rows(self.backup)

    def _rows(self, database: str) -> list[tuple[object, ...]]:
        sql = f"SELECT stream_id, ord, instance_name, row FROM stream_{self.stream} ORDER BY 1, 2"
        return self.server.sql(sql, database=database)


Database = SqliteDatabase | PostgresDatabase


def limit_files(server: PostgresServer, pids: Iterable[int], limit: str) -> None:
    """Limit how large a file these processes of the server may make, as the user whose they are."""
    folder = server.folder.stat()
    owner: dict[str, Any] = {"user": folder.st_uid, "group": folder.st_gid, "extra_groups": []}
    for pid in pids:
        command = ["prlimit", f"--pid={pid}", f"--fsize={limit}"]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL, **({} if os.geteuid() else owner))
