"""The two kinds of database that history is read from, opened for reading only; everything here blocks."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from replication.errors import ConfigError, StoreError
from replication.wire.grammar import InstanceName, StreamName

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

FORMS: Final = "sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host:port/database"
PATIENCE: Final = 30  # seconds that SQLite waits for a lock, as of somebody who opens the file at the same time
BATCH_ROWS: Final = 16_384  # of SQLite: 2 MiB of common rows, 256 MiB of the longest that a line can hold
BATCH_BYTES: Final = 4 * 2**20  # of PostgreSQL


class Position(NamedTuple):
    """How far one writer of a stream is, as the table counts."""

    stream: StreamName
    instance: InstanceName
    stream_id: int


class IDatabase(Protocol):
    """A database opened for reading; StoreError names it."""

    url: str
    physical_order: str  # the column that says in which order rows were written

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        ...

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield what a query finds as Arrow batches, none of them empty."""
        ...

    def values(self, sql: str) -> Iterator[list[tuple[Any, ...]]]:
        """Yield what a query finds, some rows at a time, as the driver of the live path gives it."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def resolve_url(url: str) -> str:
    """Return ``url`` so that it means the same in another process; ConfigError if it names no database."""
    scheme, _, rest = url.partition("://")
    if scheme == "postgresql" and rest:
        return url
    if scheme == "sqlite" and rest.startswith("/") and rest != "/" and "?" not in rest:
        return f"sqlite:///{Path(rest[1:]).absolute()}"
    raise ConfigError(f"database {url!r}: write {FORMS}")


def open_database(url: str) -> IDatabase:
    """Open the database at a resolved URL; StoreError if it cannot be."""
    if url.startswith("sqlite:"):
        return SqliteDatabase(url)
    raise ConfigError(f"database {url!r}: write {FORMS}")


def read_positions(database: IDatabase) -> list[Position]:
    """Return how far every writer of every stream is, all at one moment; a position of nobody's is left out.

    A writer stores a position with its facts below which nothing of its own is open.
    """
    found = database.rows(
        "SELECT stream_name, instance_name, stream_id FROM stream_positions WHERE instance_name <> '' ORDER BY 1, 2"
    )
    return [Position(StreamName(stream), InstanceName(instance), stream_id) for stream, instance, stream_id in found]


class SqliteDatabase:
    """An SQLite file, with the standard library's driver and with ADBC's."""

    physical_order = "rowid"

    def __init__(self, url: str) -> None:
        self.url = url
        self._path = Path(url.removeprefix("sqlite:///"))
        if not self._path.is_file():
            raise StoreError(f"database {url!r}: there is no such file")
        self._target = f"{self._path.as_uri()}?mode=ro"
        with self._refusals():
            self._database = sqlite3.connect(self._target, uri=True, timeout=PATIENCE, isolation_level=None)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with self._refusals():
            return self._database.execute(sql).fetchall()

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Read with ADBC, whose types are those of the first batch: columns must not be NULL there."""
        from adbc_driver_sqlite import dbapi  # noqa: PLC0415 (only who needs it must have it)

        with (
            self._refusals(),
            closing(dbapi.connect(self._target)) as connection,
            closing(connection.cursor()) as cursor,
        ):
            cursor.execute(f"PRAGMA busy_timeout = {PATIENCE * 1000}")
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            cursor.execute(sql)
            yield from (batch for batch in cursor.fetch_record_batch() if batch.num_rows)

    def values(self, sql: str) -> Iterator[list[tuple[Any, ...]]]:
        """Read with the standard library."""
        with self._refusals(), closing(self._database.execute(sql)) as cursor:
            while rows := cursor.fetchmany(BATCH_ROWS):
                yield rows

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not _is_of_a_driver(error):
                raise
            why = str(error).partition("\n")[0]
            raise StoreError(f"database {self.url!r}: {why}") from error


def _is_of_a_driver(error: Exception) -> bool:
    """Whether a database's driver raised it; DB-API gives all of them a class called Error."""
    return any(each.__name__ == "Error" for each in type(error).__mro__)
