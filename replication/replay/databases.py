"""The two kinds of database that history is read from, opened for reading only; everything here blocks."""

from __future__ import annotations

import sqlite3
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

from replication.errors import ConfigError, StoreError
from replication.storage.gathered import table_of
from replication.storage.postgres_tables import relation_name
from replication.wire.grammar import InstanceName, StreamName

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from replication.storage.pages import Rows
    from replication.storage.postgres_session import PostgresSession
    from replication.streams.registry import Dialect, StreamDefinition
    from replication.wire.grammar import Token

FORMS: Final = "sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host:port/database"
PATIENCE: Final = 30  # seconds that SQLite waits for a lock, as of somebody who opens the file at the same time
BATCH_ROWS: Final = 16_384  # of SQLite: 2 MiB of common rows, 256 MiB of the longest that a line can hold
BATCH_BYTES: Final = 4 * 2**20  # of PostgreSQL
# The index has the order; to sort a million rows instead takes longer, and the server's memory.  And the session of a
# task would load and run a compiler for its one statement.
SETTINGS: Final = ("default_transaction_read_only = on", "enable_sort = off", "enable_bitmapscan = off", "jit = off")


class Position(NamedTuple):
    """How far one writer of a stream is, as the table counts."""

    stream: StreamName
    instance: InstanceName
    stream_id: int


class IPages(Protocol):
    """Tables of the application, as the store reads them."""

    def __call__(self, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page as ``IStreamStore.facts`` does, as columns."""
        ...


class IDatabase(Protocol):
    """A database opened for reading; StoreError names it."""

    name: str  # for people; it has no password in it
    dialect: Dialect

    def generic_table(self, definition: StreamDefinition) -> str:
        """Return what SQL calls a stream's own table."""
        ...

    def pages(self, definition: StreamDefinition) -> IPages:
        """Return what reads the application's tables of a stream; SchemaError if they cannot be read so."""
        ...

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        ...

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield what a query finds as Arrow batches, none of them empty."""
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
    raise ConfigError(f"database {name_of(url)!r}: write {FORMS}")


def name_of(url: str) -> str:
    """Return ``url`` without a password, and without options, of which one may be a password."""
    with suppress(ValueError):
        password = urlsplit(url).password
        if password:
            url = url.replace(f":{password}@", "@", 1)
    return url.partition("?")[0]


def open_database(url: str) -> IDatabase:
    """Open the database at a resolved URL; StoreError if it cannot be."""
    return SqliteDatabase(url) if url.startswith("sqlite:") else PostgresDatabase(url)


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

    dialect: Dialect = "sqlite"

    def __init__(self, url: str) -> None:
        self.name = url
        path = Path(url.removeprefix("sqlite:///"))
        if not path.is_file():
            raise StoreError(f"database {url!r}: there is no such file")
        self._target = f"{path.as_uri()}?mode=ro"
        with _refusals(self.name):
            self._database = sqlite3.connect(self._target, uri=True, timeout=PATIENCE, isolation_level=None)

    def generic_table(self, definition: StreamDefinition) -> str:
        """Return its name, quoted."""
        return f'"stream_{definition.name}"'

    def pages(self, definition: StreamDefinition) -> IPages:
        """Return the store's own code, on our connection."""
        table = table_of(definition)
        with _refusals(self.name):
            table.declare(self._database, may_create=False)

        def page(writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
            with _refusals(self.name):
                return table.rows(self._database, writer, after=after, upto=upto, limit=limit)

        return page

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with _refusals(self.name):
            return self._database.execute(sql).fetchall()

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Read with ADBC, whose types are those of the first batch: columns must not be NULL there."""
        from adbc_driver_sqlite import dbapi  # noqa: PLC0415 (only who needs it must have it)

        with _refusals(self.name), closing(dbapi.connect(self._target)) as connection:
            yield from _batches(
                connection,
                [f"PRAGMA busy_timeout = {PATIENCE * 1000}"],
                {"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)},
                sql,
            )

    def close(self) -> None:
        """Close the file."""
        self._database.close()


class PostgresDatabase:
    """A PostgreSQL database, with ADBC's driver, and with the store's for tables of the application."""

    dialect: Dialect = "postgresql"

    def __init__(self, url: str) -> None:
        self.name = name_of(url)
        self._url = url
        self._session: PostgresSession | None = None
        try:
            from adbc_driver_manager import AdbcConnection, dbapi  # noqa: PLC0415 (only who needs it must have it)

            with _refusals(self.name):
                server = _Server.at(url)
                self._connection = dbapi.Connection(server, AdbcConnection(server.database), autocommit=True)
        except ImportError as error:
            raise ConfigError(
                f"history in PostgreSQL needs {error.name}: pip install '.[spark]' in the checkout"
            ) from error

    def generic_table(self, definition: StreamDefinition) -> str:
        """Return its name, quoted; a long one is cut."""
        return f'"{relation_name(definition.name)}"'

    def pages(self, definition: StreamDefinition) -> IPages:
        """Return the store's own code, on a session of its own."""
        try:
            from replication.storage import postgres_gathered, postgres_session  # noqa: PLC0415 - its driver is an extra
        except ImportError as error:
            raise ConfigError(
                f"tables of an application in PostgreSQL need {error.name}: pip install '.[postgres]' in the checkout"
            ) from error
        if self._session is None:
            address, nobody = postgres_session.Address.parse(self._url), postgres_session.Holder()
            self._session = postgres_session.PostgresSession(
                address, Event(), nobody, {"default_transaction_read_only": "on"}
            )
        table = postgres_gathered.table_of(definition)
        table.declare(self._session, may_create=False)
        return partial(table.rows, self._session)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with _refusals(self.name), closing(self._connection.cursor()) as cursor:
            cursor.execute(sql)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            return found

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Read with ADBC, in the binary form of COPY."""
        with _refusals(self.name):
            settings = [f"SET {each}" for each in SETTINGS]
            yield from _batches(
                self._connection, settings, {"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)}, sql
            )

    def close(self) -> None:
        """End the sessions."""
        self._connection.close()
        if self._session is not None:
            self._session.close()


class _Server:
    """What ADBC asks a server of its types before anything else, for 50 ms: a task reads 40,000 rows meanwhile.

    So a process asks once.  No session is kept with the answer, and a server that was restarted is found again.
    """

    def __init__(self, url: str) -> None:
        from adbc_driver_postgresql import connect  # noqa: PLC0415 (see above)

        self.database = connect(url)

    @classmethod
    @cache
    def at(cls, url: str) -> Self:
        """Return the one at ``url``."""
        return cls(url)

    def close(self) -> None:
        """Stay: it is the connection that closes."""


def _batches(connection: Any, first: list[str], options: dict[str, str], sql: str) -> Iterator[pa.RecordBatch]:
    for statement in first:
        with closing(connection.cursor()) as cursor:
            cursor.execute(statement)
    with closing(connection.cursor()) as cursor:
        cursor.adbc_statement.set_options(**options)
        cursor.execute(sql)
        yield from (batch for batch in cursor.fetch_record_batch() if batch.num_rows)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Raise as StoreError what a driver raises; DB-API gives all of that a class called Error."""
    try:
        yield
    except Exception as error:
        if not any(each.__name__ == "Error" for each in type(error).__mro__):
            raise
        why = str(error).partition("\n")[0]
        raise StoreError(f"database {name!r}: {why}") from error
